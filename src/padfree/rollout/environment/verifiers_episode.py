"""Play an environment of the verifiers package as an episode, with the environment's own loop and reward functions.

The environment's `rollout` receives a row of the data, and asks a `PolicyResponder` for the responses. Then the
environment's rubric (its set of reward functions) computes the reward.

A rubric that compares several rollouts is applied when all episodes of the prompt have ended. The reward is the
weighted sum of the functions' results. Each result is also a metric.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

from padfree.data.verifiers_rows import TOOLS, load_verifiers, openai_tool
from padfree.errors import UserError, shown_error
from padfree.rollout.environment.episode_policy import ChatTokenizer, Episode, Policy
from padfree.rollout.environment.group_rewards import GroupReward
from padfree.rollout.environment.responder import OverlongContextError, PolicyResponder, Responded
from padfree.rollout.environment.tool_calls import ToolCallParser
from padfree.rollout.environment.trajectory import Trajectory
from padfree.rollout.prompts import Prompt

MODEL = "policy"


def verifiers_episode(name: str) -> Episode:
    """Return the coroutine function that plays an episode of an environment such as `verifiers:wordle`."""
    environment = load_verifiers(name)
    if environment.provides_advantages:
        raise UserError(
            "rollout.environment",
            ": its rubric (the scoring functions) returns advantages, but loss.advantage needs rewards",
            "use an environment whose rubric returns rewards",
            value=name,
        )
    if not environment.score_rollouts:
        raise UserError(
            "rollout.environment",
            ": the environment gives no rewards, because its score_rollouts is false",
            "set score_rollouts to true",
            value=name,
        )
    grouped = bool(environment.requires_group_rollouts)
    client = client_class()

    async def episode(prompt: Prompt, policy: Policy) -> Trajectory:
        host = policy.host
        given = {key: value for key, value in prompt.row.items() if key != TOOLS}
        asks = PolicyResponder(policy.tree, host, lambda: _parser_of(host.chat_tokenizer))
        state = await environment.rollout(given, client(asks), MODEL, dict(environment.sampling_args))
        _check_state(state, asks.failure, name)
        if grouped:
            return policy.trajectory(group_reward=GroupReward(result=state, score=score_group))
        (result,) = await score([state])
        return policy.trajectory(reward=result[0], metrics=result[1])

    async def score(states: Sequence[Any]) -> list[tuple[float, Mapping[str, float]]]:
        for state in states:
            await environment.rubric.score_rollout(state)
        return await finished(states)

    async def score_group(states: Sequence[Any]) -> list[tuple[float, Mapping[str, float]]]:
        await environment.rubric.score_group(list(states))
        return await finished(states)

    async def finished(states: Sequence[Any]) -> list[tuple[float, Mapping[str, float]]]:
        for state in states:
            await environment.rubric.cleanup(state)
        return [(float(state["reward"]), _numbers(state["metrics"])) for state in states]

    return episode


@lru_cache(maxsize=2)
def _parser_of(tokenizer: ChatTokenizer) -> ToolCallParser:
    assert tokenizer.chat is not None, "a request with tools was not refused, although the run has no chat template"
    return ToolCallParser(tokenizer.chat)


def _numbers(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    return {name: float(value) for name, value in (metrics or {}).items() if isinstance(value, (int, float))}


def _check_state(state: Mapping[str, Any], failure: UserError | None, name: str) -> None:
    """Raise an error if the rollout failed, or if the environment gives rewards to single turns.

    A rollout that ended with a tool error (`stop_errors` in verifiers) has not failed. It gets a reward as usual.
    """
    if failure is not None:
        raise failure
    error = state.get("error")
    tool_error = importlib.import_module("verifiers.errors").ToolError
    if error is not None and not isinstance(error, tool_error):
        raise RuntimeError(f"{shown_error(error)}{_cause(error)}")
    if any(step.get("reward") is not None or step.get("advantage") is not None for step in state["trajectory"]):
        raise UserError(
            "rollout.environment",
            ": the environment gives rewards to single turns, but an episode has one reward",
            "give the reward of the whole rollout in the rubric",
            value=name,
        )


def _cause(error: BaseException) -> str:
    return "" if error.__cause__ is None else f": {shown_error(error.__cause__)}"


@cache
def client_class() -> Callable[[PolicyResponder], Any]:
    """Return a subclass of the class `Client` of the verifiers package. The call imports the package.

    The subclass asks a `PolicyResponder`, i.e. the policy in this process, and not a server.
    """
    clients, errors, types = (importlib.import_module(f"verifiers.{name}") for name in ("clients", "errors", "types"))

    class PolicyClient(clients.Client):  # type: ignore[misc, name-defined]  # the package is optional
        def setup_client(self, config: Any) -> Any:
            raise AssertionError("the client is made from a PolicyResponder")

        async def to_native_tool(self, tool: Any) -> dict[str, Any]:
            return openai_tool(tool)

        async def to_native_prompt(self, messages: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
            return [openai_message(message) for message in messages], {}

        async def get_native_response(
            self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **kwargs: Any
        ) -> Responded:
            try:
                found: Responded = await self.client.respond(prompt, sampling_args, tools)
            except OverlongContextError as error:
                raise errors.OverlongPromptError(str(error)) from error
            return found

        async def raise_from_native_response(self, response: Responded) -> None:
            """Do nothing, because there is no server that could have reported an error."""

        async def from_native_response(self, response: Responded) -> Any:
            turn, answer = response.turn, response.answer
            called = [types.ToolCall(id=call["id"], **call["function"]) for call in answer.get("tool_calls", ())]
            before, written = len(response.context.ids), len(turn.tokens)
            return types.Response(
                id=f"{MODEL}-{response.number}",
                created=int(time.time()),
                model=MODEL,
                usage=types.Usage(
                    prompt_tokens=before,
                    reasoning_tokens=0,
                    completion_tokens=written,
                    total_tokens=before + written,
                ),
                message=types.ResponseMessage(
                    content=answer["content"] or (None if called else ""),
                    tool_calls=called or None,
                    finish_reason="tool_calls" if called else "stop" if turn.ended else "length",
                    is_truncated=not turn.ended,
                ),
            )

        async def close(self) -> None:
            """Do nothing, because the policy is in this process and there is no connection to close."""

    return PolicyClient


def openai_message(message: Any) -> dict[str, Any]:
    """Return a message of the verifiers package, which is an object or a dict, as a dict in OpenAI's format."""
    given = message if isinstance(message, Mapping) else message.model_dump()
    kept = {key: value for key, value in given.items() if value is not None and value != []}
    kept.pop("thinking_blocks", None)
    if "tool_calls" in kept:
        kept["tool_calls"] = [_openai_call(call) for call in kept["tool_calls"]]
    return kept


def _openai_call(call: Mapping[str, Any]) -> Mapping[str, Any]:
    if "function" in call:
        return call
    function = {"name": call["name"], "arguments": call["arguments"]}
    return {"id": call["id"], "type": "function", "function": function}
