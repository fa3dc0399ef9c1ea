"""Assign each sample to a rank and a micro-batch.

    micro_batches[rank][j]     rank 0   [0 5 9]  [3 7]          indices of the samples
                               rank 1   [1 2]    [4 6 8]
                                        j = 0    j = 1          all ranks run micro-batch j at the same time

Ranks wait for each other in every micro-batch. The cost of a step is therefore Σⱼ maxᵣ cost[r][j], over micro-batches j
and ranks r.

The samples of one rank and micro-batch form a pack. The plan makes few packs, of nearly equal cost. Packs of similar
cost run at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import ArrayLike, NDArray

from padfree.arrays import need_whole, number_array
from padfree.choices import PackOverlong
from padfree.errors import UserError, check_choice
from padfree.packing.balance import PartitionProblem, Parts, partition, sums
from padfree.packing.context_sizes import imbalance, plan_wide
from padfree.packing.cost import CostModel, Floats
from padfree.packing.fill import Indices, checked_lengths, fill
from padfree.packing.prefixes import PrefixTree

MicroBatches = tuple[tuple[Indices, ...], ...]

GOOD_ENOUGH = 1.002
"""A plan is accepted if its cost is at most this factor times the cost of a plan in which no rank waits for another.
Otherwise, a plan whose micro-batches have different target costs is tried too.
"""


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class StepPlan:
    """The plan of one step, made by `plan_step`.

    `micro_batches[rank][j]`: ascending indices of the samples that a rank runs in micro-batch j; may be empty.

    Without `widths`, a rank is a data rank (a process, or the context ranks that always share packs). With `widths`, a
    rank is one process. Then `widths[rank, j]` neighbouring ranks share a pack and list the same samples.
    """

    micro_batches: MicroBatches  # [ranks][J]
    lengths: Indices  # [n] length of each sample after truncation; 0 for a dropped sample
    max_tokens: int
    cost: Floats  # [ranks, J] cost of the rank's part of each pack
    truncated: Indices  # samples cut to max_tokens
    dropped: Indices  # samples in no micro-batch
    alone: Indices  # samples longer than max_tokens, each of them the only sample of its micro-batch
    prefixes: PrefixTree | None = None  # the prefix tree of all samples; None if samples share no prefix
    computed: Indices | None = None  # [ranks, J] tokens that each micro-batch computes; None if nothing is shared
    widths: Indices | None = None  # [ranks, J] number of ranks that share each pack; None if none is shared

    @staticmethod
    def empty(*, ranks: int, max_tokens: int) -> StepPlan:
        """Return the plan of a step that computes nothing: no rank has a micro-batch."""
        none: Indices = np.zeros(0, np.int64)
        return StepPlan(
            micro_batches=((),) * ranks,
            lengths=none,
            max_tokens=max_tokens,
            cost=np.zeros((ranks, 0)),
            truncated=none,
            dropped=none,
            alone=none,
        )

    @property
    def ranks(self) -> int:
        return len(self.micro_batches)

    @property
    def num_micro_batches(self) -> int:
        """Return the number of micro-batches J, which is the same on every rank."""
        return len(self.micro_batches[0])

    @property
    def tokens(self) -> Indices:
        """Return the total length of the samples in each micro-batch, [ranks, micro-batches].

        A pack that ranks share counts only for the first of them.
        """
        tokens = [[self.lengths[batch].sum() for batch in batches] for batches in self.micro_batches]
        return np.array(tokens, dtype=np.int64).reshape(self.ranks, self.num_micro_batches) * self.is_first

    @property
    def is_first(self) -> NDArray[np.bool_]:
        """Return whether a rank is the first (or only) one that computes a pack, as bools [ranks, micro-batches]."""
        if self.widths is None:
            return np.ones((self.ranks, self.num_micro_batches), dtype=np.bool_)
        first: NDArray[np.bool_] = np.arange(self.ranks)[:, None] % self.widths == 0
        return first

    def packs_of(self, rank: int) -> list[tuple[Indices, int | None]]:
        """Return, for each of the J packs of a rank, the indices of its samples and the number of ranks that share the
        pack.

        The number is None in a plan without `widths`.
        """
        widths = [None] * self.num_micro_batches if self.widths is None else self.widths[rank].tolist()
        return list(zip(self.micro_batches[rank], widths, strict=True))

    def padded_tokens(self, context: int = 1) -> int:
        """Return the total number of tokens of all packs, including padding. A pack is padded so that the ranks that
        share it hold equal numbers of tokens.

        `context`: number of ranks that share each pack; ignored if the plan has `widths`.
        """
        width = np.full_like(self.computed_tokens, context) if self.widths is None else self.widths
        return int((np.maximum(-(-self.computed_tokens // width), 1) * width)[self.is_first].sum())

    @property
    def computed_tokens(self) -> Indices:
        """Return the number of tokens that each micro-batch computes, [ranks, J]. The tokens of a shared prefix count
        once.
        """
        return self.tokens if self.computed is None else self.computed

    @property
    def sharing(self) -> float:
        """Return the number of tokens of all samples, divided by the number of computed tokens; 1 without shared
        prefixes.
        """
        computed = int(self.computed_tokens.sum())
        return int(self.tokens.sum()) / computed if computed else 1.0

    @property
    def step_cost(self) -> float:
        """Return the cost of the step: for each micro-batch the cost of the costliest rank, summed over the
        micro-batches.
        """
        return float(self.cost.max(0).sum())

    @property
    def imbalance(self) -> float:
        """Return the cost of the step, divided by its cost if no rank had to wait for another. A perfect plan has 1."""
        return imbalance(self.cost)

    @property
    def fill(self) -> float:
        """Return the number of tokens that the micro-batches compute, divided by the number that they could hold.

        A micro-batch that exceeds `max_tokens` per rank, because it holds an overlong sample, counts as full.
        """
        held = np.minimum(self.computed_tokens, self.max_tokens * (1 if self.widths is None else self.widths))
        return float(held.sum() / (held.size * self.max_tokens)) if held.size else 0.0


def plan_step(
    lengths: ArrayLike,  # [n] number of tokens of each sample
    *,
    ranks: int,
    max_tokens: int,  # limit of the tokens in a micro-batch on one rank
    cost: CostModel | None = None,  # None: the cost of a sample is its number of tokens
    overlong: PackOverlong = "error",
    groups: Sequence[Hashable] | None = None,  # [n] samples with equal entries stay in one micro-batch
    costs: ArrayLike | None = None,  # [n] costs to use instead of those of the cost model
    added: ArrayLike | None = None,  # [n] costs to add to those of the cost model, e.g. of images
    contexts: Sequence[int] = (1,),  # numbers of ranks that may share a pack: each divides the next, all divide `ranks`
) -> StepPlan:
    """Return a plan that assigns each of n samples to a rank and a micro-batch.

    `overlong`: what to do with a sample longer than `max_tokens * contexts[-1]`. "alone" gives the sample a micro-batch
    of its own.
    """
    length = checked_lengths(lengths).copy()
    for field, value in (("ranks", ranks), ("max_tokens", max_tokens)):
        need_whole(field, value, 1, "give 1 or more")
    check_choice("overlong", overlong, PackOverlong)
    if not len(length):
        raise UserError("lengths", "is empty", "give one or more samples for a step")
    model = cost or CostModel.tokens()
    if costs is not None:
        assert groups is None
        given = number_array(costs, "costs").astype(np.float64)
        left_cost = partial(_cost_of_left, given)
        return _plan(length, left_cost, model.constant, ranks, max_tokens, overlong, contexts)
    extra = None if added is None else number_array(added, "added").astype(np.float64)
    if groups is None and extra is not None:
        return _plan(
            length, lambda left: model(left) + _cost_of_left(extra, left), model.constant, ranks, max_tokens, overlong,
            contexts,
        )  # fmt: skip
    if groups is None:
        return _plan(length, model, model.constant, ranks, max_tokens, overlong, contexts)
    return _plan_groups(length, groups, model, ranks, max_tokens, overlong, contexts, extra)


def _cost_of_left(cost: Floats, left: Indices) -> Floats:
    return np.where(left > 0, cost, 0.0)


def _plan_groups(
    length: Indices,
    groups: Sequence[Hashable],
    model: CostModel,
    ranks: int,
    max_tokens: int,
    overlong: PackOverlong,
    contexts: Sequence[int],
    extra: Floats | None = None,
) -> StepPlan:
    """Plan a step in which samples with equal entries in `groups` stay in one micro-batch.

    Each group is planned like one sample with the total length and cost of the group. `extra` [n]: costs to add to
    those of the cost model.
    """
    if len(groups) != len(length):
        raise UserError("groups", f"has {len(groups)} entries for {len(length)} samples", "give one group per sample")
    if overlong == "truncate":
        raise UserError(
            "overlong",
            "'truncate' cannot be used with groups",
            "set overlong to 'error', 'drop' or 'alone', or cut the samples beforehand",
        )
    numbers: dict[Hashable, int] = {}
    group = np.array([numbers.setdefault(name, len(numbers)) for name in groups])
    group_length = np.bincount(group, weights=length).astype(np.int64)
    costs = model(length) if extra is None else model(length) + extra
    group_cost: Floats = np.bincount(group, weights=costs).astype(np.float64)
    found = _plan(
        group_length, partial(_cost_of_left, group_cost), model.constant, ranks, max_tokens, overlong, contexts
    )

    def members(chosen: Indices) -> Indices:
        return np.flatnonzero(np.isin(group, chosen))

    return replace(
        found,
        micro_batches=tuple(tuple(members(batch) for batch in batches) for batches in found.micro_batches),
        lengths=np.where(np.isin(group, found.dropped), 0, length),
        dropped=members(found.dropped),
        alone=members(found.alone),
    )


def _plan(
    length: Indices,
    cost: Callable[[Indices], Floats],
    constant: float,
    ranks: int,
    max_tokens: int,
    overlong: PackOverlong,
    contexts: Sequence[int],
) -> StepPlan:
    """Plan a step over n samples of `length` [n].

    `length` is changed in place: truncated samples get their new length, and dropped samples get 0. `cost` is a
    function that maps lengths to costs, and `constant` is the fixed cost of a micro-batch.
    """
    limit = max_tokens * contexts[-1]
    too_long = np.flatnonzero(length > limit)
    if len(too_long) and overlong == "error":
        raise UserError(
            "max_tokens",
            f"{limit} is less than the {length[too_long[0]]} tokens of sample {too_long[0]} ({len(too_long)} "
            "samples exceed it)",
            "raise max_tokens, or set overlong to 'truncate', 'drop' or 'alone'",
        )
    truncated, dropped, alone = (
        too_long if overlong == name else too_long[:0] for name in ("truncate", "drop", "alone")
    )
    length[truncated] = limit
    length[dropped] = 0
    sample_cost, kept, widths = cost(length), np.setdiff1d(np.arange(len(length)), dropped), None
    if len(contexts) > 1:
        wide = plan_wide(length, sample_cost, kept, ranks=ranks, max_tokens=max_tokens, sizes=contexts)
        micro_batches, slot_cost, widths = wide.micro_batches, wide.cost, wide.widths
    else:
        micro_batches, slot_cost = _slots(length, sample_cost, np.setdiff1d(kept, alone), alone, ranks, max_tokens)
    return StepPlan(
        micro_batches=micro_batches,
        lengths=length,
        max_tokens=max_tokens,
        cost=slot_cost + constant,
        truncated=truncated,
        dropped=dropped,
        alone=alone,
        widths=widths,
    )


def _slots(
    length: Indices, cost: Floats, rest: Indices, alone: Indices, ranks: int, max_tokens: int
) -> tuple[MicroBatches, Floats]:
    """Divide samples over J micro-batches of each rank. Return the micro-batches and their costs [ranks, J].

    `length` and `cost`: of all samples, [n]. `alone`: indices of samples that need a micro-batch of their own. `rest`:
    indices of samples that can share one.
    """
    problem = PartitionProblem(cost[rest], length[rest], max_tokens, np.zeros(0))
    parts = _fewest_slots(problem, ranks, len(alone))

    def arranged(parts: Parts) -> tuple[MicroBatches, Floats]:
        return _arranged([*alone[:, None], *(rest[part] for part in parts)], cost, ranks)

    found = arranged(parts)
    levels = _levels(cost, ranks, (len(parts) + len(alone)) // ranks)
    if len(rest) and imbalance(found[1]) > GOOD_ENOUGH and levels.min() < levels.max():
        uneven = partition(replace(problem, offset=-np.repeat(levels, ranks)[len(alone) :]))
        if uneven is not None:
            found = min(found, arranged(uneven), key=lambda one: imbalance(one[1]))
    return found


def _fewest_slots(problem: PartitionProblem, ranks: int, num_alone: int) -> Parts:
    """Divide the samples of `problem` into as few slots as possible. A slot is one micro-batch of one rank.

    `num_alone`: number of further slots, for overlong samples. The total number of slots is a multiple of `ranks`.
    """
    num_tokens, cap = int(problem.length.sum()), problem.cap
    if not len(problem.cost):
        return [problem.length[:0]] * (-num_alone % ranks)
    fewest = max(1, -(-num_tokens // cap))  # if every slot were full
    if fewest == ranks == 1 and not num_alone:
        return [np.arange(len(problem.length))]
    most = len(fill(problem.length, cap))
    low, high = (-(-(slots + num_alone) // ranks) for slots in (fewest, most))  # in slots per rank
    parts = None
    while low < high:
        middle = (low + high) // 2
        found = partition(replace(problem, offset=np.zeros(middle * ranks - num_alone)))
        if found is None:
            low = middle + 1
        else:
            high, parts = middle, found
    parts = parts or partition(replace(problem, offset=np.zeros(high * ranks - num_alone)))
    assert parts is not None, "fill proves that an assignment exists"
    return parts


def _arranged(slots: Parts, sample_cost: Floats, ranks: int) -> tuple[MicroBatches, Floats]:
    """Assign slots (lists of samples for one rank and one micro-batch) to J micro-batches of each rank, costliest
    first.

    Return the micro-batches and their costs [ranks, J].
    """
    cost = sums(sample_cost, slots) if slots else np.zeros(0)
    grid = np.argsort(-cost, kind="stable").reshape(-1, ranks)  # slots of similar cost run at the same time
    grid[1::2] = grid[1::2, ::-1]  # so that the total costs of the ranks are close
    return tuple(tuple(slots[slot] for slot in of_rank) for of_rank in grid.T.tolist()), cost[grid.T]


def _levels(sample_cost: Floats, ranks: int, num_micro_batches: int) -> Floats:
    """Return the target cost of each rank in each of J micro-batches, [J]. The targets are equal, unless one sample
    costs more.

    For example, 2 micro-batches hold a total cost of 12 per rank. One sample costs 9, so the targets are 9 and 3.
    """
    single = np.sort(sample_cost)[::-1][::ranks][:num_micro_batches]
    level = np.zeros(num_micro_batches)
    level[: len(single)] = single
    mean = float(sample_cost.sum()) / ranks
    for j in range(num_micro_batches):
        share = (mean - level[:j].sum()) / (num_micro_batches - j)
        if share >= level[j]:
            level[j:] = share
            break
    return level
