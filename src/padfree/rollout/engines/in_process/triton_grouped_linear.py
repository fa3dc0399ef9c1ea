# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="assignment, var-annotated", no-warn-unreachable
"""`grouped_linear` (each row is multiplied with the weight of its expert) as a Triton kernel.

The rows are sorted by expert. Each expert's rows are divided into blocks of up to ROWS rows. For example, if ROWS is 2,
experts with 2, 3 and 2 rows have 1, 2 and 1 blocks. A Triton program multiplies one block with one tile of columns of
the weight.

Only the device knows the number of rows of each expert. The grid is therefore large enough for any division of the
rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Tiles(NamedTuple):
    """Sizes of a tile, the part of the output [R, N] that one Triton program computes.

    `inner`: the number of inputs that the program multiplies at a time.
    """

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int


def tiles_for(num_rows: int, num_experts: int, element_size: int) -> Tiles:
    """Choose the sizes of the tiles that the Triton programs compute.

    A tile has about twice the mean number of rows of an expert, at least 16 and at most 128. Smaller tiles get more
    pipeline stages, because reading the weights limits the speed.
    """
    rows = min(128, max(16, triton.next_power_of_2(triton.cdiv(2 * num_rows, num_experts))))
    inner = 128 // element_size
    return Tiles(rows, 128, inner, 8, 3) if rows == 128 else Tiles(rows, 128, inner, 4, 4)


@triton.jit
def _multiply_kernel(
    x, weight, bias, order, starts, out, num_columns, inner_size, num_experts, gather,
    expert_stride, column_stride, inner_stride,
    EXPERTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, EVEN: tl.constexpr,
    GATHERS: tl.constexpr, SCATTERS: tl.constexpr, HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    block, tile = tl.program_id(0), tl.program_id(1)
    experts = tl.arange(0, EXPERTS)
    real = experts < num_experts
    first = tl.load(starts + experts, mask=real, other=0)
    last = tl.load(starts + experts + 1, mask=real, other=0)
    blocks = (last - first + ROWS - 1) // ROWS
    ends = tl.cumsum(blocks, 0)
    expert = tl.sum((ends <= block).to(tl.int32), axis=0)  # number of experts whose blocks are all before this one
    if expert >= num_experts:  # there is no block for this program
        return
    own = experts == expert
    start = tl.sum(tl.where(own, first + (block - ends + blocks) * ROWS, 0), axis=0)
    end = tl.sum(tl.where(own, last, 0), axis=0)

    row = start + tl.arange(0, ROWS)
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    has_row, has_column = row < end, column < num_columns
    source = row.to(tl.int64)
    if GATHERS or SCATTERS:
        place = tl.load(order + row, mask=has_row, other=0)
        if GATHERS:
            source = place // gather
    inner = tl.arange(0, INNER)
    x_block = x + source[:, None] * inner_size + inner[None, :]
    weight_block = (
        weight + expert.to(tl.int64) * expert_stride + inner[:, None] * inner_stride + column[None, :] * column_stride
    )
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for at in range(0, inner_size, INNER):
        if EVEN:
            left = tl.load(x_block, mask=has_row[:, None], other=0.0)
            right = tl.load(weight_block, mask=has_column[None, :], other=0.0)
        else:
            has_inner = at + inner < inner_size
            left = tl.load(x_block, mask=has_row[:, None] & has_inner[None, :], other=0.0)
            right = tl.load(weight_block, mask=has_inner[:, None] & has_column[None, :], other=0.0)
        total = tl.dot(left, right, total, input_precision=PRECISION)
        x_block += INNER
        weight_block += INNER * inner_stride
    if HAS_BIAS:
        total += tl.load(bias + expert * num_columns + column, mask=has_column, other=0.0).to(tl.float32)[None, :]
    target = place if SCATTERS else row.to(tl.int64)
    tl.store(
        out + target[:, None] * num_columns + column[None, :],
        total.to(out.dtype.element_ty),
        mask=has_row[:, None] & has_column[None, :],
    )


def is_interpreted() -> bool:
    """Return whether this Triton kernel is interpreted (TRITON_INTERPRET=1 when this module was imported)."""
    return not isinstance(_multiply_kernel, triton.JITFunction)


def multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    order: Tensor,
    starts: Tensor,
    gather: int,
    scatter: bool,
    transposed: bool,
    *,
    tiles: Tiles | None = None,
) -> Tensor:
    """Return each of R rows multiplied with its expert's weight, [R, N]. Arguments: see `grouped_linear`.

    `tiles`, if given, replaces the choice of `tiles_for`.
    """
    num_experts, num_rows, inner_size = len(weight), len(order), x.shape[1]
    expert_stride, column_stride, inner_stride = weight.stride()
    if transposed:
        column_stride, inner_stride = inner_stride, column_stride
    num_columns = weight.shape[2 if transposed else 1]
    x = x.contiguous().to(weight.dtype)
    out = x.new_empty(num_rows, num_columns)
    tiles = tiles or tiles_for(num_rows, num_experts, x.element_size())
    # This is enough for any division of the rows over the experts.
    num_blocks = num_rows // tiles.rows + min(num_experts, num_rows)
    if num_rows == 0:
        return out
    # The blocks of one expert are neighbours in the grid, so that they find the tile of the weight in the L2 cache.
    _multiply_kernel[(num_blocks, triton.cdiv(num_columns, tiles.columns))](
        x, weight, None if bias is None else bias.contiguous(), order, starts, out,
        num_columns, inner_size, num_experts, gather, expert_stride, column_stride, inner_stride,
        EXPERTS=triton.next_power_of_2(num_experts), ROWS=tiles.rows, COLUMNS=tiles.columns, INNER=tiles.inner,
        EVEN=inner_size % tiles.inner == 0, GATHERS=gather > 0, SCATTERS=scatter, HAS_BIAS=bias is not None,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return out
