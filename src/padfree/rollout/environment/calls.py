"""Turn the API calls of an agent program into token sequences, the branches of its episode (`Branch`).

The chat template renders the messages of a call as text. If this text begins with the text of an earlier call and its
response, the token ids of the earlier call are kept, and only the text after them is encoded. Otherwise, the call
begins a new branch. A sample therefore has exactly the tokens that the model saw.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from padfree.data.conversation import Conversation, Message, read_conversation
from padfree.data.records import check_encodable
from padfree.errors import UserError
from padfree.rollout.base import SamplingRequest
from padfree.rollout.environment.episode_policy import MARK, Host, Turn
from padfree.rollout.environment.trajectory import Branch, Tree
from padfree.rollout.sampling_rng import turn_key


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _FinishedCall:
    """A finished API call of an agent: its context and its response."""

    text: str
    branch: Branch
    messages: Sequence[Message]  # the messages of the call, without the response; empty for a completion
    answer: Message | None = None  # the response as the program received it, if it was parsed
    end: str = ""  # the text of the stop token, if the response has one


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Context:
    """The input of an API call: its token ids, and the branch of the episode that the call continues, if any."""

    ids: list[int]
    text: str
    messages: Sequence[Message] = ()
    parent: Branch | None = None  # the branch that this call continues with the ids `new`
    new: tuple[int, ...] = ()


class Calls:
    """Turns the API calls of one episode into branches of the episode's tree of token ids."""

    def __init__(self, tree: Tree, host: Host) -> None:
        self._tree, self._host, self._chat_tokenizer = tree, host, host.chat_tokenizer
        self._finished: list[_FinishedCall] = []
        self._times: Counter[int] = Counter()  # number of calls with the same context, by a hash of its token ids

    def of_messages(self, messages: Sequence[Message], tools: list[Any] | None) -> Context:
        """Return the input of a chat call. The token ids of the earlier call that it continues are kept if possible."""
        assert self._chat_tokenizer.chat is not None
        conversation = read_conversation(list(messages), "messages", tools=tools)
        context = self._of_text(self._chat_tokenizer.chat.prompt(conversation), conversation.messages, begun=True)
        expected = self._expected(conversation.messages)
        if expected is not None and (context.parent is None or len(context.parent.ids) < len(expected.branch.ids)):
            joined = self._joined(expected, conversation, context.text)
            if joined is not None:
                return joined
            self._tree.count("cuts")  # the call continues an earlier call, whose token ids cannot be kept
        elif context.parent is None and self._finished:
            self._tree.count("conversations")  # the call continues no earlier call
        return context

    def of_prompt(self, prompt: str | Sequence[int]) -> Context:
        """Return the input of a completion call: see `of_messages`. `prompt`: a text, or token ids."""
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

    async def respond(
        self, context: Context, max_new_tokens: int, parse: Callable[[str], Message] | None = None
    ) -> Turn:
        """Sample a response of at most `max_new_tokens` tokens to a context, and add it to the episode.

        `parse` turns the text of the response into the message that the program receives.
        """
        branch = self._tree.begin(context.ids) if context.parent is None else self._tree.fork(context.parent)
        branch.add(context.new)
        digest = hashlib.sha256(np.array(context.ids, np.int64).tobytes()).digest()
        hashed = int.from_bytes(digest[:8], "little", signed=True)
        self._times[hashed] += 1
        # The random key depends on the context and on the number of calls with this context, but not on time.
        path = (hashed, self._times[hashed])
        request = SamplingRequest(
            tokens=branch.tokens, max_new_tokens=max_new_tokens, key=turn_key(self._host.key, path)
        )
        response = await self._host.respond(path, request)
        branch.write(response)
        self._tree.count("calls")
        written = response.tokens[:-1] if response.ended else response.tokens
        turn = Turn(tokens=response.tokens, text=self._chat_tokenizer.decode(written), ended=response.ended)
        self._finished.append(
            _FinishedCall(
                text=context.text + self._chat_tokenizer.decode(response.tokens),
                branch=branch,
                messages=context.messages,
                answer=None if parse is None else _as_read(parse(turn.text)),
                end=self._chat_tokenizer.decode(response.tokens[-1:]) if response.ended else "",
            )
        )
        return turn

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
        """Return the earlier call that `messages` continue, or None. Of several such calls, return the longest.

        `messages` continue a call if they begin with the messages of that call, followed by a response.
        """
        longest, best = None, (0, False)
        for one in self._finished:
            number = len(one.messages)
            continues = 0 < number < len(messages) and messages[number].get("role") == "assistant"
            if continues and list(messages[:number]) == list(one.messages):
                rank = number, one.answer == messages[number]
                if rank >= best:
                    longest, best = one, rank
        return longest

    def _joined(self, earlier: _FinishedCall, conversation: Conversation, text: str) -> Context | None:
        """Return the input of a call that sends the response of `earlier` back as a parsed message (e.g. a tool call).

        The sampled ids of the response are kept, and only the text after the message is encoded. Return None if this is
        not possible. `text`: the rendered messages of the new call.
        """
        assert self._chat_tokenizer.chat is not None
        number = len(earlier.messages)
        if earlier.answer is None or conversation.messages[number] != earlier.answer:
            return None
        chat, tools = self._chat_tokenizer.chat, conversation.tools
        marked = [*conversation.messages[:number], {"role": "assistant", "content": MARK}]
        until = chat.render(conversation.messages[: number + 1], tools)
        _, mark, closing = chat.render(marked, tools).rpartition(MARK)
        if not mark or not until.endswith(closing) or not text.startswith(until):
            return None
        new = self._chat_tokenizer.encode(closing.removeprefix(earlier.end) + text[len(until) :])
        parent = earlier.branch
        return Context(
            ids=[*parent.ids, *new],
            text=earlier.text + closing.removeprefix(earlier.end) + text[len(until) :],
            messages=conversation.messages,
            parent=parent,
            new=tuple(new),
        )


def _as_read(answer: Message) -> Message:
    """Return `answer`, a message that the policy wrote, in the form in which the chat template gets it."""
    asked = {"role": "user", "content": "?"}
    return read_conversation([asked, dict(answer)], "messages").messages[-1]
