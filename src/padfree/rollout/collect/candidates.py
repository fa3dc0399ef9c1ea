"""Which groups of prompts a batch asks for, and which of them it is trained on (`rollout.filter`).

    groups    own             spare               with "equal": those whose rewards differ, in this order, until the
              0   1   2   3   4   5   6   ...     batch is full; where too few do, the first of the others fill it up
    rewards   01  00  01  11  10  11
    chosen    0       2       4              3 of 4; 6 is asked for next. At the bound: 0 1 2 4

Spare groups are of other prompts of the data, in an order that follows from the seed and the number of the batch. What
is chosen follows from the draws alone, and not from when or how many at a time groups were asked for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from padfree.config.rollout import RolloutConfig
from padfree.rollout.collect.group import RolloutGroup
from padfree.rollout.prompts import Prompt
from padfree.rollout.sampling_rng import response_keys

_SPARE = 1 << 40  # no batch has such a number: spare prompts are not in the order of anybody's draws


class SparePrompts:
    """All prompts of a run, to take others from than a batch has."""

    def __init__(self, prompts: Sequence[Prompt], seed: int) -> None:
        self._prompts, self._seed = prompts, seed

    def order(self, batch: int, own: Sequence[RolloutGroup]) -> list[Prompt]:
        """Those that are not among `own`, in the order for this batch."""
        keys = response_keys(self._seed, batch + _SPARE, np.arange(len(self._prompts), dtype=np.int64))
        there = {group.prompt.uid for group in own}
        found = (self._prompts[index] for index in np.argsort(keys, kind="stable"))
        return [prompt for prompt in found if prompt.uid not in there]


class Candidates:
    """The groups of one batch, its own first; `asked` of them have been asked for."""

    def __init__(self, batch: int, own: Sequence[RolloutGroup], settings: RolloutConfig, spare: SparePrompts) -> None:
        self.groups: list[RolloutGroup] = []
        for group in own:
            self._append(group)
        self._wanted, self._settings = len(own), settings
        self._spare: list[Prompt] = []
        self._filtered = settings.filter != "none"
        if self._filtered:
            most = math.ceil(self._wanted * settings.filter_bound) - self._wanted
            self._spare = spare.order(batch, own)[:most]
        self.asked = 0

    def begin(self) -> range:
        """The groups to ask for first."""
        return self._ask(self._wanted)

    def more(self, signal: Mapping[int, bool]) -> range:
        """The groups to ask for next, once it is known of all that were asked for whether their rewards differ."""
        assert len(signal) == self.asked
        if not self._filtered:
            return range(0)
        return self._ask(self._wanted - sum(signal.values()))

    def _ask(self, number: int) -> range:
        if number <= 0:
            return range(0)
        wanted = math.ceil(number * self._settings.oversample)
        begin = self.asked
        self.asked = min(begin + wanted, self._wanted + len(self._spare))
        for prompt in self._spare[len(self.groups) - self._wanted : self.asked - self._wanted]:
            self._append(RolloutGroup(prompt=prompt, size=self._settings.samples_per_prompt))
        return range(begin, self.asked)

    def _append(self, group: RolloutGroup) -> None:
        first = self.groups[-1].numbers.stop if self.groups else 0
        self.groups.append(replace(group, first=first))

    def chosen(self, signal: Mapping[int, bool]) -> list[int]:
        """As many as the batch has groups of its own, in their order."""
        if not self._filtered:
            return list(range(self._wanted))
        order = sorted(range(self.asked), key=lambda group: (not signal[group], group))
        return sorted(order[: self._wanted])

    def metrics(self, signal: Mapping[int, bool]) -> dict[str, float]:
        if not self._filtered:
            return {}
        different = sum(signal.values())
        return {
            "groups_asked": float(self.asked),
            "groups_equal": float(self.asked - different),  # whose rewards were all equal
            "groups_surplus": float(max(different - self._wanted, 0)),  # whose rewards differ, and had no room
        }
