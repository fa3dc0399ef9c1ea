"""The Triton kernels of the norms against plain torch, on CUDA or in Triton's interpreter.

Triton decides at import whether to use its interpreter: see `tests/head/test_triton_elementwise.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from padfree.layers.ops.qk_norm_rope import qk_norm_rope, qk_norm_rope_backward
from padfree.layers.ops.rms_norm import rms_norm, rms_norm_backward
from tests.interpreter import DEVICE, INTERPRETED, needs_kernels

EPS = 1e-6
# D in one chunk, several, several and a part of one; with the chosen configuration and with others
SHAPES = [(5, 64), (0, 64), (1, 200), (5, 300), (3, 1)]
# T, H, d: heads that are not a multiple of a program's rows, halves of d that are and are not a power of two
ROTATED_SHAPES = [(5, 2, 64), (0, 2, 64), (7, 3, 96), (1, 1, 128), (53, 1, 8), (3, 5, 2)]
CONFIGURATIONS: list[dict[str, int] | None] = [None, {"rows": 2, "warps": 2, "stages": 2, "resident": 1}, {"rows": 4}]


def test_numbers_per_thread() -> None:
    pytest.importorskip("triton")
    from padfree.layers.ops.triton_rms_norm import choose

    for width in (64, 1024, 2560, 2880, 4096, 5120, 8192):
        for by in choose(width):
            assert by.rows * by.chunk == 8 * 32 * by.warps
            assert width <= 40 * 32 * by.warps, "more would not fit into registers"


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def configuration(values: dict[str, int] | None) -> Any:
    from padfree.layers.ops.triton_rms_norm import LaunchConfiguration

    return None if values is None else LaunchConfiguration(**values)


@needs_kernels
@pytest.mark.parametrize("values", CONFIGURATIONS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_plain_torch(shape: tuple[int, int], values: dict[str, int] | None) -> None:
    from padfree.layers.ops import triton_rms_norm as kernels

    by = configuration(values)
    a, b = (random(1, *shape, seed=seed) for seed in (0, 1))
    weight = random(shape[1], seed=2)
    y, total, rstd = kernels.forward(a, b, weight, EPS, by)
    torch.testing.assert_close(total, a + b)
    torch.testing.assert_close((y, rstd), rms_norm(a + b, weight, EPS))
    y, _, rstd = kernels.forward(a, None, weight, EPS, by)
    torch.testing.assert_close((y, rstd), rms_norm(a, weight, EPS))
    for num_dys, residual in ((1, None), (3, b)):
        dys = [random(*shape, seed=3 + index) for index in range(num_dys)]
        found = kernels.backward(dys, a, weight, rstd, residual, configuration=by)
        expected = rms_norm_backward(dys, a, weight, rstd, residual)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(3, 64), (2, 300)], ids=str)
@pytest.mark.parametrize("values", CONFIGURATIONS[:2], ids=str)
def test_half_precision(shape: tuple[int, int], dtype: torch.dtype, values: dict[str, int] | None) -> None:
    from padfree.layers.ops import triton_rms_norm as kernels

    by = configuration(values)
    a, b, *dys = (random(1, *shape, seed=seed, dtype=dtype) for seed in range(4))
    weight = random(shape[1], seed=4, dtype=dtype)
    # Roundings may differ, also of the sum; and the interpreter rounds bfloat16 differently.
    tolerance = {"rtol": 2e-2, "atol": 2e-2 if INTERPRETED else 1e-3}
    y, total, rstd = kernels.forward(a, b, weight, EPS, by)
    torch.testing.assert_close(total, a + b, **tolerance)
    expected, _ = rms_norm(total, weight, EPS)
    torch.testing.assert_close(y, expected, **tolerance)
    found = kernels.backward(dys, total, weight, rstd, b, configuration=by)
    torch.testing.assert_close(found, rms_norm_backward(dys, total, weight, rstd, b), **tolerance)


@needs_kernels
def test_any_number_of_gradients_and_none_of_the_weight() -> None:
    from padfree.layers.ops import triton_rms_norm as kernels

    x, weight = random(1, 3, 64, seed=0), random(64, seed=1)
    dys = [random(3, 64, seed=2 + index) for index in range(5)]
    _, _, rstd = kernels.forward(x, None, weight, EPS)
    dx, nothing = kernels.backward(dys, x, weight, rstd, None, weight_gradient=False)
    torch.testing.assert_close(dx, rms_norm_backward(dys, x, weight, rstd, None)[0], rtol=1e-4, atol=1e-4)
    assert len(nothing) == 0


@needs_kernels
def test_twice_the_same() -> None:
    from padfree.layers.ops import triton_rms_norm as kernels

    num_rows, width = (10, 64) if INTERPRETED else (5000, 2560)
    x, dy = random(num_rows, width, seed=0), random(num_rows, width, seed=1)
    weight = random(width, seed=2)
    _, _, rstd = kernels.forward(x, None, weight, EPS)
    first, second = (kernels.backward([dy, dy], x, weight, rstd, None) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


# With a rotation


def rotated_inputs(shape: tuple[int, int, int], dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """dy, x, weight, cos and sin; the two of a pair of columns are rotated by different angles."""
    num_tokens, _, width = shape
    dy, x = (random(1, *shape, seed=seed, dtype=dtype) for seed in (0, 1))
    angle = 3 * random(1, num_tokens, width, seed=2)
    return dy, x, random(width, seed=3, dtype=dtype), angle.cos().to(dtype), angle.sin().to(dtype)


def by_if_given(values: dict[str, int] | None) -> dict[str, Any]:
    return {} if values is None else {"configuration": configuration(values)}


@needs_kernels
@pytest.mark.parametrize("values", CONFIGURATIONS, ids=str)
@pytest.mark.parametrize("shape", ROTATED_SHAPES, ids=str)
def test_rotated_against_plain_torch(shape: tuple[int, int, int], values: dict[str, int] | None) -> None:
    from padfree.layers.ops import triton_qk_norm_rope as kernels

    by = by_if_given(values)
    dy, x, weight, cos, sin = rotated_inputs(shape)
    y, rstd = kernels.forward(x, weight, cos, sin, EPS, **by)
    torch.testing.assert_close((y, rstd), qk_norm_rope(x, weight, cos, sin, EPS), rtol=1e-4, atol=1e-4)
    expected = qk_norm_rope_backward(dy, x, weight, rstd, cos, sin)
    found = kernels.backward(dy, x, weight, rstd, cos, sin, **by)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    dx, nothing = kernels.backward(dy, x, weight, rstd, cos, sin, weight_gradient=False, **by)
    torch.testing.assert_close(dx, expected[0], rtol=1e-4, atol=1e-4)
    assert len(nothing) == 0


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(9, 2, 64), (3, 1, 96)], ids=str)
@pytest.mark.parametrize("values", CONFIGURATIONS[:2], ids=str)
def test_rotated_in_half_precision(
    shape: tuple[int, int, int], dtype: torch.dtype, values: dict[str, int] | None
) -> None:
    from padfree.layers.ops import triton_qk_norm_rope as kernels

    by = by_if_given(values)
    dy, x, weight, cos, sin = rotated_inputs(shape, dtype)
    tolerance = {"rtol": 2e-2, "atol": 2e-2 if INTERPRETED else 1e-3}
    y, rstd = kernels.forward(x, weight, cos, sin, EPS, **by)
    torch.testing.assert_close((y, rstd), qk_norm_rope(x, weight, cos, sin, EPS), **tolerance)
    found = kernels.backward(dy, x, weight, rstd, cos, sin, **by)
    torch.testing.assert_close(found, qk_norm_rope_backward(dy, x, weight, rstd, cos, sin), **tolerance)


@needs_kernels
def test_rotated_heads_that_are_not_contiguous() -> None:
    """As attention returns their gradients: [1, H, T, d], transposed."""
    from padfree.layers.ops import triton_qk_norm_rope as kernels

    dy, x, weight, cos, sin = rotated_inputs((5, 3, 16))
    strided_dy, strided_x = (tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (dy, x))
    assert not strided_dy.is_contiguous()
    y, rstd = kernels.forward(strided_x, weight, cos, sin, EPS)
    torch.testing.assert_close(y, qk_norm_rope(x, weight, cos, sin, EPS)[0], rtol=1e-4, atol=1e-4)
    found = kernels.backward(strided_dy, strided_x, weight, rstd, cos, sin)
    expected = qk_norm_rope_backward(dy, x, weight, rstd, cos, sin)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@needs_kernels
def test_rotated_twice_the_same() -> None:
    from padfree.layers.ops import triton_qk_norm_rope as kernels

    dy, x, weight, cos, sin = rotated_inputs((30, 2, 16) if INTERPRETED else (3000, 8, 128))
    _, rstd = kernels.forward(x, weight, cos, sin, EPS)
    first, second = (kernels.backward(dy, x, weight, rstd, cos, sin) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
