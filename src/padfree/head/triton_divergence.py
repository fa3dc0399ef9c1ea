# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Triton kernels for the divergence between the student's and the teacher's softmax, and for its gradient.

The kernels compute the same as the plain torch functions of `divergence.py`. The sums of the Triton programs are added
in a fixed order, so that results are reproducible.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from padfree.head.divergence import Divergence, StoredLogits, TokenDivergence
from padfree.head.elementwise import BlockedHead
from padfree.head.triton_elementwise import _FLOAT16_FLOOR, _LOG2_E, _cap_slope

# A Triton program processes SPAN columns of one token with WARPS warps.
SPAN = 4096
WARPS = 8

KINDS = {"forward-kl": 0, "reverse-kl": 1, "jsd": 2}
_FORWARD = tl.constexpr(0)
_REVERSE = tl.constexpr(1)
_TINY = tl.constexpr(torch.finfo(torch.float32).tiny)

PER_ROW = (
    "student_block_peaks", "student_peaks", "student_log_totals", "teacher_block_peaks", "teacher_peaks",
    "teacher_log_totals", "thresholds", "means", "rests", "factors", "inverse_temperature", "sums",
)  # fmt: skip
"""Pointer arguments whose alignment may change from call to call. Triton must not specialise a kernel on the alignment,
because it would then compile the kernel again after each change.
"""


