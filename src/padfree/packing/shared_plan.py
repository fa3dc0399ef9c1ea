"""A step plan in which samples that share prefixes stay together where that pays.

    samples      0 1 2 3 share a prompt     4 5 share another     6 shares nothing
    families     [0 1 2 3]                  [4 5]                 [6]
    units        [0 1 2 3] [4 5] [6]        planned as if each were a sample: its tokens, shared ones once, and its cost

A family that does not fit into a row is divided, and each part computes the prefix anew. All families are divided into
2, 4, 8, ... parts as long as the ranks wait for each other and the step gets cheaper by it: one group on two ranks is
two halves. Planning knows the nodes of the whole step; a row takes those of its samples (`PrefixTree.restricted`), so
that it holds exactly the tokens that were planned.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from padfree.config.choices import PackOverlong
from padfree.packing.cost import CostModel
from padfree.packing.fill import Indices
from padfree.packing.prefixes import PrefixTree
from padfree.packing.step_plan import StepPlan, plan_step

BALANCED = 1.02
"""An imbalance up to this is not worth computing prefixes more often."""


def plan_shared_step(
    prefixes: PrefixTree,
    lengths: NDArray[np.int64],
    *,
    ranks: int,
    max_tokens: int,
    cost: CostModel | None = None,
    overlong: PackOverlong = "error",
    groups: Sequence[Hashable] | None = None,
    contexts: Sequence[int] = (1,),
) -> StepPlan:
    """The plan of one step over samples of these `lengths` [n] that share `prefixes`. See `plan_step`.

    No micro-batch computes more than `max_tokens`. The samples of one of the `groups` [n], where they are given, are
    never divided. With several `contexts`, families are kept to what one rank holds: a longer sample shares nothing,
    and its row is as wide as it wants.
    """
    model = cost or CostModel.tokens()
    limit = max_tokens * contexts[-1]
    too_long = lengths > limit
    whole = [] if groups is None else _whole_groups(groups)
    if any(prefixes.restricted(group).num_tokens > limit for group in whole):
        too_long = np.ones_like(too_long)
    if not prefixes.is_shared or (too_long.any() and (overlong != "alone" or whole)):
        return plan_step(
            lengths, groups=groups, ranks=ranks, max_tokens=max_tokens, cost=model, overlong=overlong, contexts=contexts
        )
    if whole:
        return _plan(prefixes, whole, lengths, ranks=ranks, max_tokens=max_tokens, model=model, contexts=contexts)
    families = _families(prefixes, lengths > max_tokens)
    best: StepPlan | None = None
    for parts in _powers_of_two(max(len(family) for family in families)):
        units = [unit for family in families for unit in _units(prefixes, family, parts, max_tokens)]
        plan = _plan(prefixes, units, lengths, ranks=ranks, max_tokens=max_tokens, model=model, contexts=contexts)
        if best is not None and plan.step_cost >= best.step_cost:
            break
        best = plan
        if plan.imbalance <= BALANCED:
            break
    assert best is not None
    return best


def _whole_groups(groups: Sequence[Hashable]) -> list[Indices]:
    members: dict[Hashable, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    return [np.array(each, dtype=np.int64) for each in members.values()]


def _families(prefixes: PrefixTree, too_long: NDArray[np.bool_]) -> list[Indices]:
    """Samples that share, in the order of the tree, so that neighbours share the most; each of the others by itself."""
    order = np.argsort(prefixes.last, kind="stable")
    root = prefixes.roots[order]
    alone = too_long[order] | (root < 0)
    # A sample that is longer than a row is a row of its own, whatever it shares.
    key = np.where(alone, len(prefixes.parents) + np.arange(len(order)), root)
    by_key = np.argsort(key, kind="stable")
    borders = np.flatnonzero(np.diff(key[by_key])) + 1
    return np.split(order[by_key], borders)


def _units(prefixes: PrefixTree, family: Indices, parts: int, max_tokens: int) -> list[Indices]:
    """The family in so many parts, or in more where one does not fit into a row."""
    units: list[Indices] = []
    todo = [part for part in np.array_split(family, min(parts, len(family))) if len(part)][::-1]
    while todo:
        unit = todo.pop()
        if len(unit) > 1 and prefixes.restricted(unit).num_tokens > max_tokens:
            half = len(unit) // 2
            todo += [unit[half:], unit[:half]]
        else:
            units.append(unit)
    return units


def _plan(
    prefixes: PrefixTree,
    units: Sequence[Indices],
    lengths: NDArray[np.int64],
    *,
    ranks: int,
    max_tokens: int,
    model: CostModel,
    contexts: Sequence[int],
) -> StepPlan:
    """The plan of units, with their samples in place of them."""
    trees = [prefixes.restricted(unit) for unit in units]
    tokens = np.array([tree.num_tokens for tree in trees], dtype=np.int64)
    costs = [tree.cost(model) for tree in trees]
    plan = plan_step(
        tokens, ranks=ranks, max_tokens=max_tokens, cost=model, overlong="alone", costs=costs, contexts=contexts
    )

    def samples(batch: Indices) -> Indices:
        return np.sort(np.concatenate([lengths[:0], *(units[unit] for unit in batch.tolist())]))

    return replace(
        plan,
        micro_batches=tuple(tuple(samples(batch) for batch in row) for row in plan.micro_batches),
        lengths=lengths,
        alone=np.flatnonzero(lengths > max_tokens * contexts[-1]),
        prefixes=prefixes,
        computed=plan.tokens,
    )


def _powers_of_two(most: int) -> list[int]:
    """1, 2, 4, ... and `most`."""
    return [*(1 << bit for bit in range((most - 1).bit_length())), most]
