"""What an episode is given: asks for tokens, adds its own, branches.

    async def episode(prompt: Prompt, policy: Policy) -> Trajectory:
        turn = await policy.generate()              sampled, trained on
        policy.add("= 24\\n")                        the environment's words, not trained on
        await policy.generate()
        return policy.trajectory(reward=1.0)

Draws follow from the seed, the batch, the response and the place of the turn in the tree (`noise.turn_key`), so that
it does not matter which episode is fast. The first turn of an episode draws what a rollout without an environment does.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from padfree.data.chat_renderer import ChatRenderer
from padfree.data.conversation import read_conversation
from padfree.data.encode import Encoder, Passage, Piece
from padfree.data.records import RowError, shown
from padfree.errors import UserError
from padfree.rollout.base import Response, SamplingRequest
from padfree.rollout.environment.trajectory import Branch, Trajectory, Tree
from padfree.rollout.prompts import Prompt
from padfree.rollout.sampling_rng import turn_key
from padfree.rollout.token_ids import checked_ids

MARK = "\u2e28reply\u2e29"
"""Stands for a response where a chat template shows what it writes behind one."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Turn:
    """What the policy wrote at a time. `ended`: with a token that ends a response; else there was no more room."""

    tokens: NDArray[np.int64]
    text: str  # without the token that ended it
    ended: bool


class ChatTokenizer:
    """A tokenizer as environments need it: text to ids and back, and what a chat template writes between turns."""

    def __init__(self, tokenizer: Any, chat: ChatRenderer | None, vocabulary: int) -> None:
        """`vocabulary`: rows of the model's embedding matrix; the tokenizer may know more tokens, or fewer."""
        self._tokenizer, self.chat, self.vocabulary = tokenizer, chat, vocabulary
        self._prompts = Encoder(tokenizer, append_eos=False)

    def encode_prompt(self, text: str, *, begun: bool) -> list[int]:
        """As prompts of the data are: with what begins a text, unless it is there already."""
        (found,) = self._prompts.encode([Passage(pieces=(Piece(text, False),), begun=begun)])
        assert not isinstance(found, RowError)
        return self.checked(found.tokens, "model.tokenizer")

    def encode(self, text: str) -> list[int]:
        """Without what begins a text; control tokens that stand in it are control tokens."""
        return self.checked(self._tokenizer(text, add_special_tokens=False)["input_ids"], "model.tokenizer")

    def checked(self, ids: Any, what: str) -> list[int]:
        """Ids from outside as a list; refused unless the model has embeddings for all of them."""
        return checked_ids(ids, self.vocabulary, what)

    def decode(self, tokens: Sequence[int] | NDArray[np.integer[Any]]) -> str:
        """As it was written, control tokens too."""
        ids = tokens.tolist() if isinstance(tokens, np.ndarray) else [int(token) for token in tokens]
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def between(self, content: str, role: str, end: str) -> str:
        """What stands between two responses where the first one ended with `end` and this was said behind it."""
        if self.chat is None:
            return content
        messages = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": MARK},
            {"role": role, "content": content},
        ]
        if MARK not in self.chat.render(messages, generation_prompt=True):
            raise UserError(
                "data.chat_template",
                "it leaves earlier responses out, so that nothing can be added behind one",
                "give a template that keeps them",
            )
        rendered = self.chat.prompt(read_conversation(messages, "messages"))
        return rendered.partition(MARK)[2].removeprefix(end)


class Host(Protocol):
    """Who runs an episode, as its policies see it."""

    chat_tokenizer: ChatTokenizer
    key: int

    def respond(self, place: tuple[int, ...], request: SamplingRequest) -> Awaitable[Response]:
        """The response to a request; `place` orders those of an episode that are sampled together."""

    def serve(self, tree: Tree) -> Awaitable[str]:
        """The address at which the policy answers as OpenAI's interface does, for this episode alone."""