@triton.jit
def _below_peak(
    stored, stride, block_peaks, sums_stride, peaks, row, block, column, num_columns,
    BLOCK: tl.constexpr, OWN_BLOCK: tl.constexpr,
):  # fmt: skip
    """Return logits [BLOCKS, BLOCK] of one token, each minus the token's largest logit."""
    inside = column < num_columns
    below = tl.load(stored + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    below = tl.maximum(below, _FLOAT16_FLOOR, propagate_nan=tl.PropagateNan.ALL)
    own = (block * BLOCK) // OWN_BLOCK  # `stored` is relative to the largest logit of each OWN_BLOCK columns
    block_peak = tl.load(
        block_peaks + own.to(tl.int64) * sums_stride + row, mask=block * BLOCK < num_columns, other=0.0
    )
    return below + (block_peak - tl.load(peaks + row))[:, None]


@triton.jit
def _log_mixture(s, t, beta):
    return tl.log(tl.maximum(beta * t + (1.0 - beta) * s, _TINY, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def _total(values):
    return tl.sum(tl.sum(values, axis=1), axis=0)


@triton.jit(
    do_not_specialize=["student_sums_stride", "teacher_sums_stride", "num_rows"],
    do_not_specialize_on_alignment=PER_ROW,
)
def _sums_kernel(
    student, student_block_peaks, student_peaks, student_log_totals,
    teacher, teacher_block_peaks, teacher_peaks, teacher_log_totals,
    thresholds, sums,
    num_rows, num_columns, student_stride, teacher_stride, student_sums_stride, teacher_sums_stride, beta,
    KIND: tl.constexpr, HAS_TOP: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    STUDENT_BLOCK: tl.constexpr, TEACHER_BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    span = tl.program_id(1)
    block = span * BLOCKS + tl.arange(0, BLOCKS)
    column = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = column < num_columns
    log_s = _below_peak(
        student, student_stride, student_block_peaks, student_sums_stride, student_peaks, row, block, column,
        num_columns, BLOCK, STUDENT_BLOCK,
    ) - tl.load(student_log_totals + row)  # fmt: skip
    below = _below_peak(
        teacher, teacher_stride, teacher_block_peaks, teacher_sums_stride, teacher_peaks, row, block, column,
        num_columns, BLOCK, TEACHER_BLOCK,
    )  # fmt: skip
    log_t = below - tl.load(teacher_log_totals + row)
    s = tl.where(inside, tl.exp2(log_s * _LOG2_E), 0.0)
    t = tl.where(inside, tl.exp2(log_t * _LOG2_E), 0.0)
    # [4, spans, R]
    place = sums + span.to(tl.int64) * num_rows + row
    plane = tl.num_programs(1).to(tl.int64) * num_rows
    if HAS_TOP:
        is_rest = below < tl.load(thresholds + row)
        tl.store(place + 2 * plane, _total(tl.where(is_rest, s, 0.0)))
        tl.store(place + 3 * plane, _total(tl.where(is_rest, t, 0.0)))
    else:
        is_rest = below != below  # false except for a NaN, which stays NaN
        tl.store(place + 2 * plane, 0.0)
        tl.store(place + 3 * plane, 0.0)
    if KIND == _FORWARD:
        terms = t * (log_t - log_s)
    elif KIND == _REVERSE:
        terms = s * (log_s - log_t)
    else:
        terms = s * (log_s - _log_mixture(s, t, beta))
    second = 0.0
    if KIND > _REVERSE:
        others = t * (log_t - _log_mixture(s, t, beta))
        if HAS_TOP:
            others = tl.where(is_rest, 0.0, others)
        second = _total(others)
    if HAS_TOP:
        terms = tl.where(is_rest, 0.0, terms)
    tl.store(place, _total(terms))
    tl.store(place + plane, second)


@triton.jit(do_not_specialize=["student_sums_stride", "teacher_sums_stride"], do_not_specialize_on_alignment=PER_ROW)
def _gradient_kernel(
    student, student_block_peaks, student_peaks, student_log_totals,
    teacher, teacher_block_peaks, teacher_peaks, teacher_log_totals,
    thresholds, means, rests, factors, inverse_temperature, out,
    num_columns, student_stride, teacher_stride, out_stride, student_sums_stride, teacher_sums_stride,
    beta, logit_scale, softcap,
    KIND: tl.constexpr, HAS_TOP: tl.constexpr, HAS_SOFTCAP: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    STUDENT_BLOCK: tl.constexpr, TEACHER_BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    column = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    student_below = _below_peak(
        student, student_stride, student_block_peaks, student_sums_stride, student_peaks, row, block, column,
        num_columns, BLOCK, STUDENT_BLOCK,
    )  # fmt: skip
    below = _below_peak(
        teacher, teacher_stride, teacher_block_peaks, teacher_sums_stride, teacher_peaks, row, block, column,
        num_columns, BLOCK, TEACHER_BLOCK,
    )  # fmt: skip
    log_s = student_below - tl.load(student_log_totals + row)
    log_t = below - tl.load(teacher_log_totals + row)
    s = tl.exp2(log_s * _LOG2_E)
    scale = tl.load(inverse_temperature + row)
    factor = tl.load(factors + row) * (scale * logit_scale)
    if KIND == _FORWARD:
        gradient = s - tl.exp2(log_t * _LOG2_E)
    elif KIND == _REVERSE:
        gradient = s * ((log_s - log_t) - tl.load(means + row))
    else:
        log_m = _log_mixture(s, tl.exp2(log_t * _LOG2_E), beta)
        gradient = (1.0 - beta) * s * ((log_s - log_m) - tl.load(means + row))
    if HAS_TOP:
        gradient = tl.where(below < tl.load(thresholds + row), s * tl.load(rests + row), gradient)
    gradient *= factor
    if HAS_SOFTCAP:
        gradient *= _cap_slope(student_below + tl.load(student_peaks + row), scale, softcap)
    tl.store(out + row * out_stride + column, gradient.to(out.dtype.element_ty), mask=column < num_columns)


def divergence_sums(
    student: StoredLogits, teacher: StoredLogits, settings: Divergence, threshold: Tensor | None
) -> Tensor:
    """Return the four sums over the vocabulary that determine a token's divergence, for each of R tokens: [4, R].

    This is `divergence.divergence_sums` as a Triton kernel. That function describes the four sums.
    """
    num_rows, num_columns = student.below.shape
    shape = _shape(student, teacher)
    spans = -(-num_columns // (shape["BLOCK"] * shape["BLOCKS"]))
    sums = student.block_peak.new_empty(4, spans, num_rows)
    _sums_kernel[(num_rows, spans)](
        *_pointers(student),
        *_pointers(teacher),
        student.softmax.peak if threshold is None else threshold,  # a placeholder if absent, which is not read
        sums,
        num_rows,
        num_columns,
        student.below.stride(0),
        teacher.below.stride(0),
        student.block_peak.stride(1),
        teacher.block_peak.stride(1),
        settings.beta,
        KIND=KINDS[settings.kind],
        HAS_TOP=threshold is not None,
        **shape,
    )
    return sums.sum(1)


def divergence_gradient(
    student: StoredLogits,
    teacher: StoredLogits,
    settings: Divergence,
    token: TokenDivergence,
    factor: Tensor,
    head: BlockedHead,
    inverse_temperature: Tensor,
    out: Tensor,
) -> None:
    """Write the gradient of each token's divergence, multiplied by its `factor` [R], into `out` [R, V].

    This is `divergence.divergence_gradient` as a Triton kernel. `out` may be the memory of the student's stored logits.
    """
    num_rows, num_columns = student.below.shape
    shape = _shape(student, teacher)
    absent = student.softmax.peak
    _gradient_kernel[(num_rows, -(-num_columns // (shape["BLOCK"] * shape["BLOCKS"])))](
        *_pointers(student),
        *_pointers(teacher),
        absent if token.threshold is None else token.threshold,
        token.mean,
        absent if token.rest is None else token.rest,
        factor,
        inverse_temperature,
        out,
        num_columns,
        student.below.stride(0),
        teacher.below.stride(0),
        out.stride(0),
        student.block_peak.stride(1),
        teacher.block_peak.stride(1),
        settings.beta,
        head.logit_scale,
        head.softcap or 1.0,
        KIND=KINDS[settings.kind],
        HAS_TOP=token.threshold is not None,
        HAS_SOFTCAP=head.softcap is not None,
        **shape,
    )


def _pointers(stored: StoredLogits) -> tuple[Tensor, ...]:
    return stored.below, stored.block_peak, stored.softmax.peak, stored.softmax.log_total


def _shape(student: StoredLogits, teacher: StoredLogits) -> dict[str, Any]:
    block = min(student.block, teacher.block)  # powers of two, so these columns share one peak in each model
    return {
        "BLOCK": block,
        "BLOCKS": max(1, SPAN // block),
        "STUDENT_BLOCK": student.block,
        "TEACHER_BLOCK": teacher.block,
        "num_warps": WARPS,
    }
