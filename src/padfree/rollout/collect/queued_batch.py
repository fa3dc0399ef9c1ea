"""A batch that the collector has queued: its groups, their episodes, and which groups are trained on.

`rollout.filter` replaces a group whose rewards are all equal by a spare group, which has another prompt of the data. In
this example, a batch has 3 groups with 2 responses each:

    group      0     1     2     3 (spare)
    rewards    0 1   0 0   0 1   1 0
    trained    yes   no    yes   yes

A batch samples at most `rollout.filter_bound` times as many groups as it trains on. If too few of them differ in their
rewards, groups with equal rewards complete the batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from padfree.config.rollout import RolloutConfig
from padfree.errors import UserError
from padfree.record.file_names import FAILURES
from padfree.rollout.base import Response
from padfree.rollout.group import Play, Played, RolloutGroup
from padfree.rollout.prompts import Prompt
from padfree.rollout.response_log import ResponseLog
from padfree.rollout.sampling_rng import response_keys

_SPARE = 1 << 40  # added to the batch number, so that the order of spare prompts uses random keys of its own


@dataclass(frozen=True, slots=True)
class EpisodeOutcome:
    """The result of an episode, known to every rank."""

    rewards: tuple[float, ...]
    failure: str | None
    num_tokens: int  # sampled tokens
    ended: bool

    @property
    def reward(self) -> float:
        """The mean reward of the episode's leaves (the sequences that become samples); 0 if the episode failed."""
        return sum(self.rewards) / max(len(self.rewards), 1)


Outcomes = Mapping[int, EpisodeOutcome]
"""The outcomes of episodes of a batch, by the number of the episode in the batch."""


Stored = tuple[int, int, Played | Response]
"""What a checkpoint stores of an episode: (batch number, episode number, the finished episode or partial response)."""


