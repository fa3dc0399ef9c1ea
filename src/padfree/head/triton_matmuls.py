# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Triton kernels for the matmul that computes logits, fused with the work on its result: softmax sums or gradients.

`padfree.head.matmuls` describes and launches the kernels.
"""

from __future__ import annotations

import triton
import triton.language as tl

from padfree.head.elementwise import FLOOR
from padfree.head.triton_elementwise import _LOG2_E, PER_ROW, _cap_slope, _gradient, _logits

_OUTSIDE = tl.constexpr(2 * FLOOR)
"""The logit of columns beyond the vocabulary: lower than any real logit, and finite, so that 0 times it is 0."""


@triton.jit
def _place(tile, row_tiles, column_tiles, BAND: tl.constexpr):
    """Return the (row tile, column tile) of tile number `tile`, in the order that the module `matmuls` describes."""
    in_band = BAND * column_tiles
    first = tile // in_band * BAND
    height = tl.minimum(row_tiles - first, BAND)
    return first + tile % in_band % height, tile % in_band // height


@triton.jit
def _tile_logits(
    raw_logits, bias, column, inside, inverse_temperature, logit_scale, softcap,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    if HAS_BIAS or HAS_SOFTCAP:
        logits = _logits(
            raw_logits, bias, column[None, :], inside[None, :], inverse_temperature[:, None], logit_scale, softcap,
            HAS_BIAS, HAS_SOFTCAP,
        )  # fmt: skip
    else:
        logits = raw_logits * (inverse_temperature * logit_scale)[:, None]
    return logits


@triton.jit
def _store(
    descriptor, pointer, stride, values, first_row, first, num_rows, num_columns,
    IS_CUT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write `values` [ROWS, BLOCK] into a matrix [num_rows, num_columns], beginning at (`first_row`, `first`).

    `IS_CUT` is True if the matrix rows do not end at a multiple of 16 bytes.
    """
    if IS_CUT:  # a tensor descriptor can end its writes only at a multiple of 16 bytes
        if first + BLOCK > num_columns:
            row = first_row + tl.arange(0, ROWS)
            column = first + tl.arange(0, BLOCK)
            inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
            tl.store(pointer + row.to(tl.int64)[:, None] * stride + column[None, :], values, mask=inside)
        else:
            descriptor.store([first_row, first], values)
    else:
        descriptor.store([first_row, first], values)


