"""An epoch's plan: numbers compared with hand-computed sums, and the choice of planned steps."""

from __future__ import annotations

import numpy as np
import pytest

from padfree.packing import CostModel, plan_step
from padfree.tools.planner.epoch import PlanShape, plan_epoch
from padfree.tools.planner.steps import sft_steps, spread
from tests.tools.planner.cases import config_of, log_normal

COST = CostModel(linear=2.0, quadratic=0.01, constant=5.0)


def test_numbers_against_brute_force() -> None:
    steps = sft_steps(log_normal(203, 600), config_of(batch={"samples": 20})).steps
    shape = PlanShape(ranks=6, context=2, max_tokens=350)
    epoch = plan_epoch(steps, shape, COST, exact_steps=None)
    assert epoch.planned.tolist() == list(range(11))
    assert epoch.tokens.tolist() == [sum(step.tolist()) for step in steps]

    held = slots = waited = worked = 0.0
    for step in steps:
        plan = plan_step(step, ranks=3, max_tokens=700, cost=COST)
        for j in range(plan.num_micro_batches):
            costs = []
            for rank in range(3):
                lengths = [int(step[i]) for i in plan.micro_batches[rank][j]]
                held, slots = held + sum(lengths), slots + 1
                costs.append(5.0 + sum(2.0 * n + 0.01 * n * n for n in lengths))
            waited, worked = waited + max(costs), worked + sum(costs) / 3
    assert epoch.fill == pytest.approx(held / slots / 700)
    assert epoch.imbalance == pytest.approx(waited / worked)
    assert epoch.slot_tokens.sum() == held
    # one rank takes the whole cost; two context ranks halve all but the constant
    rounds = slots / 3
    assert epoch.time() == pytest.approx((waited - 5.0 * rounds) / 2 + 5.0 * rounds)


def test_an_uneven_layout_delays_attention_only() -> None:
    steps = [np.array([100, 50]), np.array([80])]
    shape = PlanShape(ranks=2, context=2, max_tokens=100)
    linear = plan_epoch(steps, shape, CostModel(linear=1.0))
    assert linear.time(1.5) == linear.time() == 115.0
    square = plan_epoch(steps, shape, CostModel(linear=0.0, quadratic=1.0))
    assert square.time(1.5) == pytest.approx(1.5 * square.time())


def test_samples_longer_than_a_row_are_planned_alone() -> None:
    epoch = plan_epoch([np.array([30, 5, 5]), np.array([25])], PlanShape(ranks=1, max_tokens=20), COST)
    assert sorted(epoch.slot_tokens.tolist()) == [10, 25, 30]
    assert epoch.fill == pytest.approx((20 + 20 + 10) / 60)


def test_few_of_many_steps_tell_the_whole() -> None:
    """100,000 samples with some steps planned: counts are exact, estimates are close."""
    steps = sft_steps(log_normal(100_000, 4096), config_of(batch={"samples": 512})).steps
    seen: list[tuple[int, int]] = []
    epoch = plan_epoch(
        steps,
        PlanShape(ranks=8, max_tokens=8192),
        COST,
        exact_steps=8,
        progress=lambda done, all: seen.append((done, all)),
    )
    assert len(steps) == 196
    assert len(epoch.plans) == 8
    assert epoch.planned[[0, -1]].tolist() == [12, 183]
    assert seen == [(done, 8) for done in range(1, 9)]
    assert sum(map(len, epoch.steps)) == 100_000
    # no epoch is faster than without waiting, and plans wait little
    without_waiting = sum(float(COST(step).sum()) for step in steps) / 8
    assert without_waiting < epoch.time() < 1.2 * without_waiting


def test_spread() -> None:
    assert spread(10, 4).tolist() == [1, 3, 6, 8]
    assert spread(3, 8).tolist() == [0, 1, 2]
    assert spread(5, 1).tolist() == [2]
    assert spread(5, 0).tolist() == []


def test_rows_have_the_longest_sample_among_them() -> None:
    steps = sft_steps(log_normal(500, 900), config_of()).steps
    epoch = plan_epoch(steps, PlanShape(ranks=2, max_tokens=1000), COST)
    rows = epoch.packs(5)
    assert 4 <= len(rows) <= 5
    assert max(int(row.max()) for row in rows) == max(int(step.max()) for step in steps)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"ranks": 0, "max_tokens": 8}, "--ranks: 0 is not a positive number; give 1 or more"),
        ({"ranks": 4, "context": 3, "max_tokens": 8}, "--cp: 4 ranks cannot be divided into groups of 3"),
        ({"ranks": 4, "context": 2, "replicate": 4, "max_tokens": 8}, "--cp: 4 ranks cannot .* groups of 2 × 4 "),
        ({"ranks": 4, "max_tokens": 0}, "--max-tokens: 0 is not a positive number; give 1 or more"),
    ],
)
def test_shapes_that_cannot_be(shape: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PlanShape(**shape)
