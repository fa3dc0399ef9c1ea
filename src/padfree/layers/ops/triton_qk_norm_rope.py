# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="assignment, var-annotated", no-warn-unreachable
"""QK-norm and RoPE as Triton kernels.

A program handles blocks of ROWS head vectors of size d. It loads a block as two halves [ROWS, d/2], because RoPE
rotates element i together with element i + d/2.

The gradient of the weight is summed as in `triton_rms_norm`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from padfree.layers.ops.triton_rms_norm import LaunchConfiguration, programs, sum_of_partials

FORWARD = LaunchConfiguration(rows=32, warps=4, resident=4)
BACKWARD = LaunchConfiguration(rows=16, warps=4, stages=3, resident=4)


def forward(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float, configuration: LaunchConfiguration = FORWARD
) -> tuple[Tensor, Tensor]:
    """Normalise and rotate x. Returns y [.., T, H, d] and 1 / rms [.., T, H] of each head vector."""
    x = x.contiguous()
    num_rows = x.numel() // x.shape[-1]
    y = torch.empty_like(x)
    rstd = x.new_empty(x.shape[:-1], dtype=torch.float32)
    _forward_kernel[(programs(num_rows, x.device, configuration),)](
        x,
        weight.contiguous(),
        cos.contiguous(),
        sin.contiguous(),
        y,
        rstd,
        num_rows,
        eps,
        **_launch(x, configuration),
    )
    return y, rstd


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    weight_gradient: bool = True,
    configuration: LaunchConfiguration = BACKWARD,
) -> tuple[Tensor, Tensor]:
    """Return the gradients dx [.., T, H, d] and dweight [d]. dweight is empty if `weight_gradient` is False."""
    x = x.contiguous()
    num_rows = x.numel() // x.shape[-1]
    dx = torch.empty_like(x)
    count = programs(num_rows, x.device, configuration)
    partial = x.new_empty(count if weight_gradient else 0, x.shape[-1], dtype=torch.float32)
    _backward_kernel[(count,)](
        dy.contiguous(),
        x,
        weight.contiguous(),
        rstd,
        cos.contiguous(),
        sin.contiguous(),
        dx,
        partial,
        num_rows,
        HAS_WEIGHT=weight_gradient,
        **_launch(x, configuration),
    )
    return dx, sum_of_partials(partial, weight) if weight_gradient else weight.new_empty(0)


def _launch(x: Tensor, configuration: LaunchConfiguration) -> dict[str, int]:
    half = x.shape[-1] // 2
    return {
        "HEADS": x.shape[-2],
        "HALF": half,
        "COLUMNS": triton.next_power_of_2(half),
        "ROWS": configuration.rows,
        "STAGES": configuration.stages,
        "num_warps": configuration.warps,
    }


@triton.jit
def _places(first, num_rows, HALF: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    """Return what is needed to load one half of each of ROWS head vectors, beginning with vector `first`.

    Returns the indices of the vectors, the indices of the elements in a half, and a mask [ROWS, COLUMNS] of the
    elements that exist.
    """
    row = first + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (row < num_rows)[:, None] & (column < HALF)
    return row.to(tl.int64), column, inside


@triton.jit
def _halves(pointer, offset, inside, HALF: tl.constexpr):
    low = tl.load(pointer + offset, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(pointer + offset + HALF, mask=inside, other=0.0).to(tl.float32)
    return low, high


@triton.jit
def _write(pointer, offset, inside, low, high, HALF: tl.constexpr):
    tl.store(pointer + offset, low.to(pointer.dtype.element_ty), mask=inside)
    tl.store(pointer + offset + HALF, high.to(pointer.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _forward_kernel(
    x, weight, cos, sin, y, rstds, num_rows, eps,
    HEADS: tl.constexpr, HALF: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, COLUMNS)[None, :]
    weight_low, weight_high = _halves(weight, column, column < HALF, HALF)
    step = tl.num_programs(0) * ROWS
    for first in tl.range(tl.program_id(0) * ROWS, num_rows, step, num_stages=STAGES):
        row, column, inside = _places(first, num_rows, HALF, COLUMNS, ROWS)
        place = row[:, None] * (2 * HALF) + column
        angle = (row // HEADS)[:, None] * (2 * HALF) + column
        low, high = _halves(x, place, inside, HALF)
        cos_low, cos_high = _halves(cos, angle, inside, HALF)
        sin_low, sin_high = _halves(sin, angle, inside, HALF)
        rstd = tl.rsqrt(tl.sum(low * low + high * high, axis=1) / (2 * HALF) + eps)
        tl.store(rstds + row, rstd, mask=row < num_rows)
        low = low * rstd[:, None] * weight_low
        high = high * rstd[:, None] * weight_high
        _write(y, place, inside, low * cos_low - high * sin_low, high * cos_high + low * sin_high, HALF)


@triton.jit(do_not_specialize=["num_rows"])
def _backward_kernel(
    dy, x, weight, rstds, cos, sin, dx, partial, num_rows, HAS_WEIGHT: tl.constexpr,
    HEADS: tl.constexpr, HALF: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, COLUMNS)[None, :]
    weight_low, weight_high = _halves(weight, column, column < HALF, HALF)
    sum_low = tl.zeros((ROWS, COLUMNS), tl.float32)
    sum_high = tl.zeros((ROWS, COLUMNS), tl.float32)
    step = tl.num_programs(0) * ROWS
    for first in tl.range(tl.program_id(0) * ROWS, num_rows, step, num_stages=STAGES):
        row, column, inside = _places(first, num_rows, HALF, COLUMNS, ROWS)
        place = row[:, None] * (2 * HALF) + column
        angle = (row // HEADS)[:, None] * (2 * HALF) + column
        dy_low, dy_high = _halves(dy, place, inside, HALF)
        low, high = _halves(x, place, inside, HALF)
        cos_low, cos_high = _halves(cos, angle, inside, HALF)
        sin_low, sin_high = _halves(sin, angle, inside, HALF)
        rstd = tl.load(rstds + row, mask=row < num_rows, other=0.0)[:, None]
        low = low * rstd
        high = high * rstd
        pull_low = dy_low * cos_low + dy_high * sin_high
        pull_high = dy_high * cos_high - dy_low * sin_low
        if HAS_WEIGHT:
            sum_low += pull_low * low
            sum_high += pull_high * high
        pull_low = pull_low * weight_low
        pull_high = pull_high * weight_high
        mean = (tl.sum(pull_low * low + pull_high * high, axis=1) / (2 * HALF))[:, None]
        _write(dx, place, inside, (pull_low - low * mean) * rstd, (pull_high - high * mean) * rstd, HALF)
    if HAS_WEIGHT:
        own = partial + tl.program_id(0) * (2 * HALF) + tl.arange(0, COLUMNS)
        exists = tl.arange(0, COLUMNS) < HALF
        tl.store(own, tl.sum(sum_low, axis=0), mask=exists)
        tl.store(own + HALF, tl.sum(sum_high, axis=0), mask=exists)
