# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""AdamW with moments in bfloat16 or int8 as one Triton kernel: see `padfree.optim.state_format`.

A program updates a tile [ROWS, BLOCK] of a parameter [R, C]. In int8, each row of the tile is one block of the state.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from padfree.optim.reference_adamw import ParameterRows, Step
from padfree.optim.state_format import BLOCK, LARGEST_SCALE, MULTIPLIERS, SMALLEST_SCALE, STRIDE

TILE = 2048
WARPS = 4

_STRIDE = tl.constexpr(STRIDE)
_MULTIPLIER_0 = tl.constexpr(MULTIPLIERS[0])
_MULTIPLIER_1 = tl.constexpr(MULTIPLIERS[1])
_SMALLEST = tl.constexpr(SMALLEST_SCALE)
_LARGEST = tl.constexpr(LARGEST_SCALE)


def update(rows: ParameterRows, step: Step) -> None:
    count, columns = rows.weight.shape
    width = min(BLOCK, triton.next_power_of_2(columns))
    height = TILE // width
    is_int8 = rows.exp_avg.scales is not None
    scales = (rows.exp_avg.scales, rows.exp_avg_sq.scales) if is_int8 else (rows.factors, rows.factors)
    _update[(triton.cdiv(count, height), triton.cdiv(columns, width))](
        rows.weight,
        rows.gradient,
        rows.exp_avg.values,
        rows.exp_avg_sq.values,
        *scales,
        step.finite.view(torch.uint8),
        rows.factors if step.scale is None else step.scale,
        rows.factors,
        rows.step,
        rows.number,
        count,
        columns,
        *rows.range,
        1 - step.lr * step.weight_decay,
        1 - step.beta1,
        step.beta2,
        1 - step.beta2,
        step.eps,
        HAS_SCALE=step.scale is not None,
        INT8=is_int8,
        ROWS=height,
        BLOCK=width,
        num_warps=WARPS,
    )


@triton.jit
def _mix(x):
    x ^= x >> 16
    x *= _MULTIPLIER_0
    x ^= x >> 15
    x *= _MULTIPLIER_1
    return x ^ (x >> 16)


@triton.jit
def _random_bits(step, number, row, column, columns):
    key = _mix(_mix(step.to(tl.uint32) * _STRIDE) + number.to(tl.uint32) * _STRIDE)
    index = row[:, None] * columns + column[None, :]
    return _mix(index.to(tl.uint32) + (index >> 32).to(tl.uint32) * _STRIDE + key)


@triton.jit
def _round_bfloat16(values, bits):
    whole = values.to(tl.int32, bitcast=True)
    rounded = ((whole + bits.to(tl.int32)) & -65536).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(values) < float("inf"), rounded, values).to(tl.bfloat16)


@triton.jit
def _levels(codes, MOST: tl.constexpr, SQUARINGS: tl.constexpr):
    found = codes.to(tl.float32) * (1 / MOST)
    for _ in tl.static_range(SQUARINGS):
        found = found * found
    return found


@triton.jit
def _encode(magnitude, bits, MOST: tl.constexpr, SQUARINGS: tl.constexpr):
    scale = tl.minimum(tl.max(magnitude, axis=1), _LARGEST)
    scale = tl.where(scale < _SMALLEST, 0.0, scale)
    reciprocal = tl.where(scale > 0, 1 / tl.where(scale > 0, scale, 1.0), 0.0)
    share = tl.minimum(magnitude * reciprocal[:, None], 1.0)
    root = share
    for _ in tl.static_range(SQUARINGS):
        root = tl.sqrt(root)
    code = tl.minimum((root * MOST).to(tl.int32), MOST - 1)
    low = _levels(code, MOST, SQUARINGS)
    high = _levels(code + 1, MOST, SQUARINGS)
    up = bits.to(tl.int32).to(tl.float32) * (1.0 / 65536.0) * (high - low) < share - low
    return code + up.to(tl.int32), share, scale


@triton.jit(
    do_not_specialize=["number", "count", "first", "inner", "outer"],
    do_not_specialize_on_alignment=["finite", "grad_scale", "factors", "step"],
)
def _update(
    weight,
    gradient,
    exp_avg,
    exp_avg_sq,
    exp_avg_scale,
    exp_avg_sq_scale,
    finite,
    grad_scale,
    factors,
    step,
    number,
    count,
    columns,
    first,
    inner,
    outer,
    kept,
    weight1,
    beta2,
    weight2,
    eps,
    HAS_SCALE: tl.constexpr,
    INT8: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if tl.load(finite) == 0:
        return
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = row[:, None] * columns + column[None, :]
    inside = (row < count)[:, None] & (column < columns)[None, :]
    w = tl.load(weight + place, mask=inside, other=0.0)
    g = tl.load(gradient + place, mask=inside, other=0.0).to(tl.float32)
    if HAS_SCALE:
        g = g * tl.load(grad_scale)
    if INT8:
        scale_place = row * tl.num_programs(1) + tl.program_id(1)
        m_scale = tl.load(exp_avg_scale + scale_place, mask=row < count, other=0.0)
        v_scale = tl.load(exp_avg_sq_scale + scale_place, mask=row < count, other=0.0)
        m_code = tl.load(exp_avg + place, mask=inside, other=0).to(tl.int32)
        v_code = tl.load(exp_avg_sq + place, mask=inside, other=0).to(tl.int32)
        m = _levels(tl.abs(m_code), 127, 2) * m_scale[:, None]
        m = tl.where(m_code < 0, -m, m)
        v = _levels(v_code, 255, 3) * v_scale[:, None]
    else:
        m = tl.load(exp_avg + place, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(exp_avg_sq + place, mask=inside, other=0.0).to(tl.float32)
    m = m + weight1 * (g - m)
    v = beta2 * v + weight2 * (g * g)
    rate = tl.load(factors)
    correction = tl.load(factors + 1)
    w = kept * w - rate * m / (tl.sqrt_rn(v) * correction + eps)
    tl.store(weight + place, w, mask=inside)
    global_row = first + row // inner * outer + row % inner
    bits = _random_bits(tl.load(step), number, global_row, column, columns)
    if INT8:
        code, share, scale = _encode(tl.abs(m), bits & 0xFFFF, 127, 2)
        code = tl.where(m < 0, -code, code)
        tl.store(exp_avg + place, code.to(tl.int8), mask=inside)
        tl.store(exp_avg_scale + scale_place, scale, mask=row < count)
        code, share, scale = _encode(v, bits >> 16, 255, 3)
        code = tl.where(share > 0, tl.maximum(code, 1), code)
        tl.store(exp_avg_sq + place, code.to(tl.uint8), mask=inside)
        tl.store(exp_avg_sq_scale + scale_place, scale, mask=row < count)
    else:
        tl.store(exp_avg + place, _round_bfloat16(m, bits & 0xFFFF), mask=inside)
        tl.store(exp_avg_sq + place, _round_bfloat16(v, bits >> 16), mask=inside)
