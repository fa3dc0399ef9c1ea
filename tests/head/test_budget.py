"""Sizes of tiles and chunks: within the budget, and covering everything."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from padfree.head.budget import (
    FUSED_TWICE_BYTES,
    GIBIBYTE,
    FusedPlan,
    block_columns,
    budget_bytes,
    choose_tile,
    choose_width,
    even_part,
    plan_fused,
    usable_budget,
)
from tests.refused import refused

BFLOAT16: dict[str, Any] = {"logit_bytes": 2, "row_bytes": 0, "sum_bytes": 4, "gradient_bytes": 2}
FLOAT32: dict[str, Any] = {"logit_bytes": 4, "row_bytes": 0, "sum_bytes": 4, "gradient_bytes": 4}


def held_bytes(plan: FusedPlan, rows: int, hidden: int, vocabulary: int) -> int:
    """Bytes of a bfloat16 plan in addition to the returned gradients."""
    total = plan.chunk_rows * plan.kept * 2
    if plan.chunk_rows < rows:
        total += (plan.kept - plan.shared) * hidden * 4
    if plan.kept < vocabulary:
        total += rows * hidden * 2
    return total


def test_settings() -> None:
    assert budget_bytes("speed") == 4 * GIBIBYTE
    assert budget_bytes("low") == GIBIBYTE
    assert budget_bytes(12345) == 12345
    for wrong in ("high", 0, -1, True):
        with refused("memory"):
            budget_bytes(wrong)  # type: ignore[arg-type]


def test_a_budget_is_never_less_than_the_sums_of_one_gradient() -> None:
    assert usable_budget(GIBIBYTE, 16_384, 4096, sum_bytes=4) == GIBIBYTE
    assert usable_budget(10, 16, 8, sum_bytes=4) == 512


@pytest.mark.parametrize(
    ("vocabulary", "block"), [(1, 64), (123, 64), (1023, 128), (32_000, 4096), (151_936, 4096), (262_144, 4096)]
)
def test_blocks(vocabulary: int, block: int) -> None:
    assert block_columns(vocabulary) == block


def test_the_plans_of_the_documentation() -> None:
    shape = (16_384, 4096, 151_936)
    options = {**BFLOAT16, "row_bytes": 12 * 1187, "twice_bytes": FUSED_TWICE_BYTES, "weight_gradient": True}
    fast = plan_fused(*shape, **options, budget=4 * GIBIBYTE)
    assert (fast.chunk_rows, fast.kept) == (8192, 151_936)
    small = plan_fused(*shape, **options, budget=GIBIBYTE)
    assert (small.chunk_rows, small.kept) == (4096, 86_016)


def test_a_plan_leaves_no_part_of_a_matmul_idle() -> None:
    """Chunks of 2731 tokens would allow more columns, but their matmul takes as long as one of 2816 tokens."""
    plan = plan_fused(8192, 2048, 151_936, **BFLOAT16, budget=GIBIBYTE, weight_gradient=True, twice_bytes=0)
    assert plan.chunk_rows % 128 == 0
    assert 8192 % plan.chunk_rows == 0


@given(
    rows=st.integers(1, 5000),
    hidden=st.integers(1, 512),
    vocabulary=st.integers(1, 20_000),
    budget=st.integers(1, 1 << 26),
    weight_gradient=st.booleans(),
)
def test_plans_keep_the_budget(rows: int, hidden: int, vocabulary: int, budget: int, weight_gradient: bool) -> None:
    plan = plan_fused(rows, hidden, vocabulary, **BFLOAT16, budget=budget, weight_gradient=weight_gradient)
    block = block_columns(vocabulary)
    assert 1 <= plan.chunk_rows <= rows
    assert plan.kept == vocabulary or plan.kept % block == 0
    assert 0 <= plan.shared <= plan.kept <= vocabulary
    if not weight_gradient:
        assert plan.kept == vocabulary
        assert plan.chunk_rows * vocabulary * 2 <= budget or plan.chunk_rows == 1
        return
    assert plan.shared * 4 <= vocabulary * 2 or plan.chunk_rows == rows
    assert held_bytes(plan, rows, hidden, vocabulary) <= budget or plan.chunk_rows == 1


@given(rows=st.integers(1, 5000), vocabulary=st.integers(1, 20_000), budget=st.integers(1, 1 << 26))
def test_float32_needs_no_separate_sums(rows: int, vocabulary: int, budget: int) -> None:
    plan = plan_fused(rows, 64, vocabulary, **FLOAT32, budget=budget, weight_gradient=True)
    assert plan.kept == plan.shared == vocabulary
    assert plan.chunk_rows * vocabulary * 4 <= budget or plan.chunk_rows == 1


@given(
    rows=st.integers(0, 100_000),
    vocabulary=st.integers(1, 300_000),
    budget=st.integers(1, 1 << 33),
    device_type=st.sampled_from(["cpu", "cuda", "other"]),
)
@example(rows=0, vocabulary=65, budget=3072, device_type="cpu")
def test_tiles(rows: int, vocabulary: int, budget: int, device_type: str) -> None:
    tile = choose_tile(rows, vocabulary, itemsize=4, device_type=device_type, budget=budget)
    block = block_columns(vocabulary)
    assert tile.rows >= 1
    assert tile.columns % block == 0
    assert tile.columns < vocabulary + block
    assert tile.rows <= max(1, rows)
    assert tile.rows * tile.columns * 4 <= max(budget // 8, 4 * block)


@given(rows=st.integers(0, 100_000), vocabulary=st.integers(1, 300_000), budget=st.integers(0, 1 << 33))
def test_widths(rows: int, vocabulary: int, budget: int) -> None:
    width = choose_width(rows, vocabulary, itemsize=2, budget=budget)
    assert 1 <= width <= vocabulary
    assert width * rows * 2 <= budget or width <= block_columns(vocabulary)


@given(whole=st.integers(1, 10_000), largest=st.integers(1, 10_000))
def test_even_parts(whole: int, largest: int) -> None:
    part = even_part(whole, largest, multiple=64)
    assert part <= largest
    assert -(-whole // part) <= -(-whole // largest)