class QueuedBatch:
    """A batch that is being sampled: its groups of prompts, and the episodes that this rank plays for them.

    `groups` lists the groups that were read from the data, then spare groups (`rollout.filter`). The first
    `num_requested` groups have been requested from the sampler.
    """

    def __init__(
        self,
        batch: int,
        own: Sequence[RolloutGroup],  # the groups read from the data
        settings: RolloutConfig,
        *,
        version: int,  # the policy version at which the batch is trained
        prompts: Sequence[Prompt] = (),  # all prompts of the run, from which `rollout.filter` takes replacements
        seed: int = 0,  # determines the order of the replacements
        cursor: Mapping[str, Any] | None = None,  # the position in the data before the batch
    ) -> None:
        self.batch, self.version, self.cursor, self._settings = batch, version, cursor, settings
        self.groups: list[RolloutGroup] = []
        for group in own:
            self._append(group)
        self._wanted, self._filtered = len(own), settings.filter != "none"
        self._spare: list[Prompt] = []
        if self._filtered:
            num_spare = math.ceil(self._wanted * settings.filter_bound) - self._wanted
            self._spare = _spare_prompts(prompts, own, seed, batch)[:num_spare]
        self.num_requested = 0
        self.plays: list[Play] = []  # episodes for `take` to play (staleness 0)
        self.missing: set[int] = set()  # numbers of the episodes that are not finished
        self.partial: dict[int, Response] = {}  # by episode number: the tokens of unfinished responses so far
        self.played: dict[int, Played] = {}  # by episode number

    @property
    def requested(self) -> Sequence[RolloutGroup]:
        """The groups that have been requested from the sampler so far."""
        return self.groups[: self.num_requested]

    def prompts(self) -> dict[int, Prompt]:
        """Return the prompts of the episodes, by episode number."""
        return {number: group.prompt for group in self.groups for number in group.numbers}

    def request_first(self) -> list[RolloutGroup]:
        """Return the groups to request first. If the filter needs further groups, `request_more` returns them."""
        return self._request(self._wanted)

    def request_more(self, outcomes: Outcomes) -> list[RolloutGroup]:
        """Return the groups to request next; an empty list if the batch needs no further groups.

        `outcomes`: the results of all episodes requested so far.
        """
        return self._request(self._wanted - sum(self._signals(outcomes))) if self._filtered else []

    def _request(self, num_groups: int) -> list[RolloutGroup]:
        if num_groups <= 0:
            return []
        first = self.num_requested
        last = first + math.ceil(num_groups * self._settings.oversample)
        self.num_requested = min(last, self._wanted + len(self._spare))
        for prompt in self._spare[len(self.groups) - self._wanted : self.num_requested - self._wanted]:
            self._append(RolloutGroup(prompt=prompt, size=self._settings.samples_per_prompt))
        return self.groups[first : self.num_requested]

    def _append(self, group: RolloutGroup) -> None:
        first = self.groups[-1].numbers.stop if self.groups else 0
        self.groups.append(replace(group, first=first))

    def take_plays(self) -> list[Play]:
        plays, self.plays = self.plays, []
        return plays

    def own_outcomes(self) -> dict[int, EpisodeOutcome]:
        """Return the outcomes (rewards or failure) of this rank's finished episodes, by episode number."""
        return {
            number: EpisodeOutcome(one.rewards, one.failure, one.num_tokens, one.ended)
            for number, one in self.played.items()
        }

    def stored(self) -> list[Stored]:
        """Return what a checkpoint stores of this batch: finished episodes of this rank, and unfinished responses."""
        begun = {number: partial for number, partial in self.partial.items() if len(partial.tokens)}
        known: dict[int, Played | Response] = {**self.played, **begun}
        return [(self.batch, number, one) for number, one in known.items()]

    def _signals(self, outcomes: Outcomes) -> list[bool]:
        """Return, for each requested group, whether its rewards differ."""
        return [
            len({reward for number in group.numbers for reward in outcomes[number].rewards}) > 1
            for group in self.requested
        ]

    def chosen(self, outcomes: Outcomes) -> list[RolloutGroup]:
        """Return the groups to train on, at most as many as were read from the data for this batch.

        Groups with a failed episode are left out and not replaced. Raise a `UserError` if no group is left.
        """
        order = list(range(self._wanted))
        if self._filtered:
            signals = self._signals(outcomes)
            # Groups whose rewards differ come first. The order does not depend on when responses have finished.
            order = sorted(range(self.num_requested), key=lambda index: (not signals[index], index))
        chosen = [self.groups[index] for index in sorted(order[: self._wanted])]
        found = [group for group in chosen if all(outcomes[number].failure is None for number in group.numbers)]
        if not found:
            raise UserError(
                "rollout.on_failure",
                f"'skip', but every group of batch {self.batch} failed (the first: "
                f"{self.failures(outcomes)[0]['failure']})",
                f"correct the failures that {FAILURES} in the run folder lists",
            )
        return found

    def failures(self, outcomes: Outcomes) -> list[dict[str, Any]]:
        """Return one line for `failures.jsonl` for each failed episode of all requested groups."""
        return [
            {"uid": group.prompt.uid, "episode": index, "failure": failure}
            for group in self.requested
            for index, number in enumerate(group.numbers, start=1)
            if (failure := outcomes[number].failure) is not None
        ]

    def num_failed(self, outcomes: Outcomes) -> tuple[int, int]:
        """Return two counts over the requested groups: failed episodes, and groups with a failed episode."""
        failed = [sum(outcomes[number].failure is not None for number in group.numbers) for group in self.requested]
        return sum(failed), sum(map(bool, failed))

    def metrics(self, outcomes: Outcomes) -> dict[str, float]:
        """Return the metrics of `rollout.filter`; {} if the run does not filter.

        The metrics are three numbers of groups: all requested groups, groups whose rewards are all equal, and groups
        whose rewards differ but that the batch does not need.
        """
        if not self._filtered:
            return {}
        different = sum(self._signals(outcomes))
        return {
            "groups_requested": float(self.num_requested),
            "groups_equal": float(self.num_requested - different),  # groups whose rewards are all equal
            "groups_surplus": float(max(different - self._wanted, 0)),  # groups whose rewards differ, beyond the batch
        }


