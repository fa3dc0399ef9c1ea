"""Linear layers that can compute their three matmuls in float8 (e4m3): output, input gradient and weight gradient.

A scale must be constant along the dimension that a matmul sums over. So a tensor that takes part in two matmuls is cast
twice: with one scale per row (`float8_rows`), and with one scale per column (`float8_columns`).

Scales are powers of two, so casts give the same bits on all devices. Gradients also use e4m3, which is more precise
than e5m2. They do not need the range of e5m2, because each row has its own scale.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from padfree.layers.ops.float8_format import DTYPE, rounded_up
from padfree.layers.ops.precision import has_kernels

LINEAR, ROWS, COLUMNS = "padfree::float8_linear", "padfree::float8_rows", "padfree::float8_columns"
MATMUL = "padfree::float8_matmul"

WITHOUT_SIGN, MANTISSA, EXPONENT_BITS = 0x7FFFFFFF, 0x7FFFFF, 23
LARGEST_MANTISSA = 0x600000
"""The float32 mantissa bits of 448 = 1.75 · 2⁸, the largest float8 value."""
LARGEST_EXPONENT = 127 + 127 + 8
"""The largest float8 value, 448, has the exponent 8. A float32 x gets the same exponent by multiplication with
2^(8 - exponent of x). The biased exponent of this factor is `LARGEST_EXPONENT` minus the biased exponent of x.
"""
NOT_FINITE = 255
"""The biased exponent of infinity and NaN in a float32."""

torch.library.define(ROWS, "(Tensor x, bool columns) -> (Tensor, Tensor, Tensor)")
torch.library.define(COLUMNS, "(Tensor x, Tensor largest, Tensor? after=None) -> (Tensor, Tensor)")
torch.library.define(
    MATMUL, "(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, Tensor? bias, ScalarType dtype) -> Tensor"
)
# x [.., K], weight [N, K], bias [N] -> y [.., N]. The bools select the matmuls that are computed in float8.
torch.library.define(
    LINEAR,
    "(Tensor x, Tensor weight, Tensor? bias, bool output, bool input_gradient, bool weight_gradient) -> Tensor",
)


# The references in plain torch


def float8_rows(x: Tensor, *, columns: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return x [R, K] in float8, q [R, K], with one scale per row, [R, 1]: x ≈ q · scale.

    With `columns`, the third result is the largest |x| of each column, [K], as float32 bits. Otherwise it is empty.
    """
    bits = magnitude_bits(x)
    multiplier, scale = factors(_largest(bits, 1)[:, None])
    largest = _largest(bits, 0) if columns else bits.new_empty(0)
    return (x.float() * multiplier).to(DTYPE), scale, largest


