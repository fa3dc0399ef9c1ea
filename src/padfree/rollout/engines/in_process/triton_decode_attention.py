# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="assignment, var-annotated", no-warn-unreachable
"""`decode_attention` as a Triton kernel: the new token of each response attends to the response's cached keys.

The cached keys of a response are divided into splits of `span` keys. One Triton program handles one split. For example,
with 1101 cached keys and a span of 512:

    split 0     the new token and cached keys 0 to 511
    split 1     cached keys 512 to 1023
    split 2     cached keys 1024 to 1100

The grid is (response, key head, split). A program handles all query heads of its key head. A second kernel combines the
splits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from padfree.rollout.engines.in_process.sampled_tokens import ACTIVE, OWN, PROMPT, STORED, WRITTEN

BLOCK = 64
"""Number of keys that a Triton program reads per iteration. Large heads use half as many."""

SHARED_MEMORY = 96 << 10
"""Maximum bytes of shared memory of a Triton program, chosen so that small GPUs also have enough."""

SPAN = 512
"""Number of cached keys of a response that one Triton program handles. `FEW_PROGRAMS` says when it is halved."""

FEW_PROGRAMS = 512
"""If (responses · key heads) is below this, a Triton program handles SPAN / 2 cached keys instead of SPAN."""

_PROMPT, _STORED, _OWN, _WRITTEN, _ACTIVE = (tl.constexpr(row) for row in (PROMPT, STORED, OWN, WRITTEN, ACTIVE))


def is_interpreted() -> bool:
    """Return whether these Triton kernels are interpreted (TRITON_INTERPRET=1 when this module was imported)."""
    return not isinstance(_attend_kernel, triton.JITFunction)


@triton.jit
def _capped(scores, softcap, HAS_SOFTCAP: tl.constexpr):
    if HAS_SOFTCAP:
        small = tl.exp(-2.0 * tl.abs(scores / softcap))
        # This form of |softcap · tanh(scores / softcap)| cannot overflow.
        magnitude = softcap * ((1.0 - small) / (1.0 + small))
        scores = tl.where(scores < 0.0, -magnitude, magnitude)
    return scores


@triton.jit
def _with_sinks(peak, total, weighted, sinks, row, inside):
    """Add the attention sink to the softmax. A sink is a learned score of each head that has no value vector."""
    sink = tl.load(sinks + row, mask=inside, other=float("-inf")).to(tl.float32)
    higher = tl.maximum(peak, sink)
    faded = tl.exp(peak - higher)
    return total * faded + tl.exp(sink - higher), weighted * faded[:, None]


@triton.jit
def _attend_kernel(
    q, k, v, keys, values, slots, sinks, out, peaks, totals, parts, slot_stride, window, span, scale, softcap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr,
    DV: tl.constexpr, DV_PADDED: tl.constexpr, N: tl.constexpr, SPLITS: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    slot, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    active = tl.load(slots + _ACTIVE * slot_stride + slot) != 0
    prompt = tl.load(slots + _PROMPT * slot_stride + slot)
    own = tl.load(slots + _OWN * slot_stride + slot)
    stored = tl.where(active, tl.load(slots + _STORED * slot_stride + slot), 0).to(tl.int32)
    written = tl.where(active, tl.load(slots + _WRITTEN * slot_stride + slot), 0).to(tl.int32)
    end = stored + written
    start = tl.maximum(end + 1 - window, 0) if HAS_WINDOW else end * 0
    start += split * span
    if SPLITS > 1:
        end = tl.minimum(end, start + span)

    group, column, value_column = tl.arange(0, ROWS), tl.arange(0, D_PADDED), tl.arange(0, DV_PADDED)
    row = slot * HEADS * GROUP + head * GROUP + group
    in_group, in_d, in_dv = group < GROUP, column < D, value_column < DV
    if (split > 0) & (start >= end):  # the split is past the last key
        tl.store(peaks + row * SPLITS + split, tl.full((ROWS,), float("-inf"), tl.float32), mask=in_group)
        return
    query = tl.load(q + row[:, None] * D + column[None, :], mask=in_group[:, None] & in_d[None, :], other=0.0)

    new = slot * HEADS + head
    new_key = tl.load(k + new * D + column, mask=in_d, other=0.0)
    new_value = tl.load(v + new * DV + value_column, mask=in_dv, other=0.0)
    if split == 0:
        place = (own + written) * HEADS + head
        tl.store(keys + place * D + column, new_key, mask=column < tl.where(active, D, 0))
        tl.store(values + place * DV + value_column, new_value, mask=value_column < tl.where(active, DV, 0))
    score = tl.sum(query.to(tl.float32) * new_key.to(tl.float32)[None, :], axis=1) * scale
    score = _capped(score, softcap, HAS_SOFTCAP)
    is_first = split == 0
    peak = tl.where(is_first, score, float("-inf"))  # [ROWS]
    total = tl.where(is_first, tl.full((ROWS,), 1.0, tl.float32), 0.0)
    weighted = tl.where(is_first, new_value.to(tl.float32), 0.0)[None, :] + tl.zeros((ROWS, DV_PADDED), tl.float32)

    for at in range(start, end, N):
        number = at + tl.arange(0, N)
        seen = number < end
        place = tl.where(number < stored, prompt + number, own + number - stored)
        place = tl.where(seen, place, 0) * HEADS + head
        block = tl.load(keys + place[:, None] * D + column[None, :], mask=seen[:, None] & in_d[None, :], other=0.0)
        scores = tl.dot(query, tl.trans(block), input_precision=PRECISION) * scale  # [ROWS, N]
        scores = _capped(scores, softcap, HAS_SOFTCAP)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, axis=1))
        faded = tl.exp(peak - higher)
        shares = tl.exp(scores - higher[:, None])
        total = total * faded + tl.sum(shares, axis=1)
        block = tl.load(
            values + place[:, None] * DV + value_column[None, :], mask=seen[:, None] & in_dv[None, :], other=0.0
        )
        weighted = weighted * faded[:, None] + tl.dot(shares.to(block.dtype), block, input_precision=PRECISION)
        peak = higher

    inside = in_group[:, None] & in_dv[None, :]
    if SPLITS == 1:
        if HAS_SINKS:
            total, weighted = _with_sinks(peak, total, weighted, sinks, head * GROUP + group, in_group)
        result = weighted / total[:, None]
        tl.store(out + row[:, None] * DV + value_column[None, :], result.to(out.dtype.element_ty), mask=inside)
    else:
        part = row * SPLITS + split
        tl.store(peaks + part, peak, mask=in_group)
        tl.store(totals + part, total, mask=in_group)
        tl.store(parts + part[:, None] * DV + value_column[None, :], weighted, mask=inside)


@triton.jit
def _join_kernel(
    peaks, totals, parts, sinks, out,
    HEADS: tl.constexpr, DV: tl.constexpr, DV_PADDED: tl.constexpr, SPLITS: tl.constexpr, PADDED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Combine the partial results of attention over the splits (ranges of cached keys) of a response.

    There is one program for each response and query head. `HEADS`: the number of query heads.
    """
    row = tl.program_id(0) * HEADS + tl.program_id(1)
    split, column = tl.arange(0, PADDED), tl.arange(0, DV_PADDED)
    peak = tl.load(peaks + row * SPLITS + split, mask=split < SPLITS, other=float("-inf"))
    used = peak > float("-inf")  # an unused split has stored only this -inf
    highest = tl.max(peak, axis=0)
    if HAS_SINKS:
        sink = tl.load(sinks + tl.program_id(1)).to(tl.float32)
        highest = tl.maximum(highest, sink)
    faded = tl.exp(peak - highest)
    total = tl.sum(tl.load(totals + row * SPLITS + split, mask=used, other=0.0) * faded, axis=0)
    if HAS_SINKS:
        total += tl.exp(sink - highest)
    part = tl.load(
        parts + (row * SPLITS + split)[:, None] * DV + column[None, :],
        mask=used[:, None] & (column < DV)[None, :],
        other=0.0,
    )
    result = tl.sum(part * faded[:, None], axis=0) / total
    tl.store(out + row * DV + column, result.to(out.dtype.element_ty), mask=column < DV)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    sinks: Tensor | None,
    scale: float,
    window: int | None,
    softcap: float | None,
    longest: int,
    *,
    span: int | None = None,
) -> Tensor:
    """Return the attention output [L, H, dv], and store k and v in the cache. Arguments: see `decode_attention`.

    `span`: the number of cached keys that one Triton program handles, a multiple of `BLOCK`. None: `SPAN`, or half of
    it if there are few programs.
    """
    num_slots, num_heads, size = q.shape
    heads, value_size = v.shape[1], v.shape[2]
    assert slots.stride(1) == 1
    assert keys.is_contiguous()
    assert values.is_contiguous()
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    # With few programs, shorter spans let more programs run at the same time.
    span = span or (SPAN if num_slots * heads >= FEW_PROGRAMS else SPAN // 2)
    splits = max(1, triton.cdiv(longest if window is None else min(longest, window), span))
    out = q.new_empty(num_slots, num_heads, value_size)
    many = num_slots * num_heads * splits if splits > 1 else 0
    peaks, totals = (torch.empty(many, dtype=torch.float32, device=q.device) for _ in range(2))
    parts = torch.empty(many * value_size, dtype=torch.float32, device=q.device)
    block_bytes = BLOCK * (_padded(size) + _padded(value_size)) * q.element_size()
    block = BLOCK if block_bytes <= SHARED_MEMORY else BLOCK // 2
    padded = {"D_PADDED": _padded(size), "DV": value_size, "DV_PADDED": _padded(value_size)}
    _attend_kernel[(num_slots, heads, splits)](
        q, k, v, keys, values, slots, sinks, out, peaks, totals, parts,
        slots.stride(0), window or 0, span, scale, softcap or 1.0,
        HEADS=heads, GROUP=num_heads // heads, ROWS=_padded(num_heads // heads), D=size, **padded, N=block,
        SPLITS=splits, HAS_WINDOW=window is not None, HAS_SOFTCAP=softcap is not None, HAS_SINKS=sinks is not None,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", num_warps=4,
        num_stages=max(1, min(3, SHARED_MEMORY // block_bytes)),
    )  # fmt: skip
    if splits > 1:
        _join_kernel[(num_slots, num_heads)](
            peaks, totals, parts, sinks, out,
            HEADS=num_heads, DV=value_size, DV_PADDED=padded["DV_PADDED"], SPLITS=splits,
            PADDED=triton.next_power_of_2(splits), HAS_SINKS=sinks is not None, num_warps=2,
        )  # fmt: skip
    return out


def _padded(size: int) -> int:
    """Round up to a size that `tl.dot` accepts: a power of two, at least 16."""
    return max(16, int(triton.next_power_of_2(size)))
