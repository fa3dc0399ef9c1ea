"""The trial of matmuls finds kernels that split their sums, whatever the shape, and chooses numbers of rows without."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from padfree.rollout.engines.in_process.row_trial import (
    FEW_ROWS,
    PACK_ROWS,
    ExpertShape,
    MatmulShape,
    RouterShape,
    RowChoice,
    agreeing_rows,
    agreeing_rows_of_router,
    agreeing_tokens,
    candidates,
    choose_rows,
    divisions,
    expert_shapes,
    matmul_shapes,
)
from padfree.testing.models import build

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
    # With up to 2048 slots, a step can always have as many rows as a pack.
    packs = frozenset(PACK_ROWS)
    assert choose_rows(40, {WIDE: packs, NARROW: EVERY}).step_rows == (1024,)
    assert choose_rows(1500, {WIDE: packs, NARROW: EVERY}).step_rows == (2048, 1024)
    many = frozenset((*PACK_ROWS, *candidates(2500)))
    assert "1024 inputs and 3072 outputs" in (choose_rows(2500, {NARROW: many, WIDE: packs}).problem or "")


def test_each_shape_is_tried_once() -> None:
    layer = nn.ModuleList([nn.Linear(8, 16, bias=False), nn.ModuleDict({"deep": nn.Linear(16, 8)}), nn.Linear(8, 16)])
    shapes = [MatmulShape(8, 16, False), MatmulShape(16, 8, True), MatmulShape(8, 16, True)]
    assert matmul_shapes([layer, layer]) == shapes


# Experts


def grouped(wrong: Callable[[int, int], bool]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """A grouped matmul in order, which splits the sums of an expert if its rows and all rows are `wrong`."""

    def matmul(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        counts = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
        parts = zip(x.split(counts), weight.mT, strict=True)
        return torch.cat([split(3, lambda rows: wrong(rows, len(x)))(rows, matrix, None) for rows, matrix in parts])

    return matmul


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        (lambda rows, total: False, {16, 64, 256}),
        *[(lambda rows, total, count=count: rows == count, set()) for count in (1, 2, 16)],
        (lambda rows, total: rows == 100, {16}),  # 32 rows cannot give 100 to an expert
        (lambda rows, total: rows > 400, {16, 64}),
        (lambda rows, total: rows < 64, set()),
        (lambda rows, total: total == 128, {16, 256}),
    ],
)
def test_experts_whose_bits_depend_on_the_division_of_rows_are_found(
    wrong: Callable[[int, int], bool], expected: set[int], is_transposed: bool
) -> None:
    found = agreeing_tokens(
        ExpertShape(6, 2, 24, 5, is_transposed),
        (16, 64, 256),
        device=CPU,
        dtype=torch.float32,
        matmul=grouped(wrong),
        reference_rows=6 * 90,
    )
    assert found == expected


@pytest.mark.parametrize(("rows", "experts"), [(16, 8), (2048, 128), (2048, 4), (9000, 128), (300, 1)])
def test_divisions_have_experts_with_few_rows(rows: int, experts: int) -> None:
    counts = list(divisions(rows, experts))
    assert all(len(each) == experts and int(each.sum()) == rows and int(each.min()) >= 0 for each in counts)
    if rows >= 2048 and experts > 1:
        assert {*FEW_ROWS} <= {int(count) for each in counts for count in each}
    assert any(int(each.max()) == rows for each in counts)


def test_the_reason_names_the_experts() -> None:
    shape = ExpertShape(128, 8, 2048, 1536, False)
    choice = choose_rows(40, {WIDE: EVERY, shape: EVERY - {4096}})
    assert "128 experts with 2048 inputs and 1536 outputs" in (choice.problem or "")
    assert choose_rows(40, {WIDE: EVERY, shape: EVERY - {40}}).step_rows == (64, 32, 16)
    router = RouterShape("TopKRouter", 2048, 128)
    assert "the router TopKRouter of 2048 inputs and 128" in (choose_rows(40, {router: frozenset()}).problem or "")


def test_the_shapes_of_experts_are_found() -> None:
    up, down = ExpertShape(4, 2, 64, 64, False), ExpertShape(4, 2, 32, 64, False)
    assert expert_shapes(build("qwen3_moe").model.layers) == [up, down]
    assert expert_shapes(build("gpt_oss").model.layers)[0] == ExpertShape(4, 2, 64, 128, True)
    assert expert_shapes(build("qwen3").model.layers) == []


def test_routers_that_depend_on_other_rows_or_on_chance_are_found() -> None:
    class Router(nn.Module):
        def __init__(self, wrong: Callable[[int], bool], noise: float) -> None:
            super().__init__()
            self.weight, self.wrong, self.noise = nn.Parameter(torch.empty(4, 48)), wrong, noise

        def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            logits = split(3, self.wrong)(hidden, self.weight, None)
            if self.training:
                logits = logits + self.noise * torch.rand_like(logits)
            return logits, *logits.softmax(-1).topk(2)

    def found(wrong: Callable[[int], bool], noise: float = 0.0) -> frozenset[int]:
        rows = (16, 64, 200)
        router = Router(wrong, noise)
        router.register_forward_hook(lambda *_: pytest.fail("the trial must not call hooks"))
        return agreeing_rows_of_router(router, rows, device=CPU, dtype=torch.float32, reference_rows=REFERENCE)

    assert found(lambda rows: False) == {16, 64, 200}
    assert found(lambda rows: rows < 64) == {64, 200}
    assert found(lambda rows: False, noise=1.0) == frozenset()
