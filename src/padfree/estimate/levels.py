"""Choose the checkpointing level of each layer, so that a step fits the memory and recomputes as little as possible.

The levels of compiled layers, from the most device memory to the least, are:

    none         keep everything
    attention    recompute the MLP, norms and RoPE
    selective    also recompute the projections around attention
    full         keep only the layer's input
    host         like `attention`, but keep the tensors in host memory

The copied bytes are limited to what can be copied during the forward pass, so that no step waits for copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from padfree.choices import LayerLevel

Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Option:
    """One checkpointing level for a layer, with the memory and the recomputation that a micro-batch needs at this
    level.
    """

    level: LayerLevel
    kept: int  # bytes on the device, from the layer's forward to its backward
    working: int  # further bytes on the device during the layer's backward
    offloaded: int  # bytes that are copied to host memory
    cost: int  # work that backward repeats


@dataclass(frozen=True, slots=True)
class Limits:
    """The memory that the activations of all layers may take, and how fast they can be copied to host memory."""

    device: int  # bytes
    at_end: int  # bytes that are needed on the device after the forward pass, while all layers keep their activations
    host: int  # bytes
    copied: tuple[int, ...]  # bytes that can be copied to host memory while layers 0 to i compute, for each layer i


FEW_GROUPS = 256
"""The search drops a choice of checkpointing levels if another choice is better. If the choices use more than this
number of different amounts of host memory, only choices with the same amount are compared, which is faster.
"""


def choose_levels(layers: Sequence[Sequence[Option]], limits: Limits) -> tuple[Option, ...] | None:
    """Choose one option (checkpointing level) per layer, with the lowest total cost within `limits`. Return None if no
    choice fits.

    If two layers could exchange their levels at the same cost, the earlier layer gets the level that comes first in its
    list.
    """
    host = min(limits.host, limits.copied[-1])
    states = _States.start()
    history: list[tuple[Indices, Indices]] = []  # for each layer: each state's previous state and option
    for options, copied in zip(layers, limits.copied, strict=True):
        found, before, chosen = states.extended(options)
        working = np.tile(np.array([option.working for option in options]), len(states.kept))
        waiting = np.maximum(found.offloaded - copied, 0)  # still on the device, because their copy has not ended
        fits = (found.offloaded <= host) & (found.kept + np.maximum(working, waiting) <= limits.device)
        kept = np.flatnonzero(fits)
        kept = kept[found.at(kept).best()]
        states = found.at(kept)
        history.append((before[kept], chosen[kept]))
    last = np.flatnonzero(states.kept + limits.at_end <= limits.device)
    if not len(last):
        return None
    # Of equal choices, the first keeps the least in the first layers, whose tensors the backward pass needs last.
    order = np.lexsort((last, states.kept[last], states.offloaded[last], states.cost[last]))
    state, found_options = int(last[order[0]]), []
    for options, (before, chosen) in zip(reversed(layers), reversed(history), strict=True):
        found_options.append(options[int(chosen[state])])
        state = int(before[state])
    return tuple(reversed(found_options))


@dataclass(frozen=True, slots=True)
class _States:
    """The n choices that the search still considers after it has gone through the first layers of the model.

    A choice is one option (checkpointing level) for each of these layers. The choices are sorted by the indices of
    their options.
    """

    kept: Indices  # [n] bytes on the device
    offloaded: Indices  # [n] bytes in host memory
    cost: Indices  # [n]

    @staticmethod
    def start() -> _States:
        return _States(*(np.zeros(1, np.int64) for _ in range(3)))

    def extended(self, options: Sequence[Option]) -> tuple[_States, Indices, Indices]:
        """Extend each choice by each of the `options` (checkpointing levels) of the next layer.

        Return the new choices. For each new choice, also return the index of the extended choice and the index of the
        added option.
        """
        added = np.array([(option.kept, option.offloaded, option.cost) for option in options], np.int64)
        own = (self.kept, self.offloaded, self.cost)
        found = ((each[:, None] + added[None, :, column]).reshape(-1) for column, each in enumerate(own))
        before, chosen = np.divmod(np.arange(len(self.kept) * len(options)), len(options))
        return _States(*found), before, chosen

    def at(self, indices: Indices) -> _States:
        return _States(self.kept[indices], self.offloaded[indices], self.cost[indices])

    def best(self) -> Indices:
        """Return the indices of the choices of checkpointing levels that are worth keeping.

        A choice is dropped if another choice needs no more device bytes, no more host bytes and no more recomputation.
        """
        order = np.lexsort((np.arange(len(self.kept)), self.cost, self.kept, self.offloaded))
        sorted_ = self.at(order)
        values, group = np.unique(sorted_.offloaded, return_inverse=True)
        if not len(values):
            return order
        # Lower the costs of each group by more than any cost, so that the running minimum restarts in every group.
        lowered = sorted_.cost - group * (int(self.cost.max()) + 1)
        kept = np.ones(len(order), bool)
        kept[1:] = lowered[1:] < np.minimum.accumulate(lowered)[:-1]
        order = order[kept]
        if len(values) <= FEW_GROUPS:
            order = self._across_groups(order, np.flatnonzero(np.diff(self.offloaded[order])) + 1)
        return np.sort(order)

    def _across_groups(self, order: Indices, ends: Indices) -> Indices:
        """Drop each choice if a choice with fewer host bytes has no more device bytes and no higher cost. Return the
        indices of the other choices.

        `order`: indices of choices, sorted by host bytes. `ends`: positions in `order` where the host bytes change.
        """
        remaining = []
        front, costs = np.zeros(0, np.int64), np.zeros(0, np.int64)  # device bytes rise, costs fall
        for part in np.split(order, ends):
            below = np.searchsorted(front, self.kept[part], side="right") - 1
            beaten = (below >= 0) & (costs[np.maximum(below, 0)] <= self.cost[part]) if len(front) else False
            part = part[~np.broadcast_to(beaten, len(part))]
            remaining.append(part)
            kept, cost = np.concatenate([front, self.kept[part]]), np.concatenate([costs, self.cost[part]])
            by = np.lexsort((cost, kept))
            kept, cost = kept[by], cost[by]
            lowest = np.ones(len(kept), bool)
            lowest[1:] = cost[1:] < np.minimum.accumulate(cost)[:-1]
            front, costs = kept[lowest], cost[lowest]
        return np.concatenate(remaining)
