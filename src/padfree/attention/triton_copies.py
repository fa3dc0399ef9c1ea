# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""A Triton kernel that sums the copies of each element: the backward pass of a gather.

    gradient [m, W], copy_index [m], offsets [n + 1]  ->  out [n, W]
    out[i] = Σ gradient[copy_index[offsets[i]:offsets[i+1]]]

There are m copies of n elements, and each element has W values. The copies are summed in float32, in a fixed order.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _sum_rows(gradient, copy_index, offsets, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    begin = tl.load(offsets + row)
    end = tl.load(offsets + row + 1)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for place in range(begin, end):
        copy = tl.load(copy_index + place)
        total += tl.load(gradient + copy * width + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, total.to(out.dtype.element_ty), mask=inside)


def sum_rows(gradient: Tensor, copy_index: Tensor, offsets: Tensor) -> Tensor:
    """Sum the copies of each element: gradient [m, ...] of the m copies -> [n, ...] of the n elements.

    The indices of the copies of element i are `copy_index[offsets[i]:offsets[i+1]]`.
    """
    gradient = gradient.contiguous()
    count = len(offsets) - 1
    out = gradient.new_empty(count, *gradient.shape[1:])
    if out.numel():
        width = out.numel() // count
        block = min(BLOCK, triton.next_power_of_2(width))
        _sum_rows[(count, triton.cdiv(width, block))](gradient, copy_index, offsets, out, width, BLOCK=block)
    return out
