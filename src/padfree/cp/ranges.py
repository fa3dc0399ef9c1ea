"""Select ranges of tokens (forward), and sum the gradients of tokens that are in several ranges (backward).

In this example, `take` selects the ranges [0, 3) and [0, 5) of the tokens a to e. `summed` adds the gradients p to w of
the eight selected tokens:

    take      a b c d e          ->  a b c a b c d e
    summed    p q r s t u v w    ->  p+s q+t r+u v w

Ranges overlap if a rank holds two parts of one document. Gradients are added in a fixed order, so the sums are
deterministic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from padfree.arrays import concatenated_ranges
from padfree.attention.copies import copies_to_device, sum_copies
from padfree.batch import Copies
from padfree.segments import Segments

Indices = NDArray[np.int64]


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Copy a host array to the device without synchronising with the device."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def segments_of(lengths: Indices, device: torch.device) -> Segments:
    """Return `Segments` with the given lengths, and with cu_seqlens on `device`."""
    host = Segments.from_lengths(lengths)
    return replace(host, cu_seqlens=to_device(host.cu_seqlens.numpy(), device))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Selection:
    """A selection of m of the n tokens of a tensor, in any order and with repetitions: [n, ...] -> [m, ...].

    The tensor may be given in parts. If the first part has 3 tokens, token 3 is the first token of the second part.
    """

    sizes: tuple[int, ...]  # [n_i]
    ranges: tuple[tuple[int, int, int], ...]  # the selected ranges: (part, start in the part, length)
    copies: tuple[tuple[int, int, int], ...]  # one occurrence of each token: (token, index in the selection, length)
    repeats: tuple[tuple[Tensor, Tensor], ...]  # the other occurrences, in layers of (indices in the selection, tokens)
    sums: Copies | None = None  # all occurrences of each token, used instead of several layers

    @property
    def is_everything(self) -> bool:
        """Return whether all n tokens are in the first part (input tensor), and are selected once and in order."""
        return self.ranges == ((0, 0, sum(self.sizes)),)

    def take(self, *parts: Tensor) -> Tensor:
        """Gather the selected tokens: [n, ...] -> [m, ...]. The result is a view if the selection is one range."""
        assert tuple(len(part) for part in parts) == self.sizes, (self.sizes, [tuple(part.shape) for part in parts])
        slices = [parts[part].narrow(0, start, length) for part, start, length in self.ranges]
        if len(slices) == 1:
            return slices[0]
        return torch.cat(slices) if slices else parts[0][:0]

    def summed(self, gradient: Tensor) -> Tensor:
        """Turn the gradient [m, ...] of the selected tokens into the gradient [n, ...] of the tensor.

        Every token of the tensor must be selected at least once.
        """
        self._check_all_selected()
        if self.sums is not None:
            return sum_copies(gradient.contiguous(), self.sums.index, self.sums.copy_index, self.sums.offsets)
        slices = [gradient.narrow(0, place, length) for _, place, length in self.copies]
        total = torch.cat(slices) if slices else gradient[:0]
        for places, tokens in self.repeats:
            total.index_add_(0, tokens, gradient.index_select(0, places))
        return total

    def summed_apart(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradient that `summed` returns, split after the first part (input tensor).

        May overwrite `gradient` [m, ...], and the results may be views of `gradient`.
        """
        self._check_all_selected()
        own, others = self.sizes[0], sum(self.sizes[1:])
        repeated = bool(self.repeats) or self.sums is not None
        places = [] if repeated else self._others_first()
        low, high = 0, len(gradient)
        while places and places[0][0] == low:
            low += places.pop(0)[1]
        while places and sum(places[-1]) == high:
            high -= places.pop()[1]
        if repeated or 2 * (high - low) > len(gradient) or not gradient.is_contiguous():
            total = self.summed(gradient)
            return total[:own], total[own:]
        if places:
            moved = torch.cat([gradient.narrow(0, *place) for place in places])
            gradient.narrow(0, low, high - low).copy_(moved)
        return gradient[others:], gradient[:others]

    def _check_all_selected(self) -> None:
        assert sum(length for *_, length in self.copies) == sum(self.sizes), "some tokens are not selected"

    def _others_first(self) -> list[tuple[int, int]]:
        """Return ranges (first index in the selection, length) of the selected tokens, each token once.

        Tokens of the first input tensor come after the tokens of all others.
        """
        own: list[tuple[int, int]] = []
        others: list[tuple[int, int]] = []
        for token, place, length in self.copies:
            mine = min(max(self.sizes[0] - token, 0), length)
            own += [(place, mine)] * (mine > 0)
            others += [(place + mine, length - mine)] * (length > mine)
        return others + own

    def add_to(self, total: Tensor, gradient: Tensor) -> Tensor:
        """Add a gradient [m, ...] of the m selected entries to `total`, the gradient [n, ...] of all n entries.

        `total` is changed in place and returned.
        """
        if self.sums is not None:
            gradient = gradient.to(total.dtype).contiguous()
            return total.add_(sum_copies(gradient, self.sums.index, self.sums.copy_index, self.sums.offsets))
        for token, place, length in self.copies:
            total.narrow(0, token, length).add_(gradient.narrow(0, place, length))
        for places, tokens in self.repeats:
            total.index_add_(0, tokens, gradient.index_select(0, places).to(total.dtype))
        return total


