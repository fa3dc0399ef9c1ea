"""Plan a step so that samples that share prefixes stay in one pack, if this makes the step cheaper.

A family is a set of samples that share a prefix. Each family is planned like one sample, whose shared tokens count
once. A family that does not fit into a pack is divided, and each part computes the prefix again.

If ranks are unbalanced, all families are divided into 2, 4, 8, ... parts, as long as the step gets cheaper.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from padfree.choices import PackOverlong
from padfree.packing.cost import CostModel
from padfree.packing.fill import Indices
from padfree.packing.prefixes import PrefixTree
from padfree.packing.step_plan import StepPlan, plan_step

BALANCED = 1.02
"""If the cost of a plan is at most this factor times that of a perfectly balanced plan, families (sets of samples that
share a prefix) are not divided into more parts.
"""


def plan_shared_step(
    prefixes: PrefixTree,
    lengths: NDArray[np.int64],
    *,
    ranks: int,
    max_tokens: int,
    cost: CostModel | None = None,
    overlong: PackOverlong = "error",
    groups: Sequence[Hashable] | None = None,
    added: NDArray[np.float64] | None = None,
    contexts: Sequence[int] = (1,),
) -> StepPlan:
    """Plan a step like `plan_step`, but compute the shared prefixes of the tree `prefixes` once where this is cheaper.

    With `groups`, samples of a group stay in one pack. Without `groups`, a sample longer than `max_tokens` shares
    nothing.
    """
    model = cost or CostModel.tokens()
    limit = max_tokens * contexts[-1]
    too_long = lengths > limit
    whole = [] if groups is None else _whole_groups(groups)
    if any(prefixes.restricted(group).num_tokens > limit for group in whole):
        too_long = np.ones_like(too_long)
    if not prefixes.is_shared or (too_long.any() and (overlong != "alone" or whole)):
        return plan_step(
            lengths, groups=groups, ranks=ranks, max_tokens=max_tokens, cost=model, overlong=overlong, added=added,
            contexts=contexts,
        )  # fmt: skip
    options: dict[str, Any] = {
        "ranks": ranks,
        "max_tokens": max_tokens,
        "model": model,
        "contexts": contexts,
        "added": np.zeros(len(lengths)) if added is None else added,
    }
    if whole:
        return _plan(prefixes, whole, lengths, **options)
    families = _families(prefixes, lengths > max_tokens)
    best: StepPlan | None = None
    for parts in _powers_of_two(max(len(family) for family in families)):
        units = [unit for family in families for unit in _units(prefixes, family, parts, max_tokens)]
        plan = _plan(prefixes, units, lengths, **options)
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
    """Group the samples into families: samples that share a prefix.

    The samples of a family are in tree order, so that neighbours share the most. A sample without a shared prefix is a
    family of its own.
    """
    order = np.argsort(prefixes.last, kind="stable")
    root = prefixes.roots[order]
    alone = too_long[order] | (root < 0)
    # A sample that is longer than a pack is a family by itself, even if it shares a prefix.
    key = np.where(alone, len(prefixes.parents) + np.arange(len(order)), root)
    by_key = np.argsort(key, kind="stable")
    borders = np.flatnonzero(np.diff(key[by_key])) + 1
    return np.split(order[by_key], borders)


def _units(prefixes: PrefixTree, family: Indices, parts: int, max_tokens: int) -> list[Indices]:
    """Divide a family (samples that share a prefix) into `parts` parts, and halve each part that does not fit into a
    pack.
    """
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
    added: NDArray[np.float64],
) -> StepPlan:
    """Plan a step from `units`: lists of samples that stay in one pack and are planned like one sample."""
    trees = [prefixes.restricted(unit) for unit in units]
    tokens = np.array([tree.num_tokens for tree in trees], dtype=np.int64)
    costs = [tree.cost(model) + float(added[unit].sum()) for tree, unit in zip(trees, units, strict=True)]
    plan = plan_step(
        tokens, ranks=ranks, max_tokens=max_tokens, cost=model, overlong="alone", costs=costs, contexts=contexts
    )

    def samples(batch: Indices) -> Indices:
        return np.sort(np.concatenate([lengths[:0], *(units[unit] for unit in batch.tolist())]))

    return replace(
        plan,
        micro_batches=tuple(tuple(samples(batch) for batch in batches) for batches in plan.micro_batches),
        lengths=lengths,
        alone=np.flatnonzero(lengths > max_tokens * contexts[-1]),
        prefixes=prefixes,
        computed=plan.tokens,
    )


def _powers_of_two(most: int) -> list[int]:
    """Return the powers of two that are less than `most`, and `most` itself."""
    return [*(1 << bit for bit in range((most - 1).bit_length())), most]
