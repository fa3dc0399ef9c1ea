"""The Triton kernels of the casts to float8 against plain torch, on CUDA or in Triton's interpreter: the same bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from padfree.layers.ops.float8_linear import float8_columns, float8_rows
from tests.interpreter import DEVICE, needs_kernels

# rows and columns: one tile, several, parts of tiles; none; one row; rows that are not a multiple of 16
SHAPES = [(5, 48), (130, 96), (0, 32), (1, 16), (33, 1040)]


def spread(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Values of very different sizes, with outliers, a row and a column of zeros, ties of the rounding, and -0."""
    generator = torch.Generator().manual_seed(rows + width)
    x = torch.randn(rows, width, generator=generator)
    x *= torch.exp2(torch.randint(-60, 40, (rows, 1), generator=generator).float())
    x[:, 1::7] *= 100
    x[:, 2] = 0
    if rows > 4:
        x[0], x[1, ::2], x[2, 0], x[3] = 0, -0.0, 448.0, torch.arange(width) + 0.5
    return x.to(DEVICE, dtype)


def same_bits(found: Tensor, expected: Tensor) -> bool:
    """Whether all values are the same. 0 may be -0, which Triton's interpreter does not keep apart."""
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    assert found.is_contiguous()
    return torch.equal(found.double(), expected.double())


@needs_kernels
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("columns", [False, True])
def test_rows(shape: tuple[int, int], dtype: torch.dtype, columns: bool) -> None:
    from padfree.layers.ops import triton_float8

    x = spread(*shape, dtype)
    results = zip(triton_float8.rows(x, columns=columns), float8_rows(x, columns=columns), strict=True)
    for name, (found, expected) in zip(("q", "scale", "largest"), results, strict=True):
        assert same_bits(found, expected), name


@needs_kernels
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("known", [False, True])
def test_columns(shape: tuple[int, int], dtype: torch.dtype, known: bool) -> None:
    from padfree.layers.ops import triton_float8

    x = spread(*shape, dtype)
    _, _, largest = float8_rows(x, columns=known)
    results = zip(triton_float8.columns(x, largest), float8_columns(x, largest), strict=True)
    for name, (found, expected) in zip(("q", "scale"), results, strict=True):
        assert same_bits(found, expected), name


@needs_kernels
def test_more_columns_than_fit_in_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    from padfree.layers.ops import triton_float8

    monkeypatch.setattr(triton_float8, "MAX_WIDTH", 32)
    x = spread(7, 48, torch.bfloat16)
    for found, expected in zip(triton_float8.rows(x, columns=True), float8_rows(x, columns=True), strict=True):
        assert same_bits(found, expected)


@needs_kernels
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_has_no_scale(value: float) -> None:
    from padfree.layers.ops import triton_float8

    x = spread(6, 48, torch.bfloat16)
    x[3, 5] = value
    _, scale, largest = triton_float8.rows(x, columns=True)
    assert scale.isnan().flatten().nonzero().flatten().tolist() == [3]
    _, scale = triton_float8.columns(x, largest)
    assert scale.isnan().flatten().nonzero().flatten().tolist() == [5]


@needs_kernels
def test_rows_of_a_view() -> None:
    from padfree.layers.ops import triton_float8

    x = spread(48, 32, torch.bfloat16).T
    for found, expected in zip(triton_float8.rows(x, columns=True), float8_rows(x, columns=True), strict=True):
        assert same_bits(found, expected)
