# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The functions of `elementwise.py` as Triton kernels. Each kernel reads a tile of logits once and writes it at most
once.

The arithmetic is float32. Every result is computed by one Triton program, so it does not depend on the order of
execution. With `TRITON_INTERPRET=1`, set before Triton is imported, the kernels run on the CPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from padfree.head.elementwise import (
    FLOAT16_FLOOR,
    FLOOR,
    LOWEST_TANH,
    BlockedHead,
    BlockSums,
    LabelledRows,
    Softmax,
    Upstream,
)

# In `gradient_from_stored`, a Triton program processes STORED_SPAN columns of one token with STORED_WARPS warps.
STORED_SPAN = 4096
STORED_WARPS = 8

_FLOOR = tl.constexpr(FLOOR)
_FLOAT16_FLOOR = tl.constexpr(FLOAT16_FLOOR)
_LOWEST_TANH = tl.constexpr(LOWEST_TANH)
_LOG2_E = tl.constexpr(1.4426950408889634)


def is_interpreted() -> bool:
    """Return whether these kernels run in Triton's interpreter, decided at import."""
    return not isinstance(_reduce_kernel, triton.JITFunction)


PER_ROW = (
    "labels", "inverse_temperature", "block_peaks", "totals", "moments", "targets", "peaks", "log_totals", "logprobs",
    "entropies", "pull_logprobs", "pull_entropies",
)  # fmt: skip
"""Pointer arguments whose alignment changes with the number of tokens. Triton must not specialise a kernel on the
alignment, because it would then compile the kernel again after each change.
"""


