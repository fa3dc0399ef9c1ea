"""What an episode has made: branches of token ids, and the leaves among them that become samples.

    prompt            p p p              root     p p p | a a E | t t | b b E        a, b sampled, t the environment's
    generate          a a E              mask     0 0 0   1 1 1   0 0   1 1 1
    add               t t                fork     p p p | a a E | u | c E            a branch behind the first turn
    generate          b b E              mask     0 0 0   1 1 1   0   1 1

Ids are appended and never encoded again. Every leaf is a sample of its own: its whole path, with the prefixes that it
shares with others. Those are computed once (`batch.share_prefixes`), and their gradient is the sum over the leaves.

A branch is a leaf if it has sampled tokens of its own and is not how another leaf begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from padfree.errors import UserError
from padfree.rollout.base import Response
from padfree.rollout.prompts import Prompt


class Branch:
    """One path of an episode: ids, which of them were sampled, by which weights, and their log-probabilities."""

    def __init__(self, tokens: NDArray[np.integer[Any]], *, path: tuple[int, ...] = (), parent: Branch | None = None):
        self._given = tokens  # the object that requests of one context share, as long as nothing is behind it
        self.ids: list[int] = tokens.tolist()
        self.sampled = [False] * len(self.ids)
        self.logprobs = [0.0] * len(self.ids)
        self.versions = [0] * len(self.ids)
        self.path, self.parent = path, parent
        self.fork = len(self.ids)  # where it left its parent; of a root: the prompt's length
        self.turns = self.num_branches = 0
        self.ended = False  # whether the last token is one that ends a response
        self.reward: float | None = None
        self.answer: str | None = None

    @property
    def tokens(self) -> NDArray[np.integer[Any]]:
        """[n]; the same object for every branch at this place."""
        if len(self._given) != len(self.ids):
            self._given = np.array(self.ids, dtype=np.int64)
        return self._given

    def write(self, response: Response) -> None:
        """Append what was sampled."""
        self._append(response.tokens.tolist(), True, response.logprobs.tolist(), response.token_versions.tolist())
        self.turns += 1
        self.ended = response.ended

    def add(self, ids: Sequence[int]) -> None:
        """Append what the environment says."""
        self._append(list(ids), False, [0.0] * len(ids), [0] * len(ids))
        self.ended = self.ended and not ids

    def _append(self, ids: list[int], sampled: bool, logprobs: list[float], versions: list[int]) -> None:
        self.ids += ids
        self.sampled += [sampled] * len(ids)
        self.logprobs += logprobs
        self.versions += versions

    def branch(self, at: int | None = None) -> Branch:
        """A further path from here on, or from where there were `at` tokens."""
        tokens = self.tokens if at is None else self.tokens[:at]
        child = Branch(tokens, path=(*self.path, self.num_branches), parent=self)
        child.sampled, child.logprobs = self.sampled[: len(tokens)], self.logprobs[: len(tokens)]
        child.versions = self.versions[: len(tokens)]
        child.ended = self.ended and len(tokens) == len(self.ids)
        self.num_branches += 1
        return child

    @property
    def has_own(self) -> bool:
        """Whether it has sampled tokens that its parent has not."""
        return any(self.sampled[self.fork :])


class Tree:
    """The branches of one episode. Its first is that of the prompt; calls of an agent may begin others."""

    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt
        self.root = Branch(prompt.tokens)
        self.branches = [self.root]
        self.counts: dict[str, float] = {}  # of what happened, for the metrics of the batch
        self.failure: UserError | None = None  # of what serves the episode: it fails, whatever it returns

    @property
    def limit(self) -> int:
        """Tokens that a sample may have."""
        return len(self.prompt)

    def fork(self, branch: Branch, at: int | None = None) -> Branch:
        self.branches.append(branch.branch(at))
        return self.branches[-1]

    def begin(self, tokens: Sequence[int]) -> Branch:
        """A branch with another beginning than the prompt."""
        self.branches.append(Branch(np.array(tokens, dtype=np.int64), path=(-len(self.branches),)))
        return self.branches[-1]

    def count(self, name: str, number: float = 1.0) -> None:
        self.counts[name] = self.counts.get(name, 0.0) + number

    def leaves(self) -> list[Branch]:
        kept = [branch for branch in self.branches if branch.has_own]
        inner = {(id(branch.parent), branch.fork) for branch in kept}
        return [branch for branch in kept if (id(branch), len(branch.ids)) not in inner]


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """What an episode returns: see `Policy.trajectory`. `reward` is that of every leaf without one of its own."""

    tree: Tree
    reward: float | None = None
    answer: str | None = None  # what a reward function judges in the place of what was written
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Leaf:
    """A path that becomes a sample. Travels between ranks."""

    tokens: NDArray[np.int64]  # [n]
    sampled: NDArray[np.bool_]  # [n]
    logprobs: NDArray[np.float32]  # [n], 0 where nothing was sampled
    versions: NDArray[np.int64]  # [n] of the weights that wrote each token, 0 where nothing was sampled
    ended: bool
    turns: int
    text: str  # behind the prompt
    reward: float | None = None  # None: a reward model judges it when the batch is complete
    answer: str | None = None  # what is judged in the place of `text`


def leaf_of(branch: Branch, text: str, reward: float | None, answer: str | None = None) -> Leaf:
    return Leaf(
        tokens=np.array(branch.ids, dtype=np.int64),
        sampled=np.array(branch.sampled, dtype=np.bool_),
        logprobs=np.array(branch.logprobs, dtype=np.float32),
        versions=np.array(branch.versions, dtype=np.int64),
        ended=branch.ended,
        turns=turns_of(branch),
        text=text,
        reward=reward,
        answer=answer,
    )


def leaf_of_response(prompt: Prompt, response: Response, text: str) -> Leaf:
    """The leaf of an episode of one turn."""
    before = len(prompt.tokens)
    return Leaf(
        tokens=np.concatenate([prompt.tokens, response.tokens]),
        sampled=np.arange(before + len(response.tokens)) >= before,
        logprobs=np.concatenate([np.zeros(before, np.float32), response.logprobs]),
        versions=np.concatenate([np.zeros(before, np.int64), response.token_versions]),
        ended=response.ended,
        turns=1,
        text=text,
    )


def turns_of(branch: Branch) -> int:
    """Stretches of sampled tokens."""
    sampled = np.array([False, *branch.sampled])
    return int((sampled[1:] & ~sampled[:-1]).sum())
