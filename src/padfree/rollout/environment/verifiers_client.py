"""The policy as a client of the verifiers package: each request of an environment becomes a turn of the episode.

    environment                     PolicyResponder                    episode
    messages, tools            ->   context as token ids          ->   sampled from the policy
    message with tool calls    <-   text of the sampled ids       <-   ids, log-probabilities

The environment keeps its conversation as messages, and the episode keeps token ids (`Calls`): a request that continues
an earlier response continues from the sampled ids.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from padfree.data.conversation import Message
from padfree.data.verifiers_rows import openai_tool
from padfree.errors import UserError
from padfree.rollout.environment.call_fields import CHAT, COMPLETIONS, check_fields, max_tokens_asked, messages_of
from padfree.rollout.environment.calls import Calls, Context
from padfree.rollout.environment.episode_policy import Host, Turn
from padfree.rollout.environment.listener import CallError
from padfree.rollout.environment.tool_calls import ToolCallParser
from padfree.rollout.environment.trajectory import Tree

MODEL = "policy"
TEXT = "text"
"""The role of a message that is plain text, for environments without a chat template."""


class OverlongContextError(Exception):
    """Raised if a request leaves no room for a response."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Responded:
    """A response of the policy to a request of an environment. `number`: the number of the response, from 1."""

    context: Context
    turn: Turn
    answer: Message
    number: int


class PolicyResponder:
    """Samples the responses of one episode."""

    def __init__(self, tree: Tree, host: Host, make_parser: Callable[[], ToolCallParser]) -> None:
        """`make_parser` returns the parser for tool calls; it is called if a request has tools."""
        self._tree, self._host, self._make_parser = tree, host, make_parser
        self._calls = Calls(tree, host)
        self._turns = 0
        self.failure: UserError | None = None  # raised again after the environment has caught it

    async def respond(
        self, prompt: list[dict[str, Any]], arguments: Mapping[str, Any], tools: list[dict[str, Any]] | None
    ) -> Responded:
        """Sample a response to messages in OpenAI's format. `arguments`: the sampling arguments of the environment."""
        try:
            return await self._respond(prompt, dict(arguments), tools)
        except CallError as error:
            self.failure = UserError("rollout.environment", str(error), "change the environment")
            raise self.failure from None
        except UserError as error:
            self.failure = error
            raise

    async def _respond(
        self, prompt: list[dict[str, Any]], arguments: dict[str, Any], tools: list[dict[str, Any]] | None
    ) -> Responded:
        fields = {**(arguments.pop("extra_body", None) or {}), **arguments}
        plain = all(message["role"] == TEXT for message in prompt)
        asked: dict[str, Any] = {"messages": prompt, **({"tools": tools} if tools else {})}
        if plain:
            asked = {"prompt": "".join(message["content"] for message in prompt)}
        body = {name: value for name, value in fields.items() if value is not None} | asked
        if body.get("n", 1) != 1:
            raise CallError(400, f"the environment asks for {body['n']} responses at once; ask for one")
        if check_fields(body, COMPLETIONS if plain else CHAT, self._host.temperature):
            self._tree.count("sampling_overridden")
        if plain:
            context = self._calls.of_prompt(body["prompt"])
        elif self._host.chat_tokenizer.chat is None:
            raise UserError(
                "data.prompt_format",
                "uses no chat template, but the environment sends messages",
                "set data.prompt_format=chat, and data.chat_template if the tokenizer has no template",
            )
        else:
            context = self._calls.of_messages(messages_of(body["messages"]), body.get("tools"))
        most = self._calls.max_new_tokens(context)
        if most < 1:
            raise OverlongContextError("the context exceeds the maximum length of a sample")
        parser = self._make_parser() if tools else None
        self._turns += 1
        number, answer = self._turns, Message()

        def parse(text: str) -> Message:
            answer.update({"role": "assistant", "content": text} if parser is None else parser.message(text, number))
            return answer

        turn = await self._calls.respond(context, int(min(most, max_tokens_asked(body))), parse)
        return Responded(context=context, turn=turn, answer=answer, number=number)


@cache
def client_class() -> Callable[[PolicyResponder], Any]:
    """Return the subclass of the package's `Client` that asks a `PolicyResponder`. This imports the package."""
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
            """Nothing to check: the policy always answers."""

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
            """Nothing to close: the episode ends with its trajectory."""

    return PolicyClient


def openai_message(message: Any) -> dict[str, Any]:
    """Return a message of the package, an object or a dictionary, in OpenAI's format."""
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
