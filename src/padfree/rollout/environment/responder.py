"""Samples responses for an environment that works with chat messages and runs in the process of the trainer.

The messages and tools of a request are encoded as token ids, and the policy samples a response. The episode keeps the
sampled ids and their log-probabilities. The environment gets the text as a message, with tool calls if it has any.

If the messages of a request continue an earlier response, the sampled ids of this response are kept (`Calls`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from padfree.data.conversation import Message
from padfree.errors import UserError
from padfree.rollout.environment.call_fields import CHAT, COMPLETIONS, check_fields, max_tokens_asked, messages_of
from padfree.rollout.environment.calls import Calls, Context
from padfree.rollout.environment.episode_policy import Host, Turn
from padfree.rollout.environment.listener import CallError
from padfree.rollout.environment.tool_calls import ToolCallParser
from padfree.rollout.environment.trajectory import Tree

TEXT = "text"
"""The value of "role" in messages of plain text. The prompt is then the concatenated text of all messages."""


class OverlongContextError(Exception):
    """Raised if the messages of a request are so long that no token is left for a response."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Responded:
    """A response of the policy to a request of an environment. `number`: its number in the episode, from 1 on."""

    context: Context
    turn: Turn
    answer: Message
    number: int


class PolicyResponder:
    """Samples the responses of one episode for an environment that keeps the conversation as messages."""

    def __init__(self, tree: Tree, host: Host, make_parser: Callable[[], ToolCallParser]) -> None:
        """`make_parser` returns the parser for tool calls. Only requests with tools need it."""
        self._tree, self._host, self._make_parser = tree, host, make_parser
        self._calls = Calls(tree, host)
        self._turns = 0
        self.failure: UserError | None = None  # an error that ends the episode even if the environment catches it

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
