"""Packs as wide as their cost requires: every sample once, no rank over its cap, balanced ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from padfree.packing import CostModel, StepPlan, plan_shared_step, plan_step
from padfree.packing.collate import prefixes_of
from padfree.packing.context_sizes import context_sizes
from padfree.sample import Sample
from tests.refused import refused

COST = CostModel(linear=1.0, quadratic=1e-3, constant=0.5)


def check(plan: StepPlan, sizes: Sequence[int], lengths: Sequence[int]) -> None:
    assert plan.widths is not None
    assert {len(of_rank) for of_rank in plan.micro_batches} == {plan.num_micro_batches}
    found = []
    for rank, of_rank in enumerate(plan.micro_batches):
        for j, indices in enumerate(of_rank):
            width = int(plan.widths[rank, j])
            assert width in sizes
            first = rank - rank % width
            for other in range(first, first + width):  # all ranks of a process group of this size
                assert plan.widths[other, j] == width
                assert (plan.micro_batches[other][j] == indices).all()
                assert plan.cost[other, j] == plan.cost[first, j]
            if plan.is_first[rank, j]:
                found += indices.tolist()
                most = plan.max_tokens * width
                assert plan.lengths[indices].sum() <= most or (len(indices) == 1 and width == sizes[-1])
    assert sorted(found) == [*range(len(lengths))]
    assert plan.tokens.sum() == sum(lengths)


def test_sizes_divide_each_other() -> None:
    assert [context_sizes(n) for n in (1, 2, 6, 8, 12)] == [(1,), (1, 2), (1, 3, 6), (1, 2, 4, 8), (1, 3, 6, 12)]


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 400), min_size=1, max_size=60),
    largest=st.sampled_from([2, 4, 6, 8]),
    replicate=st.sampled_from([1, 2]),
    max_tokens=st.sampled_from([50, 64, 200]),
)
def test_every_sample_once_and_no_rank_over_its_cap(
    lengths: list[int], largest: int, replicate: int, max_tokens: int
) -> None:
    sizes, ranks = context_sizes(largest), largest * replicate
    plan = plan_step(lengths, ranks=ranks, max_tokens=max_tokens, cost=COST, overlong="alone", contexts=sizes)
    check(plan, sizes, lengths)
    again = plan_step(lengths, ranks=ranks, max_tokens=max_tokens, cost=COST, overlong="alone", contexts=sizes)
    assert (again.cost == plan.cost).all()


def long_tailed(seed: int, samples: int = 512) -> np.ndarray:
    """Log-normal lengths with a tail up to 128k."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(np.log(2500), 1.3, samples), 16, 131072).astype(np.int64)
    lengths[0] = 131072
    return lengths


@pytest.mark.parametrize("seed", [0, 1])
def test_ranks_are_balanced_if_a_fixed_size_is_not(seed: int) -> None:
    """64 ranks of 16k tokens, the cost of an 8B model."""
    cost, lengths = CostModel(linear=4.9e10, quadratic=8.8e5), long_tailed(seed)
    plan = plan_step(lengths, ranks=64, max_tokens=16384, cost=cost, contexts=context_sizes(64))
    check(plan, context_sizes(64), lengths.tolist())
    assert plan.imbalance <= 1.05
    for context in (1, 2, 4, 8):
        fixed = plan_step(lengths, ranks=64 // context, max_tokens=16384 * context, cost=cost, overlong="alone")
        assert fixed.imbalance > 1.1
        assert fixed.step_cost / context > 1.1 * plan.step_cost


def test_the_longest_sample_grows_with_the_group() -> None:
    for largest in (1, 2, 4, 8):
        sizes = context_sizes(largest)
        fits = plan_step([100 * largest, 10], ranks=8, max_tokens=100, contexts=sizes)
        assert fits.widths is None or fits.widths.max() == largest
        with refused("max_tokens"):
            plan_step([100 * largest + 1, 10], ranks=8, max_tokens=100, contexts=sizes)


def test_short_packs_stay_on_one_rank() -> None:
    plan = plan_step([10] * 64, ranks=8, max_tokens=20, contexts=context_sizes(8))
    assert plan.widths is not None
    assert (plan.widths == 1).all()
    assert plan.imbalance == 1.0
    assert plan.padded_tokens() == 640


def test_pads_and_fill_count_a_shared_pack_once() -> None:
    plan = plan_step([39], ranks=4, max_tokens=10, contexts=context_sizes(4))
    assert plan.tokens.tolist() == [[39], [0], [0], [0]]
    assert plan.padded_tokens() == 40
    assert plan.fill == 39 / 40


def test_groups_stay_whole_and_families_share() -> None:
    lengths = [30, 30, 5, 5, 9, 9]
    plan = plan_step(lengths, groups=list("aabbcc"), ranks=4, max_tokens=20, contexts=context_sizes(4))
    check(plan, context_sizes(4), lengths)
    for of_rank in plan.micro_batches:
        for indices in of_rank:
            assert all((indices // 2 == number).sum() in (0, 2) for number in range(3))
    prompt = np.arange(100, 108)
    tokens = [np.concatenate([prompt, np.arange(n) + 10 * n]) for n in (4, 5, 6, 60)]
    tree = prefixes_of([Sample(tokens=each, group="a") for each in tokens], True)
    shared = plan_shared_step(
        tree, np.array([len(each) for each in tokens]), ranks=4, max_tokens=24, contexts=context_sizes(4)
    )
    assert shared.widths is not None
    assert shared.widths.max() == 4, "68 tokens need four ranks of 24"
    assert shared.sharing > 1
    assert (shared.computed_tokens <= 24 * shared.widths).all()
