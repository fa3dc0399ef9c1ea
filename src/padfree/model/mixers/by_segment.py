"""A mixer's own module on each segment by itself: the definition of right.

    row        | 5 tokens | 3 | 5 | 3 | pad of 2 |             [1, T, D]
    calls      [2, 5, D]  and  [2, 3, D]                        segments of one length are the rows of one call
    row        | 5 tokens | 3 | 5 | 3 | zeros    |             the results in their places

A module that keeps the rows of its batch apart keeps the segments apart. Nothing else is asked of it: no kernel, no
package, no knowledge of packed rows. The pad is not computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def by_segment(call: Callable[[list[Tensor]], Tensor], values: Sequence[Tensor], lengths: Sequence[int]) -> Tensor:
    """`call` takes the `values` of n segments of L tokens, [n, L, ...] each, and gives [n, L, D'].

    `values` are [t, ...] with t = sum(lengths); the result is [t, D']. Without any token the call is made with one
    token of zeros, and its result counts nothing: all ranks of a sharded model must reach the same parameters.
    """
    members: dict[int, list[int]] = {}
    for segment, length in enumerate(lengths):
        if length:
            members.setdefault(length, []).append(segment)
    if not members:
        # Sums of nothing, not zeros from nowhere: the backward pass must come by here on every rank.
        result = call([value.sum(0, dtype=value.dtype)[None, None] for value in values])
        return (result * 0)[0, :0] + result.sum() * 0
    pieces = [torch.split(value, list(lengths)) for value in values]
    results: list[Tensor | None] = [None] * len(lengths)
    for segments in members.values():
        outcome = call([torch.stack([piece[segment] for segment in segments]) for piece in pieces])
        for segment, rows in zip(segments, outcome.unbind(0), strict=True):
            results[segment] = rows
    return torch.cat([rows for rows in results if rows is not None])
