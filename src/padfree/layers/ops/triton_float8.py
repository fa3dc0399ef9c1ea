# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The casts of `float8_linear` as Triton kernels.

The function `rows` casts a matrix to float8 with one scale per row. The function `columns` casts a matrix with one
scale per column, and writes it transposed.

Atomic maxima combine the largest values that the Triton programs find. A maximum does not depend on the order of
comparisons, so results have the same bits in every run.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from padfree.layers.ops.float8_format import DTYPE, MULTIPLE, rounded_up

MAX_WIDTH = 16384
"""Up to this matrix width, the kernel of the function `rows` also finds the largest value in each column. It holds
these values in registers, together with a whole row. For wider matrices, `_largest_kernel` finds the largest values.
"""


class RowsLaunch(NamedTuple):
    """The launch parameters of `_rows_kernel`."""

    warps: int
    resident: int  # programs per multiprocessor
    stages: int = 1  # pipeline depth of the loads


class CastTile(NamedTuple):
    """The tile of `_columns_kernel`."""

    tokens: int
    columns: int
    warps: int


TILE = CastTile(tokens=64, columns=64, warps=4)
LARGEST_TILE = (64, 128)
LARGEST_ROWS = 512
"""The number of matrix rows that one Triton program of `_largest_kernel` reads."""