def select_ranges(starts: Indices, ends: Indices, sizes: Sequence[int], device: torch.device) -> Selection:
    """Return the `Selection` of the token ranges [starts, ends) from parts (tensors) with `sizes` tokens each.

    Tokens are numbered through all parts, and no range crosses the boundary between two parts.
    """
    starts, ends = starts[ends > starts], ends[ends > starts]
    borders = np.cumsum(sizes, dtype=np.int64)
    joins = (starts[1:] == ends[:-1]) & ~np.isin(starts[1:], borders)
    starts, ends = starts[np.append(True, ~joins)[: len(starts)]], ends[np.append(~joins, True)[: len(ends)]]
    part = np.searchsorted(borders, starts, side="right")
    ranges = zip(part.tolist(), (starts - np.append(0, borders)[part]).tolist(), (ends - starts).tolist(), strict=True)

    # Cut the tokens into stretches at the ends of all ranges. All tokens of a stretch are in the same ranges.
    edges = np.unique(np.concatenate([starts, ends]))
    token, length = edges[:-1], np.diff(edges)
    held = (starts[:, None] <= token) & (token < ends[:, None])  # [ranges, stretches]
    later: Indices = np.cumsum(held[::-1], axis=0, dtype=np.int64)[::-1] - held
    offset = np.cumsum(ends - starts) - ends  # [ranges] plus a token's number: its index in the selection

    def stretches(layer: int) -> tuple[Indices, Indices, Indices]:
        """Return the last occurrence of each token in the selection (`layer` 0), the last but one (`layer` 1), etc.

        The result describes ranges of tokens: the first token, the index of this token in the selection, and the
        length.
        """
        stretch, number = np.nonzero((held & (later == layer)).T)
        return token[stretch], token[stretch] + offset[number], length[stretch]

    copies: list[tuple[int, int, int]] = []
    for first, place, count in zip(*(column.tolist() for column in stretches(0)), strict=True):
        if copies and copies[-1][0] + copies[-1][2] == first and copies[-1][1] + copies[-1][2] == place:
            copies[-1] = (*copies[-1][:2], copies[-1][2] + count)
        else:
            copies.append((first, place, count))
    layers = int(later[held].max(initial=0))
    selection = Selection(sizes=tuple(sizes), ranges=tuple(ranges), copies=tuple(copies), repeats=())
    if layers > 1:
        counts = np.zeros(int(borders[-1]) + 1, dtype=np.int64)
        counts[1 + concatenated_ranges(token, length)] = np.repeat(held.sum(axis=0), length)
        read = [
            ((first + np.arange(count))[:, None] + offset[readers][None, :]).ravel()
            for first, count, readers in zip(token.tolist(), length.tolist(), held.T, strict=True)
        ]
        index = concatenated_ranges(starts, ends - starts)
        return replace(selection, sums=copies_to_device(device, index, np.concatenate(read), np.cumsum(counts)))
    repeats: list[tuple[Tensor, Tensor]] = []
    for layer in range(1, layers + 1):
        tokens, places, lengths = stretches(layer)
        repeats.append(
            (
                to_device(concatenated_ranges(places, lengths), device),
                to_device(concatenated_ranges(tokens, lengths), device),
            )
        )
    return replace(selection, repeats=tuple(repeats))