@triton.jit
def _reduce_part(
    raw_logits, first_row, first, labels, bias, inverse_temperature, peaks, totals, moments, targets,
    stored, stored_pointer, stored_stride, num_rows, vocabulary, kept, sums_stride, logit_scale, softcap,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_MOMENT: tl.constexpr, HAS_STORED: tl.constexpr,
    IS_CUT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the softmax statistics (`BlockSums`) of ROWS tokens for one block of BLOCK vocabulary columns.

    `raw_logits` [ROWS, BLOCK] (hidden @ weight.T) begins at token `first_row` and vocabulary column `first`.
    """
    row = first_row + tl.arange(0, ROWS)
    # one half of the last tile may lie outside the vocabulary
    row_inside = row < tl.where(first < vocabulary, num_rows, 0)
    offset = tl.arange(0, BLOCK)
    inside = first + offset < vocabulary
    scale = tl.load(inverse_temperature + row, mask=row_inside, other=1.0)
    logits = _tile_logits(raw_logits, bias, first + offset, inside, scale, logit_scale, softcap, HAS_BIAS, HAS_SOFTCAP)
    # This branch must come after _tile_logits: Triton 3.6 does not wait for the tensor cores if a branch returns
    # `raw_logits` itself.
    if first + BLOCK > vocabulary:
        logits = tl.where(inside[None, :], logits, _OUTSIDE)
    label = tl.load(labels + row, mask=row_inside, other=-1) - first
    here = (label >= 0) & (label < tl.minimum(BLOCK, vocabulary - first))
    if tl.max(here.to(tl.int32), axis=0) > 0:
        is_label = offset[None, :] == tl.where(here, label, -1).to(tl.int32)[:, None]
        tl.store(targets + row, tl.sum(tl.where(is_label, logits, 0.0), axis=1), mask=here)
    peak = tl.max(logits, axis=1)
    below = logits - peak[:, None]
    exponentials = tl.exp2(below * _LOG2_E)
    place = (first // BLOCK).to(tl.int64) * sums_stride + row
    tl.store(peaks + place, peak, mask=row_inside)
    tl.store(totals + place, tl.sum(exponentials, axis=1), mask=row_inside)
    if HAS_MOMENT:
        tl.store(moments + place, tl.sum(exponentials * below, axis=1), mask=row_inside)
    if HAS_STORED:  # noqa: SIM102 (a compile-time constant; if it is False, `stored` is not a descriptor)
        if first < kept:
            _store(
                stored, stored_pointer, stored_stride, below.to(stored.dtype), first_row, first, num_rows, kept,
                IS_CUT, ROWS, BLOCK,
            )  # fmt: skip


@triton.jit
def _gradient_part(
    raw_logits, first_row, first, labels, bias, inverse_temperature, peaks, log_totals, entropies,
    pull_logprobs, pull_entropies, out, out_pointer, out_stride, num_rows, first_column, num_columns,
    logit_scale, softcap, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_ENTROPY: tl.constexpr,
    IS_CUT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradient of `raw_logits` [ROWS, BLOCK] (hidden @ weight.T) into `out` at (`first_row`, `first`).

    Column 0 of `out` is column `first_column` of the vocabulary.
    """
    row = first_row + tl.arange(0, ROWS)
    row_inside = row < num_rows
    offset = tl.arange(0, BLOCK)
    column = first + offset
    scale = tl.load(inverse_temperature + row, mask=row_inside, other=1.0)
    logits = _tile_logits(
        raw_logits,
        bias + first_column,
        column,
        column < num_columns,
        scale,
        logit_scale,
        softcap,
        HAS_BIAS,
        HAS_SOFTCAP,
    )
    peak = tl.load(peaks + row, mask=row_inside, other=0.0)
    log_total = tl.load(log_totals + row, mask=row_inside, other=0.0)
    log_p = (logits - peak[:, None]) - log_total[:, None]
    # Apart from the slope of the cap, d logit / d raw logit is the same factor for all logits of a token.
    pull_logprob = tl.load(pull_logprobs + row, mask=row_inside, other=0.0) * (scale * logit_scale)
    pull_entropy = pull_logprob
    entropy = pull_logprob
    if HAS_ENTROPY:
        pull_entropy = tl.load(pull_entropies + row, mask=row_inside, other=0.0) * (scale * logit_scale)
        entropy = tl.load(entropies + row, mask=row_inside, other=0.0)
    gradient = _gradient(log_p, pull_logprob[:, None], pull_entropy[:, None], entropy[:, None], HAS_ENTROPY)
    label = tl.load(labels + row, mask=row_inside, other=-1) - first_column - first
    here = (label >= 0) & (label < BLOCK)
    if tl.max(here.to(tl.int32), axis=0) > 0:
        is_label = offset[None, :] == tl.where(here, label, -1).to(tl.int32)[:, None]
        gradient += tl.where(is_label, pull_logprob[:, None], 0.0)
    if HAS_SOFTCAP:
        gradient *= _cap_slope(logits, scale[:, None], softcap)
    _store(
        out, out_pointer, out_stride, gradient.to(out.dtype), first_row, first, num_rows, num_columns,
        IS_CUT, ROWS, BLOCK,
    )  # fmt: skip


@triton.jit
def _zeros(done, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return a tile [ROWS, COLUMNS] of zeros. It is computed from `done`, so that the compiler does not treat it as a
    constant.
    """
    return tl.full((ROWS, COLUMNS), (done < 0).to(tl.float32), tl.float32)


@triton.jit
def _part(tile, part: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr):
    """Return part number `part` of a tile [ROWS, COLUMNS]: the whole tile, or its left or right half."""
    if PARTS == 1:
        result = tile
    else:
        left, right = tl.split(tl.permute(tl.reshape(tile, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))
        result = left if part == 0 else right
    return result


@triton.jit
def _multiply(
    hidden, weight, raw_logits, step, tile, row_tile, column_tile, steps, row_tiles, column_tiles,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, BAND: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Do one step of the matmul for a tile of logits: add the products of DEPTH hidden dimensions to `raw_logits`.

    After the last step of a tile, the next call begins the next tile. Returns the updated `raw_logits`, `step`, `tile`,
    `row_tile` and `column_tile`.
    """
    step = tl.where(step == steps - 1, 0, step + 1)
    if step == 0:
        tile += tl.num_programs(0)
        row_tile, column_tile = _place(tile, row_tiles, column_tiles, BAND)
    left = hidden.load([row_tile * ROWS, step * DEPTH])  # a tensor descriptor reads 0 outside the matrix
    right = weight.load([column_tile * COLUMNS, step * DEPTH])
    if INTERPRETED:  # the interpreter cannot multiply bfloat16
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, right.T, raw_logits), step, tile, row_tile, column_tile


# Without `do_not_specialize`, Triton would compile the kernel again for a number of tokens that is divisible by 16.
@triton.jit(do_not_specialize=["num_rows", "sums_stride"], do_not_specialize_on_alignment=PER_ROW)
def reduce_kernel(
    hidden, weight, stored, stored_pointer, labels, bias, inverse_temperature, peaks, totals, moments, targets,
    num_rows, width, vocabulary, kept, stored_stride, sums_stride, logit_scale, softcap,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_MOMENT: tl.constexpr, HAS_STORED: tl.constexpr,
    IS_CUT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, BAND: tl.constexpr, PARTS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    row_tiles = tl.cdiv(num_rows, ROWS)
    column_tiles = tl.cdiv(vocabulary, COLUMNS)
    steps = tl.cdiv(width, DEPTH)
    step = -1
    tile = tl.program_id(0) - tl.num_programs(0)
    row_tile = 0
    column_tile = 0
    done = tile  # counts finished tiles, while `tile` counts loaded tiles, which are ahead
    raw_logits = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    # One loop instead of two nested ones, so that the loads continue from one tile to the next.
    for _ in range(steps * tl.cdiv(row_tiles * column_tiles - tl.program_id(0), tl.num_programs(0))):
        raw_logits, step, tile, row_tile, column_tile = _multiply(
            hidden, weight, raw_logits, step, tile, row_tile, column_tile, steps, row_tiles, column_tiles,
            ROWS, COLUMNS, DEPTH, BAND, INTERPRETED,
        )  # fmt: skip
        if step == steps - 1:
            done += tl.num_programs(0)
            row_tile_done, column_tile_done = _place(done, row_tiles, column_tiles, BAND)
            for part in tl.static_range(PARTS):
                _reduce_part(
                    _part(raw_logits, part, ROWS, COLUMNS, PARTS), row_tile_done * ROWS,
                    column_tile_done * COLUMNS + part * (COLUMNS // PARTS), labels, bias, inverse_temperature, peaks,
                    totals, moments, targets, stored, stored_pointer, stored_stride, num_rows, vocabulary, kept,
                    sums_stride, logit_scale, softcap, HAS_BIAS, HAS_SOFTCAP, HAS_MOMENT, HAS_STORED, IS_CUT, ROWS,
                    COLUMNS // PARTS,
                )  # fmt: skip
            raw_logits = _zeros(done, ROWS, COLUMNS)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=PER_ROW)
def gradient_kernel(
    hidden, weight, out, out_pointer, labels, bias, inverse_temperature, peaks, log_totals, entropies,
    pull_logprobs, pull_entropies, num_rows, width, first_column, num_columns, out_stride, logit_scale, softcap,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_ENTROPY: tl.constexpr, IS_CUT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, BAND: tl.constexpr, PARTS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    row_tiles = tl.cdiv(num_rows, ROWS)
    column_tiles = tl.cdiv(num_columns, COLUMNS)
    steps = tl.cdiv(width, DEPTH)
    step = -1
    tile = tl.program_id(0) - tl.num_programs(0)
    row_tile = 0
    column_tile = 0
    done = tile
    raw_logits = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for _ in range(steps * tl.cdiv(row_tiles * column_tiles - tl.program_id(0), tl.num_programs(0))):
        raw_logits, step, tile, row_tile, column_tile = _multiply(
            hidden, weight, raw_logits, step, tile, row_tile, column_tile, steps, row_tiles, column_tiles,
            ROWS, COLUMNS, DEPTH, BAND, INTERPRETED,
        )  # fmt: skip
        if step == steps - 1:
            done += tl.num_programs(0)
            row_tile_done, column_tile_done = _place(done, row_tiles, column_tiles, BAND)
            for part in tl.static_range(PARTS):
                _gradient_part(
                    _part(raw_logits, part, ROWS, COLUMNS, PARTS), row_tile_done * ROWS,
                    column_tile_done * COLUMNS + part * (COLUMNS // PARTS), labels, bias, inverse_temperature, peaks,
                    log_totals, entropies, pull_logprobs, pull_entropies, out, out_pointer, out_stride, num_rows,
                    first_column, num_columns, logit_scale, softcap, HAS_BIAS, HAS_SOFTCAP, HAS_ENTROPY, IS_CUT, ROWS,
                    COLUMNS // PARTS,
                )  # fmt: skip
            raw_logits = _zeros(done, ROWS, COLUMNS)