def choose(width: int, *, columns: bool) -> RowsLaunch:
    """Choose the launch parameters of `_rows_kernel` for matrix rows of `width` elements.

    If `columns` is True, the kernel also finds the largest value of each column. The parameters and `TILE` were the
    fastest of 7 candidates on an H200.
    """
    block = triton.next_power_of_2(width)
    if columns:  # each program makes one atomic maximum per column, so launch fewer programs
        return RowsLaunch(warps=min(8, max(1, block // 256)), resident=2, stages=3)
    warps = min(16, max(1, block // 1024))
    return RowsLaunch(warps=warps, resident=max(1, 48 // warps))


def rows(x: Tensor, *, columns: bool, configuration: RowsLaunch | None = None) -> tuple[Tensor, Tensor, Tensor]:
    x = x.contiguous()
    num_rows, width = x.shape
    q = torch.empty_like(x, dtype=DTYPE)
    scale = x.new_empty((num_rows, 1), dtype=torch.float32)
    joined = columns and width <= MAX_WIDTH
    largest = x.new_zeros(width if joined else 0, dtype=torch.int32)
    if num_rows:
        by = configuration or choose(width, columns=joined)
        _rows_kernel[(min(num_rows, _multiprocessors(x) * by.resident),)](
            x,
            q,
            scale,
            largest,
            num_rows,
            WIDTH=width,
            BLOCK=triton.next_power_of_2(width),
            HAS_COLUMNS=joined,
            ROUND=not x.is_cuda,
            STAGES=by.stages,
            num_warps=by.warps,
        )
    return q, scale, _largest(x) if columns and not joined else largest


def columns(x: Tensor, largest: Tensor, tile: CastTile = TILE) -> tuple[Tensor, Tensor]:
    x = x.contiguous()
    num_rows, width = x.shape
    if not largest.numel():
        largest = _largest(x)
    padded = rounded_up(num_rows)
    q = x.new_empty((width, padded), dtype=DTYPE)
    scale = x.new_empty((width, 1), dtype=torch.float32)
    grid = (triton.cdiv(width, tile.columns), max(1, triton.cdiv(padded, tile.tokens)))
    _columns_kernel[grid](
        x,
        largest,
        q,
        scale,
        num_rows,
        padded // MULTIPLE,
        WIDTH=width,
        TOKENS=tile.tokens,
        COLUMNS=tile.columns,
        MULTIPLE=MULTIPLE,
        ROUND=not x.is_cuda,
        num_warps=tile.warps,
    )
    return q, scale


def _largest(x: Tensor) -> Tensor:
    """Return the largest absolute value of each column.

    Each result is an int32 that holds the bits of the value in float32. For numbers that are not negative, these
    integers have the same order as the numbers.
    """
    num_rows, width = x.shape
    largest = x.new_zeros(width, dtype=torch.int32)
    tokens, block = LARGEST_TILE
    grid = (triton.cdiv(width, block), triton.cdiv(num_rows, LARGEST_ROWS))
    if num_rows:
        _largest_kernel[grid](
            x, largest, num_rows, WIDTH=width, TOKENS=tokens, COLUMNS=block, ROWS=LARGEST_ROWS, num_warps=8
        )
    return largest


def _multiprocessors(x: Tensor) -> int:
    if x.device.type != "cuda":  # the kernels run in Triton's interpreter
        return 1
    return torch.cuda.get_device_properties(x.device).multi_processor_count


@triton.jit
def _bits(value):
    """Return the float32 bit pattern of |value| as an int32."""
    return value.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _cast(value, q, ROUND: tl.constexpr):
    """Round float32 values of at most 448 to the dtype of the pointer q: to nearest, ties to even.

    If `ROUND` is True, the kernel rounds in float32 before the cast, because Triton's interpreter casts differently.
    """
    if ROUND:
        bits = value.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
        subnormal = (value + 24576.0) - 24576.0  # multiples of 2⁻⁹
        value = tl.where(tl.abs(value) < 0.015625, subnormal, normal)
    return value.to(q.dtype.element_ty)


@triton.jit
def _factors(largest):
    """Return the factor by which values are multiplied before the cast to float8, and the scale, which is 1 / factor.

    This is `float8_linear.factors` as a Triton function.
    """
    exponent = largest >> 23
    above = ((largest & 0x7FFFFF) > 0x600000).to(tl.int32)
    power = tl.minimum(262 - exponent - above, 253)
    multiplier = (power << 23).to(tl.float32, bitcast=True)
    scale = tl.where(exponent == 255, 0x7FC00000, (254 - power) << 23).to(tl.float32, bitcast=True)
    return multiplier, scale


@triton.jit(do_not_specialize=["num_rows"])
def _rows_kernel(
    x, q, scale, largest, num_rows,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, HAS_COLUMNS: tl.constexpr, ROUND: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    found = tl.zeros((BLOCK,), tl.int32)
    for row in tl.range(tl.program_id(0), num_rows, tl.num_programs(0), num_stages=STAGES):
        place = (tl.zeros((1,), tl.int64) + row) * WIDTH + column  # `row` is an int in Triton's interpreter
        value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        bits = _bits(value)
        multiplier, row_scale = _factors(tl.max(bits, axis=0))
        tl.store(q + place, _cast(value * multiplier, q, ROUND), mask=inside)
        tl.store(scale + row, row_scale)
        if HAS_COLUMNS:
            found = tl.maximum(found, bits)
    if HAS_COLUMNS:
        tl.atomic_max(largest + column, found, mask=inside, sem="relaxed")


@triton.jit(do_not_specialize=["num_rows"])
def _largest_kernel(
    x, largest, num_rows, WIDTH: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.program_id(1) * ROWS
    found = tl.zeros((TOKENS, COLUMNS), tl.int32)
    for start in tl.static_range(0, ROWS, TOKENS):
        row = first + start + tl.arange(0, TOKENS)
        inside = (row < num_rows)[:, None] & (column < WIDTH)[None, :]
        value = tl.load(x + row.to(tl.int64)[:, None] * WIDTH + column[None, :], mask=inside, other=0.0)
        found = tl.maximum(found, _bits(value.to(tl.float32)))
    tl.atomic_max(largest + column, tl.max(found, axis=0), mask=column < WIDTH, sem="relaxed")


@triton.jit(do_not_specialize=["num_rows", "padded_multiples"])
def _columns_kernel(
    x, largest, q, scale, num_rows, padded_multiples,
    WIDTH: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, MULTIPLE: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    padded = padded_multiples * MULTIPLE  # so that the compiler knows that stores are aligned
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    exists = column < WIDTH
    multiplier, column_scale = _factors(tl.load(largest + column, mask=exists, other=0))
    if tl.program_id(1) == 0:
        tl.store(scale + column, column_scale, mask=exists)
    inside = (row < num_rows)[:, None] & exists[None, :]
    value = tl.load(x + row.to(tl.int64)[:, None] * WIDTH + column[None, :], mask=inside, other=0.0).to(tl.float32)
    cast = _cast(value * multiplier[None, :], q, ROUND)
    place = column.to(tl.int64)[:, None] * padded + row[None, :]
    tl.store(q + place, tl.trans(cast), mask=exists[:, None] & (row < padded)[None, :])
