"""Run a mixer (a recurrence or convolution) on each segment of a pack separately, so that segments cannot mix.

Segments of the same length form the batch of one call. For example, segments of 5, 3, 5 and 3 tokens need two calls,
with inputs [2, 5, D] and [2, 3, D]. The mixer's forward needs no support for packing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def by_segment(call: Callable[[list[Tensor]], Tensor], values: Sequence[Tensor], lengths: Sequence[int]) -> Tensor:
    """Apply `call` to every segment of a pack, and return the results [t, D] in the order of the tokens.

    `values` are tensors [t, ...] for t tokens. `call` takes a list of tensors [n, L, ...] for n segments of L tokens,
    and returns [n, L, D].
    """
    members: dict[int, list[int]] = {}
    for segment, length in enumerate(lengths):
        if length:
            members.setdefault(length, []).append(segment)
    if not members:
        # Sum the empty values instead of creating new zeros, because backward must run through this call on every rank.
        result = call([value.sum(0, dtype=value.dtype)[None, None] for value in values])
        return (result * 0)[0, :0] + result.sum() * 0
    pieces = [torch.split(value, list(lengths)) for value in values]
    results: list[Tensor | None] = [None] * len(lengths)
    for segments in members.values():
        outcome = call([torch.stack([piece[segment] for segment in segments]) for piece in pieces])
        for segment, result in zip(segments, outcome.unbind(0), strict=True):
            results[segment] = result
    return torch.cat([result for result in results if result is not None])
