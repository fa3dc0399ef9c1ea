"""The trial of matmuls finds kernels that split their sums, whatever the shape, and chooses numbers of rows without."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from padfree.rollout.engines.in_process.row_trial import (
    PACK_ROWS,
    MatmulShape,
    RowChoice,
    agreeing_rows,
    candidates,
    choose_rows,
    matmul_shapes,
)

CPU = torch.device("cpu")
REFERENCE = 512


def in_order(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A matmul that sums over K one product after the other, so that bits cannot depend on the number of rows."""
    total = torch.zeros(len(x), len(weight))
    for k in range(x.shape[1]):
        total += x[:, k, None] * weight[None, :, k]
    return total if bias is None else total + bias


def split(parts: int, wrong: Callable[[int], bool]) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """A matmul that splits its sums into `parts` for the numbers of rows that are `wrong`."""

    def matmul(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not wrong(len(x)):
            return in_order(x, weight, bias)
        pieces = zip(x.chunk(parts, 1), weight.chunk(parts, 1), strict=True)
        total = torch.stack([in_order(left, right, None) for left, right in pieces]).sum(0)
        return total if bias is None else total + bias

    return matmul


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        (lambda rows: False, {1, 8, 24, 64, 200}),
        (lambda rows: rows < 64, {64, 200}),
        (lambda rows: rows in (8, 64), {1, 24, 200}),
        (lambda rows: rows % 16, {64}),
        (lambda rows: rows < REFERENCE, set()),
    ],
)
def test_rows_at_which_a_matmul_splits_its_sums_are_found(
    wrong: Callable[[int], bool], expected: set[int], has_bias: bool
) -> None:
    rows = (1, 8, 24, 64, 200)
    found = agreeing_rows(
        MatmulShape(48, 7, has_bias),
        rows,
        device=CPU,
        dtype=torch.float32,
        matmul=split(3, wrong),
        reference_rows=REFERENCE,
    )
    assert found == expected


def test_a_kernel_that_treats_the_last_rows_differently_is_found() -> None:
    """The bits must not depend on where a row is, either."""

    def matmul(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        result = in_order(x, weight, bias)
        if len(x) == 24:
            result[-1:] = split(3, lambda _: True)(x[-1:], weight, bias)
        return result

    found = agreeing_rows(
        MatmulShape(48, 7, False), (24, 32), device=CPU, dtype=torch.float32, matmul=matmul, reference_rows=REFERENCE
    )
    assert found == {32}


WIDE, NARROW = MatmulShape(1024, 3072, False), MatmulShape(3072, 1024, True)
EVERY = frozenset((*PACK_ROWS, *candidates(40)))


def test_steps_use_numbers_of_rows_at_which_all_matmuls_agree() -> None:
    assert choose_rows(40, {WIDE: EVERY, NARROW: EVERY}) == RowChoice((40, 32, 16), None)
    # One matmul splits at 16 and 40 rows, the other at 32: 64 rows are the smallest number for 40 slots.
    assert choose_rows(40, {WIDE: EVERY - {16, 40}, NARROW: EVERY - {32}}) == RowChoice((64,), None)
    assert choose_rows(40, {WIDE: EVERY - {40}, NARROW: EVERY}) == RowChoice((64, 32, 16), None)
    assert choose_rows(2, {WIDE: frozenset((*PACK_ROWS, *candidates(2)))}).step_rows == (16,)


def test_the_reason_names_the_matmul() -> None:
    choice = choose_rows(40, {WIDE: EVERY, NARROW: EVERY - {4096}})
    assert choice.step_rows == ()
    assert choice.problem is not None
    assert "3072 inputs and 1024 outputs" in choice.problem
    assert "4096" in choice.problem
    # With up to 1024 slots, a step can always have 1024 rows, because the shortest pack has as many.
    packs = frozenset(PACK_ROWS)
    assert choose_rows(40, {WIDE: packs, NARROW: EVERY}).step_rows == (1024,)
    many = frozenset((*PACK_ROWS, *candidates(1500)))
    assert "1024 inputs and 3072 outputs" in (choose_rows(1500, {NARROW: many, WIDE: packs}).problem or "")
    # Each matmul agrees at some number, but no number suits both.
    disjoint = {WIDE: packs | {1500}, NARROW: packs | {2048}}
    assert choose_rows(1500, disjoint).problem is not None


def test_each_shape_is_tried_once() -> None:
    layer = nn.ModuleList([nn.Linear(8, 16, bias=False), nn.ModuleDict({"deep": nn.Linear(16, 8)}), nn.Linear(8, 16)])
    shapes = [MatmulShape(8, 16, False), MatmulShape(16, 8, True), MatmulShape(8, 16, True)]
    assert matmul_shapes([layer, layer]) == shapes
