"""Partition samples into k parts of nearly equal cost. An optional cap limits the number of tokens in a part.

    costs 8 7 6 5 4 2    k = 2      ->  8 + 6 + 2 = 16,  7 + 5 + 4 = 16

Samples are first assigned by falling cost, each to the cheapest part with enough free tokens. Then costly parts swap
samples with cheap parts, until the costliest part is within `TOLERANCE` of the mean or no swap helps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush, heapreplace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from padfree.arrays import host_array, need_whole
from padfree.errors import UserError
from padfree.packing.cost import Floats
from padfree.packing.fill import Indices, checked_lengths, fill

TOLERANCE = 1e-4
"""`balance` divides samples into parts of nearly equal cost. It stops exchanging samples between parts when the
costliest part exceeds the mean cost of a part by at most this fraction of the mean.
"""

ROUNDS = 64
"""The maximum number of rounds in which `balance` exchanges samples between parts. In each round, costly parts are
paired with cheap ones, and every pair exchanges samples once.
"""

SHIFTS = 8
"""`balance` exchanges samples between pairs of parts (groups of samples), in rounds. After a round without improvement,
it forms other pairs. It stops at the latest after this number of successive rounds without improvement.
"""


def balance(
    costs: ArrayLike,
    k: int,
    *,
    lengths: ArrayLike | None = None,
    cap: int | None = None,
    equal_count: bool = False,
) -> list[Indices]:
    """Partition n samples into k parts with nearly equal sums of `costs`. Returns the sample indices of each part.

    No part is empty if n >= k. `cap` limits the sum of `lengths` (default: `costs`) in a part. With `equal_count`,
    parts differ by at most 1 sample.
    """
    cost = _checked_costs(costs)
    need_whole("k", k, 1, "give 1 or more parts")
    if equal_count and k > len(cost):
        raise UserError(
            "k",
            f"{k} parts with equal numbers of samples need at least {k} samples, but there are {len(cost)}",
            f"give at most {len(cost)}",
        )
    length = np.zeros(len(cost), np.int64)
    if lengths is not None:
        length = checked_lengths(lengths)
    elif cap is not None:
        length = checked_lengths(costs, "costs")
    if len(length) != len(cost):
        raise UserError("lengths", f"has {len(length)} entries for {len(cost)} costs", "give one length per sample")
    if cap is not None:
        _check_cap(length, k, cap)
    limit = int(length.sum()) if cap is None else cap
    parts = partition(PartitionProblem(cost, length, limit, np.zeros(k), equal_count))
    if parts is None:
        raise UserError(
            "cap",
            f"{len(cost)} samples with {length.sum()} tokens do not fit into {k} parts of {cap} tokens",
            "raise cap or k",
        )
    return parts


def _checked_costs(costs: ArrayLike) -> Floats:
    array = host_array(costs, "costs")
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iuf"):
        raise UserError("costs", f"got a {array.dtype} array of shape {array.shape}", "give a flat list of numbers")
    array = array.astype(np.float64)
    wrong = ~((array >= 0) & (array < np.inf))
    if wrong.any():
        index = int(wrong.argmax())
        raise UserError("costs", f"is {array[index]} for sample {index}", "give finite costs of 0 or more")
    return array


def _check_cap(length: Indices, k: int, cap: int) -> None:
    need_whole("cap", cap, 1, "give 1 or more")
    if length.max(initial=0) > cap:
        index = int(length.argmax())
        raise UserError("cap", f"{cap} is less than the {length[index]} tokens of sample {index}", "raise cap")
    if length.sum() > k * cap:
        raise UserError("cap", f"{k} parts of at most {cap} tokens cannot hold {length.sum()} tokens", "raise cap or k")


@dataclass(frozen=True, eq=False, slots=True)
class PartitionProblem:
    """The input of `partition`: n samples that are divided into k parts.

    `partition` minimises the cost of the costliest part. The cost of part p is `offset[p]` plus the costs of its
    samples.
    """

    cost: Floats  # [n]
    length: Indices  # [n]
    cap: int  # limit on the sum of length in a part
    offset: Floats  # [k]; the cost of an empty part
    equal_count: bool = False


Parts = list[Indices]


def partition(problem: PartitionProblem) -> Parts | None:
    """Return parts of nearly equal cost, as ascending sample indices, or None if no assignment keeps to the limit on
    tokens.
    """
    parts = _start(problem)
    if parts is None:
        return None
    parts = _without_empty(parts, problem)
    return [np.sort(part) for part in _exchange(parts, problem)]


def sums(values: NDArray[Any], parts: Sequence[Indices]) -> Floats:
    """Return the sum of `values` [n] over the samples of each of the k parts, [k]."""
    part = np.repeat(np.arange(len(parts)), [len(indices) for indices in parts])
    weights = values[np.concatenate(parts)]
    return np.asarray(np.bincount(part, weights=weights, minlength=len(parts)), dtype=np.float64)


def _start(problem: PartitionProblem) -> Parts | None:
    """Return parts of at most `cap` tokens as a start for `_exchange`, or None if no method finds any.

    The methods: assign greedily by cost, balance tokens, or use few parts (`fill`).
    """
    parts = _greedy(problem)
    if parts is not None:
        return parts
    total = int(problem.length.sum())
    even = replace(problem, cost=problem.length.astype(np.float64), cap=total, offset=np.zeros_like(problem.offset))
    parts = _greedy(even)
    assert parts is not None
    parts = _exchange(parts, even, goal=problem.cap)
    if sums(problem.length, parts).max() <= problem.cap:
        return parts
    bins = fill(problem.length, problem.cap)
    spare = len(problem.offset) - len(bins)
    if problem.equal_count or spare < 0:
        return None
    return [*bins, *[bins.indices[:0]] * spare]


def _greedy(problem: PartitionProblem) -> Parts | None:
    """Assign samples to parts by falling cost, each sample to the cheapest part that has room for its tokens.

    Returns None if no part has room for a sample.
    """
    # Add a tiny constant to the cost of each sample, so that samples of cost 0 are also spread over the parts.
    cost = (problem.cost + (1e-9 * problem.cost.max(initial=0.0) or 1.0)).tolist()
    length = problem.length.tolist()
    members: list[list[int]] = [[] for _ in problem.offset]
    free_tokens = [problem.cap] * len(members)
    # If parts have equal counts, each holds `count` samples, and `larger` of them may hold one more.
    count, larger = divmod(len(cost), len(members)) if problem.equal_count else (len(cost), 0)
    heap = [(load, part) for part, load in enumerate(problem.offset.tolist())]
    heapify(heap)
    full: list[tuple[int, float, int]] = []  # (-free_tokens, load, part) of the parts that are too full for this sample
    for index in np.argsort(-problem.cost, kind="stable").tolist():
        need = length[index]
        while full and -full[0][0] >= need:
            heappush(heap, heappop(full)[1:])
        while heap and free_tokens[heap[0][1]] < need:
            load, part = heappop(heap)
            heappush(full, (-free_tokens[part], load, part))
        if not heap:
            return None
        load, part = heap[0]
        members[part].append(index)
        free_tokens[part] -= need
        size = len(members[part])
        if size < count or (size == count and larger):
            heapreplace(heap, (load + cost[index], part))
            continue
        heappop(heap)
        larger -= size > count
        if size > count and not larger:
            heap = [entry for entry in heap if len(members[entry[1]]) < count]
            full = [entry for entry in full if len(members[entry[2]]) < count]
            heapify(heap)
            heapify(full)
    return [np.array(part, dtype=np.int64) for part in members]


def _without_empty(parts: Parts, problem: PartitionProblem) -> Parts:
    """Move one sample to each empty part, as long as some part has at least two samples.

    The costliest part with at least two samples gives its cheapest sample.
    """
    parts = list(parts)
    cost = sums(problem.cost, parts)
    givers = [(-cost[p], p) for p, part in enumerate(parts) if len(part) > 1]
    heapify(givers)
    for empty in [p for p, part in enumerate(parts) if not len(part)]:
        if not givers:
            break
        negative, giver = heappop(givers)
        index = int(problem.cost[parts[giver]].argmin())
        parts[empty] = parts[giver][index : index + 1]
        parts[giver] = np.delete(parts[giver], index)
        if len(parts[giver]) > 1:
            heappush(givers, (negative + problem.cost[parts[empty][0]], giver))
    return parts


def _exchange(parts: Parts, problem: PartitionProblem, goal: float | None = None) -> Parts:
    """Swap samples between costly and cheap parts, until the costliest part is near the mean cost or costs at most
    `goal`.

    In each round, costly and cheap parts form pairs. Each pair makes the swap that brings its costs closest.
    """
    k, empty = len(parts), len(problem.cost)
    movable, fixed = _split_large(parts, equal=problem.equal_count)
    sizes = np.array([len(part) for part in movable])
    # [k, m] one row per part: its samples, then empty slots. Swapping a sample with an empty slot moves the sample.
    slots = np.full((k, sizes.max() + (not problem.equal_count)), empty)
    slots[np.arange(slots.shape[1]) < sizes[:, None]] = np.concatenate(movable)
    cost, length = np.append(problem.cost, 0.0), np.append(problem.length, 0)
    fixed_load, fixed_used = problem.offset + sums(problem.cost, fixed), sums(problem.length, fixed)
    slack = TOLERANCE * problem.cost.sum() / k
    shift = 0
    for _ in range(ROUNDS):
        load, used = fixed_load + cost[slots].sum(1), fixed_used + length[slots].sum(1)
        order = np.argsort(load, kind="stable")
        if load[order[-1]] <= (load.mean() + slack if goal is None else goal) or shift >= min(k // 2, SHIFTS):
            break
        # After a round that hardly improved, `shift` pairs the costly parts with other cheap parts.
        costly, cheap = order[::-1][: k // 2], np.roll(order[: k // 2], shift * (k // 2 // SHIFTS or 1))
        gap = (load[costly] - load[cheap]) / 2
        apart = gap > slack / 2
        costly, cheap, gap = costly[apart], cheap[apart], gap[apart]

        given, back = slots[costly], slots[cheap]  # [pairs, m]
        # Swapping two samples whose costs differ by exactly `gap` makes the costs of the two parts equal.
        missed = np.abs(cost[given][:, :, None] - cost[back][:, None, :] - gap[:, None, None])  # [pairs, m, m]
        if problem.cap < length.sum():
            freed = length[given][:, :, None] - length[back][:, None, :]
            missed[freed > (problem.cap - used[cheap])[:, None, None]] = np.inf
            missed[freed < (used[costly] - problem.cap)[:, None, None]] = np.inf
        # Exclude moves that would leave a part without samples.
        only = (given < empty).sum(1) == 1
        missed += np.where(only[:, None] & (back == empty), np.inf, 0.0)[:, None, :]

        flat = missed.reshape(len(gap), slots.shape[1] ** 2)
        best = flat.argmin(1)
        gain = gap - flat[np.arange(len(gap)), best]
        pairs = np.flatnonzero(gain > slack / 16)
        given_slot, back_slot = np.divmod(best[pairs], slots.shape[1])
        here, there = (costly[pairs], given_slot), (cheap[pairs], back_slot)
        slots[here], slots[there] = slots[there], slots[here]
        shift = 0 if gain[pairs].sum() > slack else shift + 1
    return [np.append(rest, part[part < empty]) for rest, part in zip(fixed, slots, strict=True)]


def _split_large(parts: Parts, *, equal: bool) -> tuple[Parts, Parts]:
    """Split each part into samples that `_exchange` may move to other parts, and samples that stay.

    If `equal` is True, every part has the same number of movable samples.
    """
    # Up to 16,384 parts, a round of exchanges compares at most about 2 million pairs of samples.
    limit = max(16, min(64, int((2**22 / len(parts)) ** 0.5)))
    movable = [part[:: max(1, -(-len(part) // limit))] for part in parts]
    if equal:
        common = min(len(part) for part in movable)
        movable = [part[:common] for part in movable]
    fixed = [
        np.setdiff1d(part, moving) if len(moving) < len(part) else part[:0]
        for part, moving in zip(parts, movable, strict=True)
    ]
    return movable, fixed