def _spare_prompts(prompts: Sequence[Prompt], own: Sequence[RolloutGroup], seed: int, batch: int) -> list[Prompt]:
    """Return all prompts except those of the groups `own`, in a random order that `seed` and `batch` give."""
    keys = response_keys(seed, batch + _SPARE, np.arange(len(prompts), dtype=np.int64))
    own_uids = {group.prompt.uid for group in own}
    shuffled = (prompts[index] for index in np.argsort(keys, kind="stable"))
    return [prompt for prompt in shuffled if prompt.uid not in own_uids]


def merged(parts: Iterable[Outcomes]) -> dict[int, EpisodeOutcome]:
    """Merge the outcomes of all ranks, each a mapping by episode number, into one mapping."""
    return {number: one for part in parts for number, one in part.items()}


def share_of_rank(groups: Sequence[RolloutGroup], rank: int, world: int) -> list[tuple[int, RolloutGroup]]:
    """Divide the episodes of the groups over `world` ranks. Return one rank's episode numbers, each with its group.

    Every rank gets prompts of all lengths. The ranks' numbers of episodes differ by at most one.
    """
    by_length = sorted(groups, key=lambda group: (len(group.prompt.tokens), group.first))
    dealt = [group for start in range(world) for group in by_length[start::world]]
    episodes = [(number, group) for group in dealt for number in group.numbers]
    return [episodes[index] for index in np.array_split(np.arange(len(episodes)), world)[rank]]


class KnownEpisodes:
    """The episodes and responses in the checkpoint and in the response log, all sampled before the run was resumed."""

    def __init__(self, response_log: ResponseLog | None, *, oldest: int, continues: bool) -> None:
        """`oldest`: maximum age of a token in optimizer steps; groups with older tokens are dropped. `continues`:
        whether the sampler can continue partial responses. If not, partial responses in the log are ignored.
        """
        self._response_log, self._oldest, self._continues = response_log, oldest, continues
        self.restored: dict[tuple[int, int], Played | Response] = {}  # from the checkpoint, by batch and episode number
        self._dropped = self._from_log = 0  # number of groups, and number of responses

    def restore(self, stored: Iterable[Stored]) -> None:
        self.restored = {(batch, number): one for batch, number, one in stored}

    def find(self, batch: int, group: RolloutGroup, *, version: int) -> dict[int, Played | Response]:
        """Return the group's episodes and responses that were sampled before a resume, keyed by episode number.

        `version`: the policy version at which the group is trained. If a token would then be too old, the result is
        empty, and the group counts as dropped.
        """
        found: dict[int, Played | Response] = {}
        for number in group.numbers:
            stored = self.restored.pop((batch, number), None)
            logged = None if self._response_log is None else self._response_log.find(batch, number, group.prompt.tokens)
            if logged is not None and not self._continues and not logged.is_whole(group.prompt.max_new_tokens):
                logged = None
            if logged is not None and (
                stored is None or (isinstance(stored, Response) and len(logged.tokens) > len(stored.tokens))
            ):
                stored = logged
                self._from_log += 1
            if stored is not None:
                found[number] = stored
        if any((version - _versions(stored) > self._oldest).any() for stored in found.values()):
            self._dropped += 1
            return {}
        return found

    def take_counts(self) -> tuple[int, int]:
        """Return how many groups were dropped since the last call because their tokens were sampled too many steps ago,
        and how many responses were taken from the response log.
        """
        counts = self._dropped, self._from_log
        self._dropped = self._from_log = 0
        return counts


def _versions(one: Played | Response) -> NDArray[np.int64]:
    return one.versions if isinstance(one, Played) else one.token_versions
