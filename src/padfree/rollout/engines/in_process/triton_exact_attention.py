# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="assignment, var-annotated", no-warn-unreachable
"""Decode attention as a Triton kernel whose output is bitwise equal to that of flash-attn-4 on a Hopper GPU.

A program handles one key head of one response, with all query heads of this key head. It computes an online softmax
over blocks of 128 keys, from the last block to the first.

To get the same bits, the kernel repeats the arithmetic of flash-attn-4 (`softmax.py` and `flash_fwd_sm90.py` of that
package). The rounding, the approximate reciprocal and the order of the sums are the same.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from padfree.rollout.engines.in_process.sampled_tokens import ACTIVE, OWN, PROMPT, STORED, WRITTEN

_PROMPT, _STORED, _OWN, _WRITTEN, _ACTIVE = (tl.constexpr(row) for row in (PROMPT, STORED, OWN, WRITTEN, ACTIVE))

BLOCK = 128
"""Number of keys in a block. After each block, the largest score so far (`peak`) is updated."""

_BLOCK = tl.constexpr(BLOCK)


def is_interpreted() -> bool:
    """Return whether this Triton kernel is interpreted (TRITON_INTERPRET=1 when this module was imported)."""
    return not isinstance(_attend_kernel, triton.JITFunction)


@triton.jit
def _approximately(instruction: tl.constexpr, x):
    return tl.inline_asm_elementwise(instruction, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _exp2(x, INTERPRETED: tl.constexpr):
    return tl.exp2(x) if INTERPRETED else _approximately("ex2.approx.ftz.f32 $0, $1;", x)


@triton.jit
def _reciprocal(x, INTERPRETED: tl.constexpr):
    return 1.0 / x if INTERPRETED else _approximately("rcp.approx.ftz.f32 $0, $1;", x)


@triton.jit
def _halves(x, ROWS: tl.constexpr, N: tl.constexpr):
    """Divide x [ROWS, 4, N] into the first and the second half of its last dimension."""
    return tl.split(tl.permute(tl.reshape(x, (ROWS, 4, 2, N // 2)), (0, 1, 3, 2)))


@triton.jit
def _add2(total, x, ROWS: tl.constexpr):
    first, second = tl.split(x)
    return (total + first) + second


@triton.jit
def _add4(total, x, ROWS: tl.constexpr):
    first, second = _halves(x, ROWS, 4)
    return _add2(_add2(total, first, ROWS), second, ROWS)


@triton.jit
def _add8(total, x, ROWS: tl.constexpr):
    first, second = _halves(x, ROWS, 8)
    return _add4(_add4(total, first, ROWS), second, ROWS)


@triton.jit
def _add16(total, x, ROWS: tl.constexpr):
    first, second = _halves(x, ROWS, 16)
    return _add8(_add8(total, first, ROWS), second, ROWS)


@triton.jit
def _add_in_order(total, shares, ROWS: tl.constexpr):
    """Add exponentials of scores, [ROWS, 128], to four sums per row, [ROWS, 4], with the rounding of flash-attn-4.

    The exponential of key c is added to sum c // 2 % 4, in the order of the keys. Each sum belongs to one thread in
    flash-attn-4.
    """
    x = tl.permute(tl.reshape(shares, (ROWS, 16, 4, 2)), (0, 2, 1, 3))
    first, second = _halves(tl.reshape(x, (ROWS, 4, 32)), ROWS, 32)
    return _add16(_add16(total, first, ROWS), second, ROWS)


@triton.jit
def _attend_kernel(
    q, k, v, keys, values, slots, out, slot_stride, window, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, HAS_WINDOW: tl.constexpr,
    INTERPRETED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    slot, head = tl.program_id(0), tl.program_id(1)
    active = tl.load(slots + _ACTIVE * slot_stride + slot) != 0
    prompt = tl.load(slots + _PROMPT * slot_stride + slot)
    own = tl.load(slots + _OWN * slot_stride + slot)
    stored = tl.where(active, tl.load(slots + _STORED * slot_stride + slot), 0).to(tl.int32)
    written = tl.where(active, tl.load(slots + _WRITTEN * slot_stride + slot), 0).to(tl.int32)
    new = stored + written  # number of the new key
    readable = tl.where(active, new, -1)  # number of the last key that may be read: an inactive slot has none
    start = tl.maximum(new + 1 - window, 0) if HAS_WINDOW else new * 0

    group, column = tl.arange(0, ROWS), tl.arange(0, D)
    row = slot * HEADS * GROUP + head * GROUP + group
    inside = (group < GROUP)[:, None]
    query = tl.load(q + row[:, None] * D + column[None, :], mask=inside, other=0.0)
    source, place = (slot * HEADS + head) * D + column, ((own + written) * HEADS + head) * D + column
    tl.store(keys + place, tl.load(k + source), mask=column < tl.where(active, D, 0))
    tl.store(values + place, tl.load(v + source), mask=column < tl.where(active, D, 0))
    tl.debug_barrier()  # other threads of this program read the new key and value

    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS, 4), tl.float32)
    weighted = tl.zeros((ROWS, D), tl.float32)
    last = new // _BLOCK
    for step in tl.range(0, last + 1 - start // _BLOCK, num_stages=STAGES):
        number = (last - step) * _BLOCK + tl.arange(0, _BLOCK)
        seen = (number >= start) & (number <= new)
        index = tl.where(number < stored, prompt + number, own + number - stored) * HEADS + head
        at = index[:, None] * D + column[None, :]
        read = ((number >= start) & (number <= readable))[:, None]
        scores = tl.dot(query, tl.trans(tl.load(keys + at, mask=read, other=0.0)))
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, axis=1))
        faded = _exp2((peak - higher) * scale, INTERPRETED)
        # As in flash-attn-4, the fma does not round the product score · scale.
        shares = _exp2(tl.fma(scores, tl.zeros_like(scores) + scale, -(higher * scale)[:, None]), INTERPRETED)
        total = _add_in_order(total * faded[:, None], shares, ROWS)
        block = tl.load(values + at, mask=read, other=0.0)
        # As in flash-attn-4, the shares are rounded to bfloat16.
        weighted = tl.dot(shares.to(block.dtype), block, weighted * faded[:, None])
        peak = higher

    even, odd = tl.split(tl.reshape(total, (ROWS, 2, 2)))
    first, second = tl.split(even + odd)
    result = weighted * _reciprocal(first + second, INTERPRETED)[:, None]
    tl.store(out + row[:, None] * D + column[None, :], result.to(out.dtype.element_ty), mask=inside)


def attend(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor, scale: float, window: int | None
) -> Tensor:
    """Return the attention output [L, H, d], and store k and v in the cache. Arguments: see `decode_attention`.

    The head size d is a power of two, and the same for keys and values.
    """
    num_slots, num_heads, size = q.shape
    heads = k.shape[1]
    assert slots.stride(1) == 1
    assert keys.is_contiguous()
    assert values.is_contiguous()
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    out = torch.empty_like(q)
    # The kernel uses exp2, so its scale is scale · log2(e). ROWS is at least 16 because of tl.dot.
    _attend_kernel[(num_slots, heads)](
        q, k, v, keys, values, slots, out, slots.stride(0), window or 0,
        float(np.float32(scale) * np.float32(math.log2(math.e))),
        HEADS=heads, GROUP=num_heads // heads, ROWS=max(16, triton.next_power_of_2(num_heads // heads)), D=size,
        HAS_WINDOW=window is not None, INTERPRETED=is_interpreted(), STAGES=2, num_warps=4,
    )  # fmt: skip
    return out
