"""The API calls of an agent program as branches of its episode.

    call 1   user: 2+3?                      context   <u>2+3?<a>                 encoded once
             assistant: <think>..</think>5   response  <think>..</think>5<e>      ids as sampled
    call 2   user, assistant: 5, user: +1?   rendered  <u>2+3?<a>5<e><u>+1?<a>    the template dropped the thought

<u> and <a> are the headers of a user's and an assistant's message, and <e> is the stop token. The messages of a call
are rendered as text. If the text starts with the context and response of an earlier call, the new branch continues from
the ids of that call, and only the new text is encoded. Otherwise the call starts a branch with newly encoded ids. Every
sample therefore consists of exactly the tokens that the model saw. The metrics count two cases: a cut, if the messages
continue an earlier call but the text does not (call 2 above), and a further conversation, if the messages do not
continue an earlier call.

The random key of a call depends on the ids of its context and on the number of earlier calls with the same ids. It does
not depend on time.
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
class _FinishedCall:
    """A finished API call of an agent: its context and its response."""

    text: str
    branch: Branch
    messages: Sequence[Message]  # the messages of the call, without the response; empty for a completion


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Context:
    """The input of a call: its token ids, and the branch that it continues."""

    ids: list[int]
    text: str
    messages: Sequence[Message] = ()
    parent: Branch | None = None  # the branch that this call continues with the ids `new`
    new: tuple[int, ...] = ()


class Calls:
    """The API calls of one episode, as branches of its tree."""

    def __init__(self, tree: Tree, host: Host) -> None:
        self._tree, self._host, self._chat_tokenizer = tree, host, host.chat_tokenizer
        self._finished: list[_FinishedCall] = []
        self._times: Counter[int] = Counter()  # number of calls, by hash of their context ids

    def of_messages(self, messages: Sequence[Message], tools: list[Any] | None) -> Context:
        """Return the context of a chat call with these messages and tools."""
        assert self._chat_tokenizer.chat is not None
        conversation = read_conversation(list(messages), "messages", tools=tools)
        context = self._of_text(self._chat_tokenizer.chat.prompt(conversation), conversation.messages, begun=True)
        expected = self._expected(conversation.messages)
        if expected is not None and (context.parent is None or len(context.parent.ids) < len(expected.branch.ids)):
            self._tree.count("cuts")
        elif context.parent is None and self._finished:
            self._tree.count("conversations")
        return context

    def of_prompt(self, prompt: str | Sequence[int]) -> Context:
        """Return the context of a completion call. `prompt`: a text, or token ids."""
        if isinstance(prompt, str):
            return self._of_text(prompt, (), begun=False)
        ids = list(prompt)
        if len(ids) > self._tree.limit:  # too long: the call will be rejected
            return Context(ids=ids, text="")
        parent = max(
            (one.branch for one in self._finished if one.branch.ids == ids[: len(one.branch.ids)]),
            key=lambda branch: len(branch.ids),
            default=None,
        )
        new = () if parent is None else tuple(ids[len(parent.ids) :])
        return Context(ids=ids, text=self._chat_tokenizer.decode(ids), parent=parent, new=new)

    def max_new_tokens(self, context: Context) -> int:
        return self._tree.limit - len(context.ids)

    async def respond(self, context: Context, max_new_tokens: int) -> Turn:
        """Sample a response of at most `max_new_tokens` tokens to a context, and add it to the episode."""
        branch = self._tree.begin(context.ids) if context.parent is None else self._tree.fork(context.parent)
        branch.add(context.new)
        digest = hashlib.sha256(np.array(context.ids, np.int64).tobytes()).digest()
        hashed = int.from_bytes(digest[:8], "little", signed=True)
        self._times[hashed] += 1
        path = (hashed, self._times[hashed])
        request = SamplingRequest(
            tokens=branch.tokens, max_new_tokens=max_new_tokens, key=turn_key(self._host.key, path)
        )
        response = await self._host.respond(path, request)
        branch.write(response)
        self._tree.count("calls")
        self._finished.append(
            _FinishedCall(
                text=context.text + self._chat_tokenizer.decode(response.tokens),
                branch=branch,
                messages=context.messages,
            )
        )
        written = response.tokens[:-1] if response.ended else response.tokens
        return Turn(tokens=response.tokens, text=self._chat_tokenizer.decode(written), ended=response.ended)

    def _of_text(self, text: str, messages: Sequence[Message], *, begun: bool) -> Context:
        check_encodable(text, "messages" if begun else "prompt")
        parent = max(
            (one for one in self._finished if text.startswith(one.text)), key=lambda one: len(one.text), default=None
        )
        if parent is None:
            ids = self._chat_tokenizer.encode_prompt(text, begun=begun)
            if not ids:
                raise UserError.of("the prompt has no tokens; give some text")
            return Context(ids=ids, text=text, messages=messages)
        new = tuple(self._chat_tokenizer.encode(text[len(parent.text) :]))
        return Context(ids=[*parent.branch.ids, *new], text=text, messages=messages, parent=parent.branch, new=new)

    def _expected(self, messages: Sequence[Message]) -> _FinishedCall | None:
        """Return the longest earlier call that these messages continue, or None.

        Messages continue a call if they begin with the messages of that call, followed by a response.
        """
        longest = None
        for one in self._finished:
            number = len(one.messages)
            continues = 0 < number < len(messages) and messages[number].get("role") == "assistant"
            if continues and list(messages[:number]) == list(one.messages):
                longest = one if longest is None or number >= len(longest.messages) else longest
        return longest
