"""An episode to play, its result, and callbacks.

Play       an episode to play: by `EpisodeRunner` with an environment, by `ResponseWriter` without one
Played     the result of an episode: leaves (sequences that become samples) or a failure
Watcher    callbacks for progress, responses and finished episodes
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from padfree.rollout.base import Response
from padfree.rollout.environment.group_rewards import PlayGroup
from padfree.rollout.environment.trajectory import Leaf
from padfree.rollout.prompts import Prompt


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Play:
    """An episode to play: its number in the batch, its prompt and its random key."""

    number: int
    prompt: Prompt
    key: int
    group: PlayGroup | None = None  # the episodes of the prompt, for rewards that need all of them
    partial: Response | None = None  # a response, complete or partial, from a checkpoint or the response log


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Played:
    """The result of an episode: its leaves, i.e. the sequences that become samples. A failed episode has none."""

    number: int
    leaves: tuple[Leaf, ...] = ()
    failure: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    counts: Mapping[str, float] = field(default_factory=dict)

    @property
    def rewards(self) -> tuple[float, ...]:
        """Rewards of the leaves that have one."""
        return tuple(leaf.reward for leaf in self.leaves if leaf.reward is not None)

    @property
    def reward(self) -> float:
        """Mean reward of the leaves; 0 if the episode failed."""
        return sum(self.rewards) / max(len(self.rewards), 1)

    @property
    def num_tokens(self) -> int:
        """Number of sampled tokens of all leaves. A token that two leaves share counts twice."""
        return sum(int(leaf.sampled.sum()) for leaf in self.leaves)

    @property
    def versions(self) -> NDArray[np.int64]:
        """Policy versions of the sampled tokens of all leaves."""
        return np.concatenate([np.zeros(0, np.int64), *(leaf.versions[leaf.sampled] for leaf in self.leaves)])

    @property
    def ended(self) -> bool:
        return bool(self.leaves) and all(leaf.ended for leaf in self.leaves)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Watcher:
    """Callbacks while episodes are played. Threads of the sampler, of rewards and of the event loop call them."""

    on_progress: Callable[[int], None] = lambda done: None
    """Called with the number of responses finished so far."""

    on_responses: Callable[[Sequence[tuple[int, Response]]], None] = lambda responses: None
    """Called with (episode number, response) pairs. A response is partial if a weight sync interrupted it.

    Not called for episodes of an environment, because a partial episode cannot be continued.
    """

    on_played: Callable[[Played], None] = lambda played: None
    on_failed: Callable[[str], None] = lambda line: None
    """Called with the message of an error that ends all episodes."""
