"""Calls of a program that talks to the policy through OpenAI's interface, as branches of its episode.

    call 1   user: 2+3?                      seen      <u>2+3?<a>                 ids encoded once
             assistant: <think>..</think>5             <think>..</think>5<e>      ids as they were sampled
    call 2   user, assistant: 5, user: +1?   rendered  <u>2+3?<a>5<e><u>+1?<a>    the template leaves the thought out

A call's messages are rendered as text. If that begins with the text of what the model has seen and written, the ids go
on from there: only what is new is encoded. If it does not, the call begins a branch with ids of its own, so that every
sample is what the model saw. Where the messages go on from an earlier call and the text does not, that is counted as a
cut; where they do not, as a further conversation.

What is drawn for a call follows from the ids before it and from how many times these were asked for, and not from when.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from padfree.data.conversation import Message, read_conversation
from padfree.data.records import check_encodable
from padfree.errors import UserError
from padfree.rollout.base import SamplingRequest
from padfree.rollout.environment.episode_policy import Host, Turn
from padfree.rollout.environment.trajectory import Branch, Tree
from padfree.rollout.sampling_rng import turn_key


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Seen:
    """What the model has seen and written after a call."""

    text: str
    branch: Branch
    messages: Sequence[Message]  # of the call, without its response; none of a call without messages


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Context:
    """What a call shows to the model."""

    ids: list[int]
    text: str
    messages: Sequence[Message] = ()
    seen: Branch | None = None  # that it goes on from, with `new` ids behind it
    new: tuple[int, ...] = ()


class Calls:
    """The calls of one episode."""

    def __init__(self, tree: Tree, host: Host) -> None:
        self._tree, self._host, self._chat_tokenizer = tree, host, host.chat_tokenizer
        self._seen: list[_Seen] = []
        self._times: Counter[int] = Counter()

    def of_messages(self, messages: Sequence[Message], tools: list[Any] | None) -> Context:
        """The context of a chat call."""
        assert self._chat_tokenizer.chat is not None
        conversation = read_conversation(list(messages), "messages", tools=tools)
        context = self._of_text(self._chat_tokenizer.chat.prompt(conversation), conversation.messages, begun=True)
        expected = self._expected(conversation.messages)
        if expected is not None and (context.seen is None or len(context.seen.ids) < len(expected.branch.ids)):
            self._tree.count("cuts")
        elif context.seen is None and self._seen:
            self._tree.count("conversations")
        return context

    def of_prompt(self, prompt: str | Sequence[int]) -> Context:
        """The context of a completion: text, or ids as they are."""
        if isinstance(prompt, str):
            return self._of_text(prompt, (), begun=False)
        ids = list(prompt)
        if len(ids) > self._tree.limit:  # for which there is no room: nothing more needs to be known of it
            return Context(ids=ids, text="")
        found = max(
            (one.branch for one in self._seen if one.branch.ids == ids[: len(one.branch.ids)]),
            key=lambda branch: len(branch.ids),
            default=None,
        )
        new = () if found is None else tuple(ids[len(found.ids) :])
        return Context(ids=ids, text=self._chat_tokenizer.decode(ids), seen=found, new=new)

    def max_new_tokens(self, context: Context) -> int:
        return self._tree.limit - len(context.ids)

    async def respond(self, context: Context, max_new_tokens: int) -> Turn:
        """What the policy writes to it."""
        branch = self._tree.begin(context.ids) if context.seen is None else self._tree.fork(context.seen)
        branch.add(context.new)
        digest = hashlib.sha256(np.array(context.ids, np.int64).tobytes()).digest()
        mark = int.from_bytes(digest[:8], "little", signed=True)
        self._times[mark] += 1
        place = (mark, self._times[mark])
        request = SamplingRequest(
            tokens=branch.tokens, max_new_tokens=max_new_tokens, key=turn_key(self._host.key, place)
        )
        response = await self._host.respond(place, request)
        branch.write(response)
        self._tree.count("calls")
        self._seen.append(
            _Seen(
                text=context.text + self._chat_tokenizer.decode(response.tokens),
                branch=branch,
                messages=context.messages,
            )
        )
        written = response.tokens[:-1] if response.ended else response.tokens
        return Turn(tokens=response.tokens, text=self._chat_tokenizer.decode(written), ended=response.ended)

    def _of_text(self, text: str, messages: Sequence[Message], *, begun: bool) -> Context:
        check_encodable(text, "messages" if begun else "prompt")
        found = max(
            (one for one in self._seen if text.startswith(one.text)), key=lambda one: len(one.text), default=None
        )
        if found is None:
            ids = self._chat_tokenizer.encode_prompt(text, begun=begun)
            if not ids:
                raise UserError.of("the prompt has no tokens; give some text")
            return Context(ids=ids, text=text, messages=messages)
        new = tuple(self._chat_tokenizer.encode(text[len(found.text) :]))
        return Context(ids=[*found.branch.ids, *new], text=text, messages=messages, seen=found.branch, new=new)

    def _expected(self, messages: Sequence[Message]) -> _Seen | None:
        """The longest earlier call whose messages these begin with, a response behind them."""
        found = None
        for one in self._seen:
            number = len(one.messages)
            goes_on = 0 < number < len(messages) and messages[number].get("role") == "assistant"
            if goes_on and list(messages[:number]) == list(one.messages):
                found = one if found is None or number >= len(found.messages) else found
        return found
