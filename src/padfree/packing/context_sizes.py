"""Plan a step in which several ranks share an expensive pack, and each pack of short samples runs on one rank.

A wave is one micro-batch on every rank. For example, 4 of 8 ranks share a sample of 60k tokens in a wave, and each
other rank runs a pack of short samples.

Each sample gets the fewest ranks that keep every rank within a token limit and a cost limit. Packs of similar cost run
in the same wave. Several cost limits (`RAISED`) and numbers of waves are tried, and the cheapest plan is used.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from padfree.packing.balance import PartitionProblem, partition
from padfree.packing.cost import Floats
from padfree.packing.fill import Indices

RAISED = (1.0, 1.03, 1.1, 1.25, 1.5, 2.0, 3.0)
"""A plan limits the cost of one rank's part of a sample to the mean cost of a rank in one micro-batch, times one of
these factors.

The factors are tried in turn. With a larger factor, fewer ranks share a sample.
"""

MORE_WAVES = 6
"""If a plan is more uneven than `EVEN` allows, plans with up to this many additional waves (micro-batches that all
ranks run together) are tried.
"""

WAVE = 0.01  # the weights are gathered once per wave
"""The fixed cost of one wave (one micro-batch on every rank), as a fraction of the cost of the step."""

FEWEST_TOKENS = 512
"""If a sample is divided over ranks only to save time, each part has at least about this many tokens, because smaller
matmuls are not faster.
"""

EVEN = 1.02
"""A plan is accepted if its cost is at most this factor times that of a plan with equal costs on all ranks."""


def context_sizes(largest: int) -> tuple[int, ...]:
    """Return the numbers of ranks that may share a pack, up to `largest`, in ascending order.

    `largest` is divided by its smallest prime factor until 1 is left: 8 gives 1 2 4 8, and 12 gives 1 3 6 12.
    """
    found = [largest]
    while found[-1] > 1:
        factor = next(number for number in range(2, found[-1] + 1) if found[-1] % number == 0)
        found.append(found[-1] // factor)
    return tuple(reversed(found))


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class WidePlan:
    """A plan of a step: the packs that each rank runs, one in each of J waves (micro-batches that all ranks run
    together).

    A pack that several ranks share appears in the list of each of these ranks.
    """

    micro_batches: tuple[tuple[Indices, ...], ...]  # [ranks][J]
    widths: Indices  # [ranks, J]
    cost: Floats  # [ranks, J] cost of the rank's part of the pack


@dataclass(frozen=True, eq=False, slots=True)
class _SizedPack:
    width: int
    samples: list[int]


def plan_wide(
    length: Indices, cost: Floats, candidates: Indices, *, ranks: int, max_tokens: int, sizes: Sequence[int]
) -> WidePlan:
    """Assign the samples `candidates` (indices) to packs, ranks and waves (micro-batches that all ranks run together).

    `sizes` are the numbers of ranks that may share a pack. A sample that is too large gets the largest number.
    """
    tokens, total = int(length[candidates].sum()), float(cost[candidates].sum())
    fewest = max(1, -(-tokens // (ranks * max_tokens)))
    best: WidePlan | None = None
    waves = fewest
    while best is None or (waves <= fewest + MORE_WAVES and imbalance(best.cost) > EVEN):
        for raised in RAISED:
            level = raised * total / (ranks * waves)
            found = _attempt(length, cost, candidates, ranks, max_tokens, sizes, waves, level)
            if found is not None and (best is None or _price(found) < _price(best)):
                best = found
            if found is not None and imbalance(found.cost) <= EVEN:
                break
        waves += 1
    return best


def _price(plan: WidePlan) -> float:
    waves: int = plan.cost.shape[1]
    return float(plan.cost.max(0).sum()) * (1 + WAVE * waves)


def imbalance(cost: Floats) -> float:
    """Return the cost of a step, divided by its cost if all ranks had equal costs in every micro-batch.

    `cost` [ranks, micro-batches]: the cost of each micro-batch j on each rank r. The step costs Σⱼ maxᵣ cost[r, j].
    """
    mean = float(cost.sum()) / len(cost)
    return float(cost.max(0).sum()) / mean if mean else 1.0


def _attempt(
    length: Indices,
    cost: Floats,
    candidates: Indices,
    ranks: int,
    max_tokens: int,
    sizes: Sequence[int],
    waves: int,
    level: float,
) -> WidePlan | None:
    width = _widths(length[candidates], cost[candidates], max_tokens, sizes, level)
    wide, narrow = candidates[width > 1], candidates[width == 1]
    left = ranks * waves - int(width[width > 1].sum())
    if left < 0 or (not left and len(narrow)):
        return None
    packs = [_SizedPack(size, [sample]) for size, sample in zip(width[width > 1].tolist(), wide.tolist(), strict=True)]
    narrow = _fill_wide(packs, narrow, length, cost, max_tokens, level)
    if len(narrow):
        parts = partition(PartitionProblem(cost[narrow], length[narrow], max_tokens, np.zeros(left)))
        if parts is None:
            return None
        packs += [_SizedPack(1, narrow[part].tolist()) for part in parts]
    else:
        packs += [_SizedPack(1, [])] * left
    return _arranged(packs, cost, ranks, waves)


def _widths(length: Indices, cost: Floats, max_tokens: int, sizes: Sequence[int], level: float) -> Indices:
    """Return the width of each of n samples, [n]: the number of ranks that share the sample.

    The width is the smallest at which one rank's part has at most `max_tokens` tokens and costs at most `level`,
    the target cost per rank.
    """
    size = np.array(sizes)
    by_cost = np.minimum(cost / level if level else 0.0, np.maximum(length // FEWEST_TOKENS, 1))
    needed = np.maximum(length / max_tokens, by_cost)
    index = np.searchsorted(size, needed * (1 - 1e-12), side="left")  # the first width that suffices
    # A sample that costs more than the level even if all ranks share it gets all ranks.
    found: Indices = size[np.minimum(index, len(size) - 1)]
    return found


def _fill_wide(
    packs: Sequence[_SizedPack], narrow: Indices, length: Indices, cost: Floats, max_tokens: int, level: float
) -> Indices:
    """Add short samples (indices `narrow`) to packs that several ranks share, the costliest sample that fits first.

    A pack holds at most `max_tokens` tokens per rank and costs at most `level` per rank. Returns the indices of the
    short samples that were not added.
    """
    order = narrow[np.argsort(cost[narrow], kind="stable")]
    costs, waiting = cost[order].tolist(), order.tolist()
    for pack in packs:
        free_cost = pack.width * level - float(cost[pack.samples].sum())
        tokens = pack.width * max_tokens - int(length[pack.samples].sum())
        index = bisect_right(costs, free_cost)
        while index and costs:
            index -= 1
            if length[waiting[index]] > tokens:
                continue
            free_cost, tokens = free_cost - costs[index], tokens - int(length[waiting[index]])
            pack.samples.append(waiting.pop(index))
            costs.pop(index)
            index = min(index, bisect_right(costs, free_cost))
    return np.array(sorted(waiting), dtype=np.int64)


def _arranged(packs: Sequence[_SizedPack], cost: Floats, ranks: int, waves: int) -> WidePlan:
    """Assign packs to ranks and to waves (micro-batches that all ranks run together)."""
    each = np.array([float(cost[pack.samples].sum()) / pack.width for pack in packs])
    width = np.array([pack.width for pack in packs])
    by_cost = np.argsort(-each, kind="stable")
    wanted = np.empty(len(packs), dtype=np.int64)
    wanted[by_cost] = (np.cumsum(width[by_cost]) - width[by_cost]) // ranks
    free = np.full(waves, ranks)
    members: list[list[int]] = [[] for _ in range(waves)]
    # Widths divide each other, so the number of free ranks of a wave is always a multiple of the next pack's width.
    for index in np.lexsort([-each, -width]).tolist():
        open_waves = np.flatnonzero(free >= width[index])
        wave = int(open_waves[np.argmin(np.abs(open_waves - wanted[index]))])
        members[wave].append(index)
        free[wave] -= width[index]
    assert not free.any(), "packs and ranks do not match"
    table = np.empty((ranks, waves), dtype=np.int64)
    for wave, chosen in enumerate(members):
        # In every second wave, packs of equal width go to the ranks in reverse order, so that the ranks' total costs
        # are close.
        ordered = sorted(chosen, key=lambda index: (-width[index], each[index] if wave % 2 else -each[index]))
        table[:, wave] = np.repeat(ordered, width[ordered])
    samples = [np.array(sorted(pack.samples), dtype=np.int64) for pack in packs]
    return WidePlan(
        micro_batches=tuple(tuple(samples[index] for index in of_rank) for of_rank in table.tolist()),
        widths=width[table],
        cost=each[table],
    )