def float8_columns(x: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    """Return xᵀ of x [R, K] in float8, q [K, R'], with one scale per row of xᵀ, [K, 1].

    R' is R rounded up to a multiple of 16, with zeros. `largest` is the third result of `float8_rows`, or empty.
    """
    if not largest.numel():
        largest = _largest(magnitude_bits(x), 0)
    multiplier, scale = factors(largest[:, None])
    q = (x.float().T * multiplier).to(DTYPE)
    padded = q.new_zeros(q.shape[0], rounded_up(x.shape[0]))  # `torch._scaled_mm` requires multiples of 16
    padded[:, : x.shape[0]] = q
    return padded, scale


def float8_matmul(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    result = (a.float() @ b.float().T) * a_scale * b_scale.T
    return (result if bias is None else result + bias.float()).to(dtype)


def magnitude_bits(x: Tensor) -> Tensor:
    """Return the bits of |x| in float32, as integers. The integers have the same order as the values; those of infinity
    and NaN are the largest.
    """
    return x.float().view(torch.int32) & WITHOUT_SIGN


def factors(largest: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factor by which values are multiplied before the cast to float8, and the scale, which is 1 / factor.

    `largest` is the largest absolute value among the values that share a scale, as the bits of a float32 in an int32.
    """
    exponent = largest >> EXPONENT_BITS
    above = ((largest & MANTISSA) > LARGEST_MANTISSA).int()
    power = (LARGEST_EXPONENT - exponent - above).clamp(max=2 * 127 - 1)
    multiplier = (power << EXPONENT_BITS).view(torch.float32)
    scale = ((2 * 127 - power) << EXPONENT_BITS).view(torch.float32)
    # An infinite or NaN value makes the scale NaN, and so every result that uses the scale.
    return multiplier, torch.where(exponent == NOT_FINITE, torch.nan, scale)


def _largest(bits: Tensor, dim: int) -> Tensor:
    if not bits.shape[dim]:
        return bits.new_zeros(bits.shape[1 - dim])
    return bits.amax(dim)


# The operators


@torch.library.impl(ROWS, ("cpu", "cuda"))
def _rows(x: Tensor, columns: bool) -> tuple[Tensor, Tensor, Tensor]:
    if not has_kernels(x):
        return float8_rows(x, columns=columns)
    from padfree.layers.ops import triton_float8

    return triton_float8.rows(x, columns=columns)


@torch.library.impl(COLUMNS, ("cpu", "cuda"))
def _columns(x: Tensor, largest: Tensor, after: Tensor | None = None) -> tuple[Tensor, Tensor]:
    if not has_kernels(x):
        return float8_columns(x, largest)
    from padfree.layers.ops import triton_float8

    return triton_float8.columns(x, largest)


@torch.library.impl(MATMUL, ("cpu", "cuda"))
def _matmul(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    if not a.is_cuda:
        return float8_matmul(a, b, a_scale, b_scale, bias, dtype)
    if not a.shape[0]:
        return a.new_empty((0, b.shape[0]), dtype=dtype)
    return torch._scaled_mm(a, b.T, scale_a=a_scale, scale_b=b_scale.T, bias=bias, out_dtype=dtype, use_fast_accum=True)


@torch.library.register_fake(ROWS)  # type: ignore[untyped-decorator]
def _row_shapes(x: Tensor, columns: bool) -> tuple[Tensor, Tensor, Tensor]:
    return (
        x.new_empty(x.shape, dtype=DTYPE),
        x.new_empty((x.shape[0], 1), dtype=torch.float32),
        x.new_empty(x.shape[1] if columns else 0, dtype=torch.int32),
    )


@torch.library.register_fake(COLUMNS)  # type: ignore[untyped-decorator]
def _column_shapes(x: Tensor, largest: Tensor, after: Tensor | None = None) -> tuple[Tensor, Tensor]:
    rows, width = x.shape
    return x.new_empty((width, rounded_up(rows)), dtype=DTYPE), x.new_empty((width, 1), dtype=torch.float32)


@torch.library.register_fake(MATMUL)  # type: ignore[untyped-decorator]
def _matmul_shape(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=dtype)


# The linear layer. Autograd sees `_linear` as one node; after autograd, a graph has the operators above.


class _Float8Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        output: bool,
        input_gradient: bool,
        weight_gradient: bool,
    ) -> Tensor:
        needs_x, needs_weight, _, _, _, _ = ctx.needs_input_grad
        by_column = (needs_weight and weight_gradient, needs_x and input_gradient)
        y, *largest = _output(x, weight, bias, output, by_column)
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None, *largest)
        ctx.products = input_gradient, weight_gradient
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, x_largest, weight_largest = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _, _, _ = ctx.needs_input_grad
        input_gradient, weight_gradient = ctx.products
        ops = torch.ops.padfree
        dx = dweight = None
        dy_largest = weight_largest[:0]
        if needs_x and input_gradient:
            q, scale, dy_largest = ops.float8_rows(dy, needs_weight and weight_gradient)
            # `dy` is not read. It only keeps the compiler from casting the weight already in the forward pass.
            weight_q, weight_scale = ops.float8_columns(weight, weight_largest, dy)
            dx = ops.float8_matmul(q, weight_q, scale, weight_scale, None, dy.dtype)
        elif needs_x:
            dx = dy @ weight
        if needs_weight and weight_gradient:
            q, scale = ops.float8_columns(dy, dy_largest)
            x_q, x_scale = ops.float8_columns(x, x_largest)
            dweight = ops.float8_matmul(q, x_q, scale, x_scale, None, dy.dtype)
        elif needs_weight:
            dweight = dy.T @ x
        return dx, dweight, dy.sum(0) if needs_bias else None, None, None, None


def _output(
    x: Tensor, weight: Tensor, bias: Tensor | None, output: bool, by_column: tuple[bool, bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y = x · weightᵀ + bias, and the largest absolute value in each column of x and of the weight.

    `output`: compute y in float8. `by_column`: also compute the largest values of x and of the weight. Without
    `output`, they are always empty.
    """
    if not output:
        empty = x.new_empty(0, dtype=torch.int32)
        return torch.nn.functional.linear(x, weight, bias), empty, empty.clone()
    ops = torch.ops.padfree
    q, scale, x_largest = ops.float8_rows(x, by_column[0])
    weight_q, weight_scale, weight_largest = ops.float8_rows(weight, by_column[1])
    return ops.float8_matmul(q, weight_q, scale, weight_scale, bias, x.dtype), x_largest, weight_largest


@torch.library.impl(LINEAR, "Autograd")
def _linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, output: bool, input_gradient: bool, weight_gradient: bool
) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    y: Tensor = _Float8Linear.apply(rows, weight, bias, output, input_gradient, weight_gradient)  # type: ignore[no-untyped-call]
    return y.view(*x.shape[:-1], y.shape[-1])


@torch.library.impl(LINEAR, "CompositeExplicitAutograd")
def _linear_without_autograd(
    x: Tensor, weight: Tensor, bias: Tensor | None, output: bool, input_gradient: bool, weight_gradient: bool
) -> Tensor:
    y, _, _ = _output(x.reshape(-1, x.shape[-1]), weight, bias, output, (False, False))
    return y.view(*x.shape[:-1], y.shape[-1])
