"""The result of an episode: token sequences (branches) that share prefixes, and therefore form a tree.

In this example, the model responds to the prompt p p p with a a E, where E is the stop token. The environment then
continues once with the text t t and once with the text u, and the model responds to both:

    sample 1     p p p | a a E | t t | b b E
    loss mask    0 0 0   1 1 1   0 0   1 1 1

    sample 2     p p p | a a E | u | c E
    loss mask    0 0 0   1 1 1   0   1 1

Token ids are only appended: the text of earlier tokens is never tokenised again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from padfree.errors import UserError
from padfree.images import Image, truncated_images
from padfree.kept_sets import KeptSets
from padfree.rollout.base import Response
from padfree.rollout.environment.group_rewards import GroupReward
from padfree.rollout.group import Leaf, LeafImages, kept_fields
from padfree.rollout.prompts import Prompt
from padfree.routes import Routes, merged_routes

NO_IDS = np.zeros(0, np.int32)
"""An empty array: the kept set (ids from which a token was sampled) of a token that was not sampled, or that was
sampled from the whole vocabulary.
"""


class Branch:
    """A path through the tree of an episode.

    Each token has an id, a log-probability, a policy version, and a flag that says whether it was sampled.
    """

    def __init__(
        self,
        tokens: NDArray[np.integer[Any]],
        *,
        path: tuple[int, ...] = (),
        parent: Branch | None = None,
        images: tuple[Image, ...] = (),
    ):
        self.images = images  # in the order of their placeholder tokens
        self._array = tokens  # cached, so that requests with the same context share one array object
        self.ids: list[int] = tokens.tolist()
        self.sampled = [False] * len(self.ids)
        self.logprobs = [0.0] * len(self.ids)
        self.versions = [0] * len(self.ids)
        self.routes: Routes | None = None  # of the first tokens of the branch, if the sampler records routes
        self.kept = [NO_IDS] * len(self.ids)  # for each token, its list in `KeptSets`
        self.path, self.parent = path, parent
        self.fork = len(self.ids)  # number of tokens shared with its parent; for a root, the length of the prompt
        self.turns = self.num_branches = 0
        self.ended = False  # whether the last token is a stop token
        self.reward: float | None = None
        self.answer: str | None = None

    @property
    def tokens(self) -> NDArray[np.integer[Any]]:
        """The token ids of the branch, [n]. Branches with equal tokens return the same array object."""
        if len(self._array) != len(self.ids):
            self._array = np.array(self.ids, dtype=np.int64)
        return self._array

    def write(self, response: Response) -> None:
        """Append the tokens of a sampled response.

        `response.routes` (the experts of each token) also covers the tokens before the response. It sets the experts of
        an earlier token only if they are still unknown.
        """
        self.routes = merged_routes(self.routes, response.routes, len(self.ids) + len(response.tokens))
        kept = [NO_IDS] * len(response.tokens) if response.kept is None else response.kept.arrays()
        self._append(response.tokens.tolist(), True, response.logprobs.tolist(), response.token_versions.tolist(), kept)
        self.turns += 1
        self.ended = response.ended

    def add(self, ids: Sequence[int], images: Sequence[Image] = ()) -> None:
        """Append token ids that the environment wrote. They are not trained on.

        `images`: the images that the ids show. Their positions count from the first of the ids.
        """
        start = len(self.ids)
        self.images += tuple(replace(image, positions=image.positions + start) for image in images)
        self._append(list(ids), False, [0.0] * len(ids), [0] * len(ids), [NO_IDS] * len(ids))
        self.ended = self.ended and not ids

    def _append(
        self, ids: list[int], sampled: bool, logprobs: list[float], versions: list[int], kept: list[NDArray[np.int32]]
    ) -> None:
        self.ids += ids
        self.sampled += [sampled] * len(ids)
        self.logprobs += logprobs
        self.versions += versions
        self.kept += kept

    def branch(self, at: int | None = None) -> Branch:
        """Return a new branch that starts with the first `at` tokens of this one; None: with all of its tokens."""
        tokens = self.tokens if at is None else self.tokens[:at]
        path, images = (*self.path, self.num_branches), truncated_images(self.images, len(tokens))
        child = Branch(tokens, path=path, parent=self, images=images)
        child.sampled, child.logprobs = self.sampled[: len(tokens)], self.logprobs[: len(tokens)]
        child.versions, child.kept = self.versions[: len(tokens)], self.kept[: len(tokens)]
        child.routes = None if self.routes is None else self.routes[: len(tokens)]
        child.ended = self.ended and len(tokens) == len(self.ids)
        self.num_branches += 1
        return child

    @property
    def has_own(self) -> bool:
        """Whether the branch (a path through the tree) has sampled tokens that its parent branch does not have."""
        return any(self.sampled[self.fork :])


class Tree:
    """All token sequences (branches) of one episode.

    A root is a branch that was not split from another branch. The first root starts with the prompt. A call of an agent
    program that does not continue an earlier call starts another root.
    """

    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt
        self.root = Branch(prompt.tokens, images=prompt.images)
        self.branches = [self.root]
        self.counts: dict[str, float] = {}  # event counters, for the metrics of the batch
        self.failure: UserError | None = None  # an error of the gateway: the episode fails even if it returns normally

    @property
    def limit(self) -> int:
        """Maximum number of tokens of a sample."""
        return len(self.prompt)

    def has_new_images(self, branch: Branch) -> bool:
        """Return whether the images of a branch (a token sequence of the episode) differ from those of the prompt."""
        return [id(image) for image in branch.images] != [id(image) for image in self.prompt.images]

    def fork(self, branch: Branch, at: int | None = None) -> Branch:
        self.branches.append(branch.branch(at))
        return self.branches[-1]

    def begin(self, tokens: Sequence[int]) -> Branch:
        """Add and return a new token sequence that starts with `tokens` instead of the prompt."""
        self.branches.append(Branch(np.array(tokens, dtype=np.int64), path=(-len(self.branches),)))
        return self.branches[-1]

    def count(self, name: str, number: float = 1.0) -> None:
        self.counts[name] = self.counts.get(name, 0.0) + number

    def leaves(self) -> list[Branch]:
        """Return the branches that become samples: those with a reward, and those that end in sampled tokens.

        A branch without a reward needs sampled tokens of its own, and must not be continued by another such branch.
        """
        kept = [branch for branch in self.branches if branch.has_own or branch.reward is not None]
        continued: set[int] = set()
        for branch in kept:
            fork, parent = branch.fork, branch.parent
            while parent is not None:
                if len(parent.ids) == fork:
                    continued.add(id(parent))
                fork, parent = min(fork, parent.fork), parent.parent
        return [branch for branch in kept if branch.reward is not None or id(branch) not in continued]


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """The result of an episode, made by `Policy.trajectory`.

    `reward`: the reward of each sample for which the episode set no other reward (`Policy.reward`).
    """

    tree: Tree
    reward: float | None = None
    answer: str | None = None  # the text that the reward function gets, instead of the text of the leaf
    metrics: Mapping[str, float] = field(default_factory=dict)
    group_reward: GroupReward | None = None  # a reward that needs all episodes of the prompt, in place of `reward`


def leaf_of(
    branch: Branch, text: str, reward: float | None, answer: str | None = None, *, images: LeafImages | None = None
) -> Leaf:
    """Convert a branch (a token sequence of an episode) to a `Leaf`, which becomes a sample.

    `text`: the decoded tokens after the prompt. `reward`: None if a reward model computes it later. `images`: None
    for the images of the prompt.
    """
    return Leaf(
        images=images,
        tokens=np.array(branch.ids, dtype=np.int64),
        sampled=np.array(branch.sampled, dtype=np.bool_),
        logprobs=np.array(branch.logprobs, dtype=np.float32),
        versions=np.array(branch.versions, dtype=np.int64),
        **kept_fields(KeptSets.of_arrays(branch.kept)),
        ended=branch.ended,
        turns=turns_of(branch),
        text=text,
        reward=reward,
        answer=answer,
        routes=merged_routes(branch.routes, None, len(branch.ids)),
    )


def turns_of(branch: Branch) -> int:
    """Return the number of turns in a branch (a token sequence of an episode).

    A turn is a run of consecutive sampled tokens.
    """
    sampled = np.array([False, *branch.sampled])
    return int((sampled[1:] & ~sampled[:-1]).sum())