class Policy:
    """One branch of an episode."""

    def __init__(self, tree: Tree, branch: Branch, host: Host) -> None:
        self.tree, self._branch, self._host = tree, branch, host
        self._asked = False
        self._full = False

    @property
    def prompt(self) -> Prompt:
        return self.tree.prompt

    @property
    def tokens(self) -> NDArray[np.int64]:
        """[n] of this branch, the prompt's among them."""
        return np.array(self._branch.ids, dtype=np.int64)

    @property
    def loss_mask(self) -> NDArray[np.bool_]:
        """[n] which of them were sampled, and are trained on."""
        return np.array(self._branch.sampled, dtype=np.bool_)

    @property
    def text(self) -> str:
        """All behind the prompt, the environment's words too, without a token that ends it."""
        ids = self._branch.ids[len(self.prompt.tokens) :]
        return self._host.chat_tokenizer.decode(ids[:-1] if self._branch.ended else ids)

    @property
    def max_new_tokens(self) -> int:
        """Tokens that this branch can still take, of `rollout.max_new_tokens` in all."""
        return 0 if self._full else self.tree.limit - len(self._branch.ids)

    @property
    def reward(self) -> float | None:
        """Of this branch; None: that of the trajectory."""
        return self._branch.reward

    @reward.setter
    def reward(self, value: float) -> None:
        self._branch.reward = value

    async def generate(self, max_tokens: int | None = None) -> Turn:
        """Let the policy write behind what is there. Without room it writes nothing."""
        if self._asked:
            raise UserError(
                "rollout.environment", "two calls of generate at a time on one branch", "take policy.branch() for each"
            )
        if max_tokens is not None and (type(max_tokens) is bool or not isinstance(max_tokens, (int, np.integer))):
            raise UserError("rollout.environment", f"generate with max_tokens {shown(max_tokens)}", "give an integer")
        if max_tokens is not None and max_tokens < 1:
            raise UserError("rollout.environment", f"generate with max_tokens {max_tokens}", "give 1 or more")
        max_new_tokens = self.max_new_tokens if max_tokens is None else int(min(max_tokens, self.max_new_tokens))
        if max_new_tokens < 1:
            return Turn(tokens=np.zeros(0, np.int64), text="", ended=False)
        branch, self._asked = self._branch, True
        try:
            key = turn_key(self._host.key, (*branch.path, branch.turns))
            request = SamplingRequest(tokens=branch.tokens, max_new_tokens=max_new_tokens, key=key)
            response = await self._host.respond((*branch.path, branch.turns), request)
        finally:
            self._asked = False
        branch.write(response)
        written = response.tokens[:-1] if response.ended else response.tokens
        return Turn(tokens=response.tokens, text=self._host.chat_tokenizer.decode(written), ended=response.ended)

    def add(self, chat_tokenizer: str | Sequence[int] | NDArray[np.integer[Any]]) -> bool:
        """Append words or ids of the environment. False: there is no room, nothing is added, and none is left."""
        known = self._host.chat_tokenizer
        ids = (
            known.encode(chat_tokenizer)
            if isinstance(chat_tokenizer, str)
            else known.checked(chat_tokenizer, "rollout.environment: add")
        )
        if len(ids) > self.max_new_tokens:
            self._full = True
            return False
        self._branch.add(ids)
        return True

    def reply(self, content: str, role: str = "user") -> bool:
        """The same, as the chat template writes a message between two responses; as it stands without a template."""
        branch = self._branch
        end = self._host.chat_tokenizer.decode(branch.ids[-1:]) if branch.ended else ""
        return self.add(self._host.chat_tokenizer.between(content, role, end))

    def branch(self) -> Policy:
        """A further path from here on, with draws of its own."""
        child = Policy(self.tree, self.tree.fork(self._branch), self._host)
        child._full = self._full
        return child

    async def base_url(self) -> str:
        """An address with OpenAI's interface for a program: what it asks there becomes part of the trajectory."""
        return await self._host.serve(self.tree)

    def trajectory(
        self,
        reward: float | None = None,
        *,
        answer: str | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> Trajectory:
        """All leaves of the episode, with this reward where a branch has none of its own.

        Without any reward `rollout.reward` judges the text of each leaf, or `answer`. `metrics` are averaged over the
        episodes of a batch, as `environment/...`.
        """
        return Trajectory(tree=self.tree, reward=reward, answer=answer, metrics=dict(metrics or {}))


Episode = Callable[[Prompt, Policy], Awaitable[Trajectory]]
