# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Triton kernels that split float32 weights into bfloat16 copies and the remaining bits, and join them again.

`padfree.model.split_weight` describes the format. The kernels use integer arithmetic only, so the results do not depend
on a device's rounding.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BYTES = 128  # of `ties`, which holds one bit per weight, in each instance of a kernel
WARPS = 4


def join(rounded: Tensor, rest: Tensor, ties: Tensor) -> Tensor:
    values = torch.empty(rest.shape, dtype=torch.float32, device=rest.device)
    _join[_grid(ties)](
        rounded.view(torch.int16), rest, ties, values.view(torch.int32), rest.numel(), BYTES=BYTES, num_warps=WARPS
    )
    return values


def split(values: Tensor, rounded: Tensor, rest: Tensor, ties: Tensor) -> None:
    _split[_grid(ties)](
        values.view(torch.int32), rounded.view(torch.int16), rest, ties, rest.numel(), BYTES=BYTES, num_warps=WARPS
    )


def _grid(ties: Tensor) -> tuple[int]:
    return (triton.cdiv(ties.numel(), BYTES),)


@triton.jit
def _join(rounded, rest, ties, values, count, BYTES: tl.constexpr):
    byte = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    place = tl.arange(0, 8)
    index = byte[:, None] * 8 + place[None, :]
    inside = index < count
    tie = tl.load(ties + byte, mask=byte * 8 < count, other=0).to(tl.int32)
    upper = tl.load(rounded + index, mask=inside, other=0).to(tl.int32)
    lower = tl.load(rest + index, mask=inside, other=0).to(tl.int32)
    bits = (upper << 16) + lower + (((tie[:, None] >> place[None, :]) & 1) << 16)
    tl.store(values + index, bits, mask=inside)


@triton.jit
def _split(values, rounded, rest, ties, count, BYTES: tl.constexpr):
    byte = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    place = tl.arange(0, 8)
    index = byte[:, None] * 8 + place[None, :]
    inside = index < count
    bits = tl.load(values + index, mask=inside, other=0)
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    upper = tl.where(is_nan, (bits >> 16) | 0x40, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)
    difference = bits - (upper << 16)
    flags = tl.sum((difference == 0x8000).to(tl.int32) << place[None, :], axis=1)
    tl.store(rounded + index, upper.to(tl.int16), mask=inside)
    tl.store(rest + index, difference.to(tl.int16), mask=inside)
    tl.store(ties + byte, flags.to(tl.uint8), mask=byte * 8 < count)
