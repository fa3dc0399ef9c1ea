from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from padfree.packing.cost import CostModel
from padfree.packing.step_plan import StepPlan, plan_step
from tests.refused import refused

QWEN3_4B = {
    "model_type": "qwen3",
    "hidden_size": 2560,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 9728,
    "vocab_size": 151936,
}


def log_normal(count: int, seed: int) -> NDArray[np.int64]:
    rng = np.random.default_rng(seed)
    return np.clip(np.rint(490 * np.exp(rng.standard_normal(count))), 1, 8192).astype(np.int64)


def check(plan: StepPlan, lengths: list[int], max_tokens: int, model: CostModel) -> None:
    """Check every invariant on the arrays."""
    batches = [batch for of_rank in plan.micro_batches for batch in of_rank]
    assert {len(of_rank) for of_rank in plan.micro_batches} == {plan.num_micro_batches}
    placed = np.concatenate([*batches, plan.dropped]).astype(int).tolist()
    assert sorted(placed) == list(range(len(lengths)))
    for batch in batches:
        assert (np.diff(batch) > 0).all()
        tokens = sum(min(lengths[i], max_tokens) if i in plan.truncated else lengths[i] for i in batch)
        assert tokens <= max_tokens or (len(batch) == 1 and batch[0] in plan.alone)
    if len(placed) - len(plan.dropped) >= len(batches):
        assert all(len(batch) for batch in batches)
    for overlong in (plan.truncated, plan.dropped, plan.alone):
        assert len(overlong) in (0, sum(n > max_tokens for n in lengths))
        assert all(lengths[i] > max_tokens for i in overlong)
    for of_rank, costs in zip(plan.micro_batches, plan.cost, strict=True):
        for batch, cost in zip(of_rank, costs, strict=True):
            assert cost == pytest.approx(model(plan.lengths[batch]).sum() + model.constant)
    # micro-batches that run at the same time are sorted by cost: no other grouping of them takes less
    flat = np.sort(plan.cost.ravel())[::-1]
    assert plan.step_cost == pytest.approx(flat[:: plan.ranks].sum())


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_invariants(data: st.DataObject) -> None:
    max_tokens = data.draw(st.integers(1, 40))
    overlong = data.draw(st.sampled_from(["error", "truncate", "drop", "alone"]))
    longest = max_tokens if overlong == "error" else 2 * max_tokens
    lengths = data.draw(st.lists(st.integers(0, longest), min_size=1, max_size=50))
    ranks = data.draw(st.integers(1, 6))
    model = data.draw(
        st.sampled_from([CostModel.tokens(), CostModel(linear=1.0, quadratic=0.1), CostModel(linear=0.5, constant=3.0)])
    )
    plan = plan_step(lengths, ranks=ranks, max_tokens=max_tokens, cost=model, overlong=overlong)
    assert plan.ranks == ranks
    check(plan, lengths, max_tokens, model)


