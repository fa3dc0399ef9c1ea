"""Which groups of prompts a batch samples, and which of them it trains on (`rollout.filter`).

If all rewards of a group are equal, a filter replaces this group with a spare group. A batch of 4 groups with 2
responses each:

    groups    of the batch             spare
              0     1     2     3      4     5     6     ...
    rewards   0 1   0 0   0 1   1 1    1 0   1 1                  two responses per group
    chosen    0           2            4                          groups whose rewards differ

The batch needs one more group whose rewards differ, so group 6 is sampled next. A batch samples at most
`rollout.filter_bound` times as many groups as it trains on. If no further group within this bound has rewards that
differ, the first group with equal rewards completes the batch: in the example, the batch trains on groups 0 1 2 4.

Spare groups have other prompts of the data, in an order given by the seed and the batch number. The chosen groups
depend only on the sampled responses. They do not depend on when groups were requested, or on how many were requested at
a time.
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

_SPARE = 1 << 40  # added to the batch number, so that the order of spare prompts uses random keys of its own


class SparePrompts:
    """All prompts of a run. A batch takes the prompts of its spare groups from them."""

    def __init__(self, prompts: Sequence[Prompt], seed: int) -> None:
        self._prompts, self._seed = prompts, seed

    def order(self, batch: int, own: Sequence[RolloutGroup]) -> list[Prompt]:
        """Return all prompts except those of `own`, which are the groups of the batch, in a random order."""
        keys = response_keys(self._seed, batch + _SPARE, np.arange(len(self._prompts), dtype=np.int64))
        own_uids = {group.prompt.uid for group in own}
        shuffled = (self._prompts[index] for index in np.argsort(keys, kind="stable"))
        return [prompt for prompt in shuffled if prompt.uid not in own_uids]


class Candidates:
    """The groups that one batch may sample: its own groups, then spare ones.

    The first `num_requested` entries of `groups` have been requested.
    """

    def __init__(self, batch: int, own: Sequence[RolloutGroup], settings: RolloutConfig, spare: SparePrompts) -> None:
        self.groups: list[RolloutGroup] = []
        for group in own:
            self._append(group)
        self._wanted, self._settings = len(own), settings
        self._spare: list[Prompt] = []
        self._filtered = settings.filter != "none"
        if self._filtered:
            num_spare = math.ceil(self._wanted * settings.filter_bound) - self._wanted
            self._spare = spare.order(batch, own)[:num_spare]
        self.num_requested = 0

    def first(self) -> range:
        """Return the indices of the groups to request first."""
        return self._request(self._wanted)

    def more(self, signal: Mapping[int, bool]) -> range:
        """Return the indices of the groups to request next.

        `signal`: for each requested group, whether its rewards differ.
        """
        assert len(signal) == self.num_requested
        if not self._filtered:
            return range(0)
        return self._request(self._wanted - sum(signal.values()))

    def _request(self, num_groups: int) -> range:
        if num_groups <= 0:
            return range(0)
        num_requested = math.ceil(num_groups * self._settings.oversample)
        first = self.num_requested
        self.num_requested = min(first + num_requested, self._wanted + len(self._spare))
        for prompt in self._spare[len(self.groups) - self._wanted : self.num_requested - self._wanted]:
            self._append(RolloutGroup(prompt=prompt, size=self._settings.samples_per_prompt))
        return range(first, self.num_requested)

    def _append(self, group: RolloutGroup) -> None:
        first = self.groups[-1].numbers.stop if self.groups else 0
        self.groups.append(replace(group, first=first))

    def chosen(self, signal: Mapping[int, bool]) -> list[int]:
        """Return the indices of the groups to train on, as many as the batch has groups of its own.

        `signal`: for each requested group, whether its rewards differ.
        """
        if not self._filtered:
            return list(range(self._wanted))
        order = sorted(range(self.num_requested), key=lambda group: (not signal[group], group))
        return sorted(order[: self._wanted])

    def metrics(self, signal: Mapping[int, bool]) -> dict[str, float]:
        if not self._filtered:
            return {}
        different = sum(signal.values())
        return {
            "groups_requested": float(self.num_requested),
            "groups_equal": float(self.num_requested - different),  # groups whose rewards are all equal
            "groups_surplus": float(max(different - self._wanted, 0)),  # groups whose rewards differ, beyond the batch
        }
