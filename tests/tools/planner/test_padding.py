"""Padded micro-batches, counted one by one."""

from __future__ import annotations

import numpy as np
import pytest

from padfree.packing import CostModel
from padfree.tools.planner.padding import padded
from tests.tools.planner.cases import log_normal

COST = CostModel(linear=1.0, quadratic=0.5)


@pytest.mark.parametrize("rows", [1, 2, 7, 50])
@pytest.mark.parametrize("grouped", [False, True])
def test_against_brute_force(rows: int, grouped: bool) -> None:
    steps = np.split(log_normal(50, 100), [20, 33])
    tokens, cost = 0, 0.0
    for step in steps:
        lengths = sorted(step.tolist()) if grouped else step.tolist()
        for start in range(0, len(lengths), rows):
            batch = lengths[start : start + rows]
            tokens += len(batch) * max(batch)
            cost += len(batch) * (max(batch) + 0.5 * max(batch) ** 2)
    found = padded(steps, COST, size=rows, grouped=grouped)
    assert found.tokens == tokens
    assert found.cost == pytest.approx(cost)
    if rows == 1:
        assert found.cost == pytest.approx(sum(COST(step).sum() for step in steps))
