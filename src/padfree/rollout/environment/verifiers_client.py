"""The policy as a client of the verifiers package: the package's messages and tools in OpenAI's format, and back."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from padfree.data.verifiers_rows import openai_tool
from padfree.rollout.environment.responder import OverlongContextError, PolicyResponder, Responded

MODEL = "policy"


@cache
def client_class() -> Callable[[PolicyResponder], Any]:
    """Return the subclass of the package's `Client` that calls a `PolicyResponder`. This imports the package."""
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
