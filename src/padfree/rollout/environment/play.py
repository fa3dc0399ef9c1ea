"""An episode to play, what became of it, and who is told of it meanwhile.

Play       number 7, prompt, key      -> EpisodeRunner, or ResponseWriter where an episode is one response ->
Played     number 7, leaves or a failure
Watcher    progress, responses that have arrived, episodes that have ended
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from padfree.rollout.base import Response
from padfree.rollout.environment.trajectory import Leaf
from padfree.rollout.prompts import Prompt


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Play:
    """An episode to play: its number in the batch, the key of its draws, and the part of a response that is there."""

    number: int
    prompt: Prompt
    key: int
    begun: Response | None = None  # of one response, whole or not: a checkpoint or the journal had it


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Played:
    """What became of an episode. With a failure it has no leaves."""

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
        """Sampled tokens of all leaves. A token that two leaves share counts twice."""
        return sum(int(leaf.sampled.sum()) for leaf in self.leaves)

    @property
    def versions(self) -> NDArray[np.int64]:
        """Of the weights that wrote its sampled tokens, of all leaves together."""
        return np.concatenate([np.zeros(0, np.int64), *(leaf.versions[leaf.sampled] for leaf in self.leaves)])

    @property
    def ended(self) -> bool:
        return bool(self.leaves) and all(leaf.ended for leaf in self.leaves)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Watcher:
    """Callbacks while episodes are played. Threads of the sampler, of rewards and of the event loop call them."""

    on_progress: Callable[[int], None] = lambda done: None
    """Called with the number of responses that are finished so far."""

    on_responses: Callable[[Sequence[tuple[int, Response]]], None] = lambda responses: None
    """Called with numbers and responses that came together, each whole or as far as it was written when weights came.

    Episodes of an environment do not call it: half an episode cannot be continued.
    """

    on_played: Callable[[Played], None] = lambda played: None
    on_failed: Callable[[str], None] = lambda line: None
    """Called with the message of what has ended all of them."""