@pytest.mark.parametrize("max_tokens", [8192, 16384, 32768])
def test_ranks_hardly_wait_for_each_other(max_tokens: int) -> None:
    lengths = log_normal(2048, 0)
    plan = plan_step(lengths, ranks=32, max_tokens=max_tokens, cost=CostModel.from_config(QWEN3_4B))
    assert plan.step_cost <= 1.03 * plan.cost.sum() / 32
    assert plan.imbalance == pytest.approx(plan.step_cost / (plan.cost.sum() / 32))
    assert plan.num_micro_batches == -(-lengths.sum() // (32 * max_tokens))
    assert plan.fill == pytest.approx(lengths.sum() / (32 * plan.num_micro_batches * max_tokens))
    assert np.array_equal(plan.tokens.sum(), lengths.sum())


def test_slots_next_to_a_costly_sample_get_more_work() -> None:
    """9 3 3 3 3 3 on 2 ranks: [9 | 3 3 3] [3 | 3] takes 12, evenly filled slots would take 15."""
    plan = plan_step([9, 3, 3, 3, 3, 3], ranks=2, max_tokens=9)
    assert plan.num_micro_batches == 2
    assert plan.step_cost == 12
    assert plan.imbalance == 1.0


def test_one_costly_sample_among_many() -> None:
    lengths = np.append(log_normal(1024, 1), 30_000)
    plan = plan_step(lengths, ranks=8, max_tokens=80_000, cost=CostModel(linear=1.0, quadratic=1 / 16_384))
    assert plan.imbalance <= 1.005


def test_fewer_micro_batches_than_best_fit_decreasing_needs() -> None:
    """Three of these samples fit into a micro-batch; best-fit decreasing pairs the longest and wastes the rest."""
    lengths = np.random.default_rng(0).integers(2200, 3300, 512)
    plan = plan_step(lengths, ranks=1, max_tokens=8192)
    check(plan, lengths.tolist(), 8192, CostModel.tokens())
    assert plan.num_micro_batches <= 1.05 * lengths.sum() / 8192


def test_fewer_samples_than_ranks() -> None:
    plan = plan_step([5, 7], ranks=4, max_tokens=10)
    assert [[batch.tolist() for batch in of_rank] for of_rank in plan.micro_batches] == [[[1]], [[0]], [[]], [[]]]
    assert plan.tokens.tolist() == [[7], [5], [0], [0]]


def test_overlong_samples_are_reported() -> None:
    lengths = [4, 25, 6, 30, 10]
    plan = plan_step(lengths, ranks=2, max_tokens=10, overlong="truncate")
    assert plan.truncated.tolist() == [1, 3]
    assert plan.lengths.tolist() == [4, 10, 6, 10, 10]
    plan = plan_step(lengths, ranks=2, max_tokens=10, overlong="drop")
    assert plan.dropped.tolist() == [1, 3]
    assert plan.num_micro_batches == 1
    plan = plan_step(lengths, ranks=2, max_tokens=10, overlong="alone")
    assert plan.alone.tolist() == [1, 3]
    assert {tuple(of_rank[0].tolist()) for of_rank in plan.micro_batches} == {(1,), (3,)}
    assert plan.fill == 1.0
    with refused("max_tokens"):
        plan_step(lengths, ranks=2, max_tokens=10)


def test_only_overlong_samples() -> None:
    plan = plan_step([20, 30, 40], ranks=2, max_tokens=10, overlong="alone")
    assert [[batch.tolist() for batch in of_rank] for of_rank in plan.micro_batches] == [[[2], []], [[1], [0]]]
    plan = plan_step([20, 30], ranks=2, max_tokens=10, overlong="drop")
    assert plan.num_micro_batches == 0
    assert (plan.step_cost, plan.imbalance, plan.fill) == (0.0, 1.0, 0.0)


def test_empty_samples() -> None:
    plan = plan_step([0, 0, 0], ranks=3, max_tokens=8)
    assert sorted(batch.tolist() for (batch,) in plan.micro_batches) == [[0], [1], [2]]
    assert plan.imbalance == 1.0


def test_same_plan_every_time_and_input_untouched() -> None:
    lengths = log_normal(200, 2)
    before = lengths.copy()
    first, second = (
        plan_step(n, ranks=4, max_tokens=8192, overlong="truncate").micro_batches for n in (lengths, lengths.tolist())
    )
    assert all(np.array_equal(a, b) for x, y in zip(first, second, strict=True) for a, b in zip(x, y, strict=True))
    assert np.array_equal(lengths, before)


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        ([], {}, "lengths: is empty"),
        ([3], {"ranks": 0}, "ranks: 0"),
        ([3], {"max_tokens": 0}, "max_tokens: 0"),
        ([3], {"overlong": "cut"}, "overlong: 'cut'; give one of error, truncate, drop, alone"),
        ([3, -3], {}, "lengths: is -3 for sample 1"),
    ],
)
def test_bad_input(lengths: list[int], options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_step(lengths, **{"ranks": 2, "max_tokens": 8, **options})


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_samples_of_a_group_share_a_micro_batch(ranks: int, rng: np.random.Generator) -> None:
    lengths = rng.integers(1, 20, 24)
    groups = [f"pair {index // 2}" for index in range(24)]
    plan = plan_step(lengths, ranks=ranks, max_tokens=60, cost=CostModel(linear=1.0, quadratic=0.1), groups=groups)
    assert sorted(index for of_rank in plan.micro_batches for batch in of_rank for index in batch) == list(range(24))
    assert plan.tokens.max() <= 60
    for of_rank in plan.micro_batches:
        for batch in of_rank:
            assert {index ^ 1 for index in batch.tolist()} == set(batch.tolist())
    costs = CostModel(linear=1.0, quadratic=0.1)(lengths)
    found = [[costs[batch].sum() for batch in of_rank] for of_rank in plan.micro_batches]
    np.testing.assert_allclose(plan.cost, found)
    with refused("max_tokens"):
        plan_step([6, 6], ranks=1, max_tokens=10, groups=["a", "a"])
    alone = plan_step([6, 6, 3, 1], ranks=1, max_tokens=10, overlong="alone", groups=["a", "a", "b", "b"])
    assert alone.alone.tolist() == [0, 1]
    dropped = plan_step([6, 6, 3, 1], ranks=1, max_tokens=10, overlong="drop", groups=["a", "a", "b", "b"])
    assert (dropped.dropped.tolist(), dropped.lengths.tolist()) == ([0, 1], [0, 0, 3, 1])
    for wrong in ({"groups": ["a"]}, {"groups": ["a", "a"], "overlong": "truncate"}):
        with pytest.raises(ValueError, match="; "):
            plan_step([6, 6], ranks=1, max_tokens=10, **wrong)
