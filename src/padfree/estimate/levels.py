"""Choose the activations that each layer keeps, so that a step fits the memory and recomputes as little as possible.

    forward     layer 0     1     2     3     head        every layer adds what it keeps
    memory      |#          ##    ###   ####  ####+head
    backward    layer 3     2     1     0                 a layer needs temporary memory (w), and frees what it kept
    memory      |####+w     ###+w ##+w  #+w

    levels, device bytes per token from least to most:  full, host < selective < attention < none

A layer has one option per level. An option has the bytes kept on the device and in host memory, the further bytes that
the backward pass needs, and the cost of recomputing the rest. A tensor occupies device memory until its copy to host
memory has ended. The copies cost nothing if all of them together take no longer than the forward pass.

`choose_levels` finds the cheapest choice within the limits. It goes through the layers in order. After each layer, it
drops every choice for which another choice is at least as good in device bytes, host bytes and cost. Levels that keep
less go to the first layers: their activations are needed last, so their copies have most time. For 36 equal layers this
takes 0.3 s.
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
"""Limits the comparisons of `_States.best`, which groups choices of checkpointing levels by their host bytes.

With at most this many groups, each choice is compared with all others, otherwise only with those of its group.
"""


def choose_levels(layers: Sequence[Sequence[Option]], limits: Limits) -> tuple[Option, ...] | None:
    """Choose one option (checkpointing level) per layer, so that the layers stay within the limits at the lowest cost.

    Returns None if no choice fits. If two layers could exchange their levels at the same cost, the earlier layer gets
    the level that comes first in its list of options.
    """
    host = min(limits.host, limits.copied[-1])
    states = _States.start()
    history: list[tuple[Indices, Indices]] = []  # for each layer: each state's previous state and option
    for options, copied in zip(layers, limits.copied, strict=True):
        found, before, chosen = states.extended(options)
        working = np.tile(np.array([option.working for option in options]), len(states.kept))
        waiting = np.maximum(found.offloaded - copied, 0)
        fits = (found.offloaded <= host) & (found.kept + np.maximum(working, waiting) <= limits.device)
        kept = np.flatnonzero(fits)
        kept = kept[found.at(kept).best()]
        states = found.at(kept)
        history.append((before[kept], chosen[kept]))
    last = np.flatnonzero(states.kept + limits.at_end <= limits.device)
    if not len(last):
        return None
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

        A choice is one option for each layer so far. Returns the new choices and, for each of them, two indices: of the
        choice that it extends, and of the option that it adds.
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

        A choice is dropped if another one needs no more device bytes, no more host bytes and no more recomputation.

        If the choices have more than FEW_GROUPS different numbers of host bytes, a choice is compared only with those
        that have the same number of host bytes.
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
        """Drop the choices of checkpointing levels that are worse than another one. Return the remaining indices.

        A choice is worse if the other one has fewer host bytes, and neither more device bytes nor a higher cost.
        `order` are the indices of the choices, sorted by host bytes. `ends` divides it where the host bytes change.
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
