"""An environment of the verifiers package as an episode: its own loop, its own rubric, unchanged.

    row of the data    ->   environment.rollout   ->   state   ->   rubric   ->   reward, metrics
                            asks PolicyResponder

    rubric                              reward of an episode
    functions of one rollout            computed when the episode ends
    a function of several rollouts      computed when all episodes of the prompt have ended

The reward is the weighted sum of the rubric's functions. All functions, including functions of weight 0, are metrics.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from padfree.data.verifiers_rows import TOOLS, load_verifiers
from padfree.errors import UserError, shown_error
from padfree.rollout.environment.episode_policy import ChatTokenizer, Episode, Policy
from padfree.rollout.environment.group_rewards import GroupReward
from padfree.rollout.environment.responder import PolicyResponder
from padfree.rollout.environment.tool_calls import ToolCallParser
from padfree.rollout.environment.trajectory import Trajectory
from padfree.rollout.environment.verifiers_client import MODEL, client_class
from padfree.rollout.prompts import Prompt


def verifiers_episode(name: str) -> Episode:
    """Return the episode function of an environment such as `verifiers:wordle`."""
    environment = load_verifiers(name)
    if environment.provides_advantages:
        raise UserError(
            "rollout.environment",
            ": its rubric computes advantages, but padfree computes them from rewards (loss.advantage)",
            "use an environment whose rubric gives rewards",
            value=name,
        )
    if not environment.score_rollouts:
        raise UserError(
            "rollout.environment",
            ": it gives no rewards (score_rollouts is false)",
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
    assert tokenizer.chat is not None, "without a template, a request with tools is refused before"
    return ToolCallParser(tokenizer.chat)


def _numbers(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    return {name: float(value) for name, value in (metrics or {}).items() if isinstance(value, (int, float))}


def _check_state(state: Mapping[str, Any], failure: UserError | None, name: str) -> None:
    """Raise an error if the rollout failed, or if it gives rewards to single turns.

    An error of a tool that ends a rollout (`stop_errors`) is a result of the policy, and the rubric scores it.
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
            ": it gives rewards to single turns, but an episode has one reward",
            "give the reward of the whole rollout in the rubric",
            value=name,
        )


def _cause(error: BaseException) -> str:
    return "" if error.__cause__ is None else f": {shown_error(error.__cause__)}"
