"""A batch between `put` and `take` of the collector, and the outcomes of its episodes.

For a batch with 3 episodes for each of the prompts p and q:

    groups      (p p p) (q q q)        episodes 0 1 2 | 3 4 5, divided over all ranks (`owners_of`)
    outcomes    0 1 0   1 1 1          rewards by episode number; every rank knows those of all ranks
    signal      yes     no             whether the rewards of a group differ
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from padfree.errors import UserError
from padfree.rollout.base import Response
from padfree.rollout.collect.candidates import Candidates
from padfree.rollout.collect.group import RolloutGroup
from padfree.rollout.environment.play import Play, Played
from padfree.rollout.environment.tokens import Gather
from padfree.rollout.prompts import Prompt

RewardModel = Callable[[Sequence[tuple[Prompt, str]]], "list[float | str]"]
"""Takes this rank's (prompt, response text) pairs; returns a reward or an error message for each. Collective."""


@dataclass(frozen=True, slots=True)
class EpisodeOutcome:
    """The result of an episode, known to every rank."""

    rewards: tuple[float, ...]
    failure: str | None
    num_tokens: int  # sampled tokens
    ended: bool

    @property
    def reward(self) -> float:
        """Mean reward of the leaves; 0 if the episode failed."""
        return sum(self.rewards) / max(len(self.rewards), 1)


@dataclass(kw_only=True, slots=True, eq=False)
class QueuedBatch:
    """A batch between `put` and `take`. The episodes of this rank are keyed by their number in the batch."""

    batch: int
    candidates: Candidates
    version: int  # the policy version at which the batch is trained
    plays: list[Play] = field(default_factory=list)  # episodes for `take` to play (staleness 0)
    missing: set[int] = field(default_factory=set)  # episodes that are not finished
    partial: dict[int, Response] = field(default_factory=dict)  # the tokens sampled so far of unfinished episodes
    played: dict[int, Played] = field(default_factory=dict)

    def take_plays(self) -> list[Play]:
        plays, self.plays = self.plays, []
        return plays


def owners_of(groups: Sequence[RolloutGroup], requested: range, world: int) -> list[list[int]]:
    """Divide the episodes of the requested groups over `world` ranks. Return the episode numbers of each rank."""
    first = groups[requested.start].first if requested else 0
    parts = divided([(len(groups[index]), len(groups[index].prompt.tokens)) for index in requested], world)
    return [[first + offset for offset in part] for part in parts]


def divided(groups: Sequence[tuple[int, int]], world: int) -> list[list[int]]:
    """Divide responses over `world` ranks. Return the response numbers of each rank.

    `groups`: (number of responses, number of prompt tokens) of each group. The shares of two ranks differ by at most
    one response, and a group is split only at the end of a share. Groups with prompts of similar length go to different
    ranks, so that every rank gets prompts of all lengths.

    For example, 3 groups of 2 responses hold the response numbers 0 1 | 2 3 | 4 5. With two ranks and prompts of equal
    length, rank 0 gets 0 1 4 and rank 1 gets 5 2 3.
    """
    firsts = np.cumsum([0, *(count for count, _ in groups)])
    by_length = sorted(range(len(groups)), key=lambda group: (groups[group][1], group))
    dealt = [group for rank in range(world) for group in by_length[rank::world]]
    order = [int(firsts[group]) + member for group in dealt for member in range(groups[group][0])]
    return [part.tolist() for part in np.array_split(np.array(order, dtype=np.int64), world)]


def outcomes_of(queued: QueuedBatch) -> dict[int, EpisodeOutcome]:
    """Return the outcomes of this rank's episodes, by number."""
    return {
        number: EpisodeOutcome(one.rewards, one.failure, one.num_tokens, one.ended)
        for number, one in queued.played.items()
    }


def signals_of(candidates: Candidates, outcomes: Mapping[int, EpisodeOutcome]) -> dict[int, bool]:
    """Return, for each requested group, whether its rewards differ."""
    signal = {}
    for index, group in enumerate(candidates.groups[: candidates.num_requested]):
        signal[index] = len({reward for number in group.numbers for reward in outcomes[number].rewards}) > 1
    return signal


def merged(parts: Iterable[Mapping[int, EpisodeOutcome]]) -> dict[int, EpisodeOutcome]:
    """Return the outcomes of all ranks in one mapping."""
    return {number: one for part in parts for number, one in part.items()}


def score_by_model(reward_model: RewardModel, queued: QueuedBatch, gather: Gather, *, skip_failures: bool) -> None:
    """Compute a reward for each leaf on this rank that does not have a reward yet. Collective.

    Without `skip_failures`, an error on one rank is raised on all ranks.
    """
    prompts = {number: group.prompt for group in queued.candidates.groups for number in group.numbers}
    played = [one for one in queued.played.values() if len(one.rewards) < len(one.leaves)]
    pairs = [(prompts[one.number], leaf.answer or leaf.text) for one in played for leaf in one.leaves]
    rewards = iter(reward_model(pairs))
    first_error = None
    for one in played:
        values = [next(rewards) for _ in one.leaves]
        failure = next((value for value in values if isinstance(value, str)), None)
        first_error = first_error or failure
        leaves = tuple(
            replace(leaf, reward=value)
            for leaf, value in zip(one.leaves, values, strict=True)
            if not isinstance(value, str)
        )
        failed = Played(number=one.number, failure=failure)
        queued.played[one.number] = failed if failure is not None else replace(one, leaves=leaves)
    for message in gather(None if skip_failures else first_error):
        if message is not None:
            raise UserError.of(message)