@triton.jit
def _logits(
    raw_logits, bias, column, inside, inverse_temperature, logit_scale, softcap,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    logits = raw_logits.to(tl.float32)
    if HAS_BIAS:
        logits += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    logits *= logit_scale
    if HAS_SOFTCAP:
        small = tl.exp(-2.0 * tl.abs(logits / softcap))
        magnitude = softcap * ((1.0 - small) / (1.0 + small))  # of the tanh; this form cannot overflow
        logits = tl.where(logits < 0.0, -magnitude, magnitude)
    logits *= inverse_temperature
    # where() and not maximum(), because a NaN must stay NaN
    return tl.where(logits < _FLOOR, _FLOOR, logits)


@triton.jit
def _gradient(log_p, pull_logprob, pull_entropy, entropy, HAS_ENTROPY: tl.constexpr):
    """Return the gradient of the loss with respect to a logit. For the label's logit, the caller adds `pull_logprob`.

    `pull_logprob` and `pull_entropy` are the gradients with respect to the token's log-probability and entropy.
    """
    pull = pull_logprob
    if HAS_ENTROPY:
        pull = (pull_logprob + pull_entropy * entropy) + pull_entropy * log_p
    return -tl.exp2(log_p * _LOG2_E) * pull


@triton.jit
def _cap_slope(logits, inverse_temperature, softcap):
    tanh = logits / (inverse_temperature * softcap)
    return 1.0 - tanh * tanh


@triton.jit
def _finite_cap_slope(logits, inverse_temperature, softcap):
    """Return the derivative of the soft cap, made finite for every logit.

    Logits of ids outside a token's kept set (ids that sampling could not choose) are set to a very low number. Their
    gradient is 0.
    """
    lowest = _LOWEST_TANH * (inverse_temperature * softcap)
    return _cap_slope(tl.where(logits < lowest, lowest, logits), inverse_temperature, softcap)


@triton.jit(do_not_specialize=["sums_stride"], do_not_specialize_on_alignment=PER_ROW)
def _reduce_kernel(
    raw_logits, labels, bias, kept, inverse_temperature, peaks, totals, moments, targets, stored,
    first, num_columns, raw_logits_stride, kept_stride, stored_stride, sums_stride, logit_scale, softcap,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_KEPT: tl.constexpr, HAS_MOMENT: tl.constexpr,
    HAS_STORED: tl.constexpr, IS_FLOAT16: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK
    column = start + tl.arange(0, BLOCK)
    inside = column < num_columns
    value = tl.load(raw_logits + row * raw_logits_stride + column, mask=inside, other=0.0)
    scale = tl.load(inverse_temperature + row)
    logits = _logits(value, bias + first, column, inside, scale, logit_scale, softcap, HAS_BIAS, HAS_SOFTCAP)
    if HAS_KEPT:
        logits = tl.where(tl.load(kept + row * kept_stride + column, mask=inside, other=0) != 0, logits, _FLOOR)
    peak = tl.max(tl.where(inside, logits, float("-inf")), axis=0)
    below = tl.where(inside, logits - peak, 0.0)
    exponentials = tl.where(inside, tl.exp(below), 0.0)
    place = ((first + start) // BLOCK).to(tl.int64) * sums_stride + row
    tl.store(peaks + place, peak)
    tl.store(totals + place, tl.sum(exponentials, axis=0))
    if HAS_MOMENT:
        tl.store(moments + place, tl.sum(exponentials * below, axis=0))
    label = tl.load(labels + row) - first
    if (label >= start) & (label < tl.minimum(start + BLOCK, num_columns)):
        tl.store(targets + row, tl.sum(tl.where(column == label, logits, 0.0), axis=0))
    if HAS_STORED:
        if IS_FLOAT16:
            below = tl.where(below < _FLOAT16_FLOOR, _FLOAT16_FLOOR, below)
        tl.store(stored + row * stored_stride + column, below.to(stored.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize_on_alignment=PER_ROW)
def _raw_logits_kernel(
    raw_logits, labels, bias, kept, inverse_temperature, peaks, log_totals, entropies, pull_logprobs, pull_entropies,
    out, first, num_columns, raw_logits_stride, kept_stride, out_stride, logit_scale, softcap,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_KEPT: tl.constexpr, HAS_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK
    column = start + tl.arange(0, BLOCK)
    inside = column < num_columns
    value = tl.load(raw_logits + row * raw_logits_stride + column, mask=inside, other=0.0)
    scale = tl.load(inverse_temperature + row)
    logits = _logits(value, bias + first, column, inside, scale, logit_scale, softcap, HAS_BIAS, HAS_SOFTCAP)
    if HAS_KEPT:
        logits = tl.where(tl.load(kept + row * kept_stride + column, mask=inside, other=0) != 0, logits, _FLOOR)
    log_p = (logits - tl.load(peaks + row)) - tl.load(log_totals + row)
    # Apart from the slope of the cap, d logit / d raw logit is the same factor for all logits of a token.
    pull_logprob = tl.load(pull_logprobs + row) * (scale * logit_scale)
    entropy = 0.0
    pull_entropy = 0.0
    if HAS_ENTROPY:
        entropy = tl.load(entropies + row)
        pull_entropy = tl.load(pull_entropies + row) * (scale * logit_scale)
    gradient = _gradient(log_p, pull_logprob, pull_entropy, entropy, HAS_ENTROPY)
    label = tl.load(labels + row) - first
    if (label >= start) & (label < start + BLOCK):
        gradient += tl.where(column == label.to(tl.int32), pull_logprob, 0.0)
    if HAS_SOFTCAP:
        gradient *= _finite_cap_slope(logits, scale, softcap)
    tl.store(out + row * out_stride + column, gradient.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["sums_stride"], do_not_specialize_on_alignment=PER_ROW)
def _stored_kernel(
    stored, labels, inverse_temperature, block_peaks, peaks, log_totals, entropies, pull_logprobs, pull_entropies, out,
    num_columns, stored_stride, out_stride, sums_stride, logit_scale, softcap,
    HAS_SOFTCAP: tl.constexpr, HAS_ENTROPY: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    column = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = column < num_columns
    below = tl.load(stored + row * stored_stride + column, mask=inside, other=0.0).to(tl.float32)
    below = tl.maximum(below, _FLOAT16_FLOOR, propagate_nan=tl.PropagateNan.ALL)
    block_peak = tl.load(
        block_peaks + block.to(tl.int64) * sums_stride + row, mask=block * BLOCK < num_columns, other=0.0
    )
    base = (block_peak - tl.load(peaks + row)) - tl.load(log_totals + row)
    scale = tl.load(inverse_temperature + row)
    pull_logprob = tl.load(pull_logprobs + row) * (scale * logit_scale)
    entropy = 0.0
    pull_entropy = 0.0
    if HAS_ENTROPY:
        entropy = tl.load(entropies + row)
        pull_entropy = tl.load(pull_entropies + row) * (scale * logit_scale)
    gradient = _gradient(below + base[:, None], pull_logprob, pull_entropy, entropy, HAS_ENTROPY)
    start = tl.program_id(1) * (BLOCK * BLOCKS)
    label = tl.load(labels + row)
    if (label >= start) & (label < start + BLOCK * BLOCKS):
        gradient += tl.where(column == label.to(tl.int32), pull_logprob, 0.0)
    if HAS_SOFTCAP:
        gradient *= _finite_cap_slope(below + block_peak[:, None], scale, softcap)
    tl.store(out + row * out_stride + column, gradient.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows", "sums_stride"], do_not_specialize_on_alignment=PER_ROW)
def _merge_kernel(
    block_peaks, totals, moments, targets, peaks, log_totals, logprobs, entropies,
    num_rows, sums_stride,
    NUM_BLOCKS: tl.constexpr, HAS_MOMENT: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_inside = row < num_rows
    peak = tl.full((BLOCKS, ROWS), float("-inf"), tl.float32)
    for first in range(0, NUM_BLOCKS, BLOCKS):
        block = first + tl.arange(0, BLOCKS)
        inside = (block < NUM_BLOCKS)[:, None] & row_inside[None, :]
        place = block.to(tl.int64)[:, None] * sums_stride + row[None, :]
        peak = tl.maximum(peak, tl.load(block_peaks + place, mask=inside, other=float("-inf")))
    peak = tl.where(row_inside, tl.max(peak, axis=0), 0.0)
    total = tl.zeros((BLOCKS, ROWS), tl.float32)
    moment = tl.zeros((BLOCKS, ROWS), tl.float32)
    for first in range(0, NUM_BLOCKS, BLOCKS):
        block = first + tl.arange(0, BLOCKS)
        inside = (block < NUM_BLOCKS)[:, None] & row_inside[None, :]
        place = block.to(tl.int64)[:, None] * sums_stride + row[None, :]
        shift = tl.load(block_peaks + place, mask=inside, other=0.0) - peak[None, :]
        share = tl.where(inside, tl.exp(shift), 0.0)
        block_total = tl.load(totals + place, mask=inside, other=0.0)
        total += share * block_total
        if HAS_MOMENT:
            moment += share * (tl.load(moments + place, mask=inside, other=0.0) + block_total * shift)
    row_total = tl.where(row_inside, tl.sum(total, axis=0), 1.0)
    log_total = tl.log(row_total)
    tl.store(peaks + row, peak, mask=row_inside)
    tl.store(log_totals + row, log_total, mask=row_inside)
    target = tl.load(targets + row, mask=row_inside, other=0.0)
    tl.store(logprobs + row, (target - peak) - log_total, mask=row_inside)
    if HAS_MOMENT:
        tl.store(entropies + row, log_total - tl.sum(moment, axis=0) / row_total, mask=row_inside)


@triton.jit
def _scale_kernel(values, factor, count, BLOCK: tl.constexpr):
    scale = tl.load(factor).to(tl.float32)
    if scale != 1.0:
        place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        scaled = tl.load(values + place, mask=place < count, other=0.0).to(tl.float32) * scale
        tl.store(values + place, scaled.to(values.dtype.element_ty), mask=place < count)


def reduce_tile(
    raw_logits: Tensor, first: int, head: BlockedHead, rows: LabelledRows, sums: BlockSums, stored: Tensor | None
) -> None:
    """Write softmax statistics (maxima, sums of exponentials) of R tokens and W vocabulary columns into `sums`.

    `raw_logits` [R, W] are hidden @ weight.T, before bias, soft cap and temperature. In contrast to
    `elementwise.reduce_tile`, this function does not overwrite `raw_logits`.
    """
    num_rows, num_columns = raw_logits.shape
    kept = None if rows.kept is None else rows.kept.tile(first, num_columns).view(torch.uint8)
    absent = rows.labels  # a placeholder for arguments that are absent and never read
    _reduce_kernel[_grid(num_rows, num_columns, head)](
        raw_logits,
        rows.labels,
        absent if head.bias is None else head.bias,
        absent if kept is None else kept,
        rows.inverse_temperature,
        sums.peak,
        sums.total,
        absent if sums.moment is None else sums.moment,
        sums.target,
        absent if stored is None else stored,
        first,
        num_columns,
        raw_logits.stride(0),
        0 if kept is None else kept.stride(0),
        0 if stored is None else stored.stride(0),
        sums.peak.stride(1),
        head.logit_scale,
        head.softcap or 1.0,
        HAS_BIAS=head.bias is not None,
        HAS_SOFTCAP=head.softcap is not None,
        HAS_KEPT=kept is not None,
        HAS_MOMENT=sums.moment is not None,
        HAS_STORED=stored is not None,
        IS_FLOAT16=stored is not None and stored.dtype == torch.float16,
        **_launch(head),
    )


def gradient_from_raw_logits(
    raw_logits: Tensor,
    first: int,
    head: BlockedHead,
    rows: LabelledRows,
    softmax: Softmax,
    upstream: Upstream,
    out: Tensor,
) -> None:
    """Write the gradient of raw logits [R, W] (hidden @ weight.T) into `out`.

    The result equals that of `elementwise.gradient_from_raw_logits`, but the raw logits are not overwritten.
    """
    num_rows, num_columns = raw_logits.shape
    kept = None if rows.kept is None else rows.kept.tile(first, num_columns).view(torch.uint8)
    absent = rows.labels
    _raw_logits_kernel[_grid(num_rows, num_columns, head)](
        raw_logits,
        rows.labels,
        absent if head.bias is None else head.bias,
        absent if kept is None else kept,
        rows.inverse_temperature,
        softmax.peak,
        softmax.log_total,
        absent if softmax.entropy is None else softmax.entropy,
        upstream.logprobs,
        absent if upstream.entropy is None else upstream.entropy,
        out,
        first,
        num_columns,
        raw_logits.stride(0),
        0 if kept is None else kept.stride(0),
        out.stride(0),
        head.logit_scale,
        head.softcap or 1.0,
        HAS_BIAS=head.bias is not None,
        HAS_SOFTCAP=head.softcap is not None,
        HAS_KEPT=kept is not None,
        HAS_ENTROPY=upstream.entropy is not None,
        **_launch(head),
    )


def merge(sums: BlockSums) -> Softmax:
    """Compute each token's softmax from the maxima and sums of exponentials of all vocabulary blocks."""
    num_rows, num_blocks = sums.peak.shape
    peak, log_total, logprobs = (torch.empty_like(sums.target) for _ in range(3))
    entropy = None if sums.moment is None else torch.empty_like(sums.target)
    _merge_kernel[(-(-num_rows // 32),)](
        sums.peak,
        sums.total,
        sums.peak if sums.moment is None else sums.moment,
        sums.target,
        peak,
        log_total,
        logprobs,
        peak if entropy is None else entropy,
        num_rows,
        sums.peak.stride(1),
        NUM_BLOCKS=num_blocks,
        HAS_MOMENT=sums.moment is not None,
        ROWS=32,
        BLOCKS=32,
        num_warps=4,
    )
    return Softmax(peak=peak, log_total=log_total, logprobs=logprobs, entropy=entropy)


def gradient_from_stored(
    stored: Tensor,
    head: BlockedHead,
    rows: LabelledRows,
    peak: Tensor,
    softmax: Softmax,
    upstream: Upstream,
    out: Tensor,
) -> None:
    """Write the gradient of the raw logits (hidden @ weight.T) into `out` [R, W], which may be the memory of `stored`.

    `stored` [R, W] are the logits after bias, soft cap and temperature, minus `peak`: the largest logit of the token
    and vocabulary block.
    """
    num_rows, num_columns = stored.shape
    absent = rows.labels
    blocks = max(1, STORED_SPAN // head.block)
    _stored_kernel[(num_rows, -(-num_columns // (blocks * head.block)))](
        stored,
        rows.labels,
        rows.inverse_temperature,
        peak,
        softmax.peak,
        softmax.log_total,
        absent if softmax.entropy is None else softmax.entropy,
        upstream.logprobs,
        absent if upstream.entropy is None else upstream.entropy,
        out,
        num_columns,
        stored.stride(0),
        out.stride(0),
        peak.stride(1),
        head.logit_scale,
        head.softcap or 1.0,
        HAS_SOFTCAP=head.softcap is not None,
        HAS_ENTROPY=upstream.entropy is not None,
        BLOCK=head.block,
        BLOCKS=blocks,
        num_warps=STORED_WARPS,
    )


def scale_(values: Tensor, factor: Tensor) -> None:
    """Multiply `values` by the scalar tensor `factor`, in place. The kernel writes nothing if the factor is 1."""
    count = values.numel()
    if count:
        _scale_kernel[(-(-count // 8192),)](values, factor, count, BLOCK=8192, num_warps=8)


def _grid(num_rows: int, num_columns: int, head: BlockedHead) -> tuple[int, int]:
    return num_rows, -(-num_columns // head.block)


def _launch(head: BlockedHead) -> dict[str, int]:
    return {"BLOCK": head.block, "num_warps": max(1, min(8, head.block // 512))}
