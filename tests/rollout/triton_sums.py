# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""A Triton kernel that only adds the shares of one block, as `triton_exact_attention` does."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from padfree.rollout.engines.in_process.triton_exact_attention import _add_in_order


@triton.jit
def _sums_kernel(before, shares, out, ROWS: tl.constexpr):
    row = tl.arange(0, ROWS)[:, None]
    place = row * 4 + tl.arange(0, 4)[None, :]
    added = tl.load(shares + row * 128 + tl.arange(0, 128)[None, :])
    tl.store(out + place, _add_in_order(tl.load(before + place), added, ROWS))


def sums_in_order(before: Tensor, shares: Tensor) -> Tensor:
    """Add shares [R, 128] to four sums [R, 4] per row."""
    out = torch.empty_like(before)
    _sums_kernel[(1,)](before, shares, out, ROWS=len(shares))
    return out
