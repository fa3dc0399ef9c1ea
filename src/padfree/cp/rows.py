"""Selections of rows: some ranges of a tensor one after the other, and the sum that is their transpose.

    runs [0, 3) [0, 5)   of 5 rows      take     a b c d e        ->  a b c a b c d e
                                        summed   p q r s t u v w  ->  p+s q+t r+u v w

A query piece reads the keys of its document from its beginning, so two pieces of one document on one rank read the same
rows, and the gradients of these must be added. The order of the additions is fixed here, so that the sum is the same
every time: each row is copied from one place of the selection, and what repeats it is added layer by layer, no layer
holding a row twice. Nearly always there is one layer or none.

Runs are few (whole documents that lie side by side are one), so that slices and one concatenation move them, at the
speed of the memory; a selection that is a single run is not copied at all. Gradients are moved even less: where the
selection is what was received, then own rows, but for a few, only these few are (`summed_apart`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from padfree.batch import Segments

Indices = NDArray[np.int64]


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """A host array on the device, without waiting for it."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def segments_of(lengths: Indices, device: torch.device) -> Segments:
    """Segments of these lengths, cu_seqlens on the device."""
    host = Segments.from_lengths(lengths)
    return replace(host, cu_seqlens=to_device(host.cu_seqlens.numpy(), device))


def concatenated(starts: Indices, ends: Indices) -> Indices:
    """The numbers of the ranges, one range after the other: [2, 5) [0, 2) -> 2 3 4 0 1."""
    lengths = ends - starts
    total = int(lengths.sum())
    return np.repeat(starts - (lengths.cumsum() - lengths), lengths) + np.arange(total)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Rows:
    """A selection [m, ...] of the rows of a tensor [n, ...], which may come in several parts [n_i, ...]."""

    sizes: tuple[int, ...]  # [n_i]
    runs: tuple[tuple[int, int, int], ...]  # the selection: (part, start in it, length)
    copies: tuple[tuple[int, int, int], ...]  # each selected row once: (row, place in the selection, length), by row
    repeats: tuple[tuple[Tensor, Tensor], ...]  # the other (places, rows), layer by layer; rows count through the parts

    @property
    def whole(self) -> bool:
        """Whether these are all the rows in order, so that there is nothing to do."""
        return self.runs == ((0, 0, sum(self.sizes)),)

    def take(self, *parts: Tensor) -> Tensor:
        """[n, ...] -> [m, ...]; a view if the selection is one run."""
        assert tuple(len(part) for part in parts) == self.sizes, (self.sizes, [tuple(part.shape) for part in parts])
        slices = [parts[part].narrow(0, start, length) for part, start, length in self.runs]
        if len(slices) == 1:
            return slices[0]
        return torch.cat(slices) if slices else parts[0][:0]

    def summed(self, gradient: Tensor) -> Tensor:
        """[m, ...] -> [n, ...], where every row is selected."""
        self._check_all_selected()
        slices = [gradient.narrow(0, place, length) for _, place, length in self.copies]
        total = torch.cat(slices) if slices else gradient[:0]
        for places, rows in self.repeats:
            total.index_add_(0, rows, gradient.index_select(0, places))
        return total

    def summed_apart(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """`summed`, as the rows of the first part [n_0, ...] and those of the other parts. The gradient is used up.

        Both are views of it where no row is repeated and few are out of place: these are moved, the others stay.
        """
        self._check_all_selected()
        own, others = self.sizes[0], sum(self.sizes[1:])
        places = [] if self.repeats else self._others_first()
        low, high = 0, len(gradient)
        while places and places[0][0] == low:
            low += places.pop(0)[1]
        while places and sum(places[-1]) == high:
            high -= places.pop()[1]
        if self.repeats or 2 * (high - low) > len(gradient) or not gradient.is_contiguous():
            total = self.summed(gradient)
            return total[:own], total[own:]
        if places:
            moved = torch.cat([gradient.narrow(0, *place) for place in places])
            gradient.narrow(0, low, high - low).copy_(moved)
        return gradient[others:], gradient[:others]

    def _check_all_selected(self) -> None:
        assert sum(length for *_, length in self.copies) == sum(self.sizes), "some rows are not selected"

    def _others_first(self) -> list[tuple[int, int]]:
        """(place, length) of all rows, those of the first part behind those of the others."""
        own: list[tuple[int, int]] = []
        others: list[tuple[int, int]] = []
        for row, place, length in self.copies:
            mine = min(max(self.sizes[0] - row, 0), length)
            own += [(place, mine)] * (mine > 0)
            others += [(place + mine, length - mine)] * (length > mine)
        return others + own

    def add_to(self, total: Tensor, gradient: Tensor) -> Tensor:
        """`total` [n, ...] with the gradient [m, ...] of the selection added in place."""
        for row, place, length in self.copies:
            total.narrow(0, row, length).add_(gradient.narrow(0, place, length))
        for places, rows in self.repeats:
            total.index_add_(0, rows, gradient.index_select(0, places).to(total.dtype))
        return total


def select(starts: Indices, ends: Indices, sizes: Sequence[int], device: torch.device) -> Rows:
    """The selection of these ranges of rows, counted through the parts; no range crosses the border of a part.

    Arithmetic on ranges: its cost grows with their number, not with that of the rows.
    """
    starts, ends = starts[ends > starts], ends[ends > starts]
    borders = np.cumsum(sizes, dtype=np.int64)
    joins = (starts[1:] == ends[:-1]) & ~np.isin(starts[1:], borders)
    starts, ends = starts[np.append(True, ~joins)[: len(starts)]], ends[np.append(~joins, True)[: len(ends)]]
    part = np.searchsorted(borders, starts, side="right")
    runs = zip(part.tolist(), (starts - np.append(0, borders)[part]).tolist(), (ends - starts).tolist(), strict=True)

    # Where no range begins or ends rows are alike: which ranges hold them, and how many later ranges do so, too.
    edges = np.unique(np.concatenate([starts, ends]))
    row, length = edges[:-1], np.diff(edges)
    held = (starts[:, None] <= row) & (row < ends[:, None])  # [ranges, stretches]
    later: Indices = np.cumsum(held[::-1], axis=0, dtype=np.int64)[::-1] - held
    offset = np.cumsum(ends - starts) - ends  # from a row to its place in the selection

    def stretches(layer: int) -> tuple[Indices, Indices, Indices]:
        """(row, place, length) of what has this many later places; every row at most once, ascending."""
        stretch, number = np.nonzero((held & (later == layer)).T)
        return row[stretch], row[stretch] + offset[number], length[stretch]

    copies: list[tuple[int, int, int]] = []
    for first, place, count in zip(*(column.tolist() for column in stretches(0)), strict=True):
        if copies and copies[-1][0] + copies[-1][2] == first and copies[-1][1] + copies[-1][2] == place:
            copies[-1] = (*copies[-1][:2], copies[-1][2] + count)
        else:
            copies.append((first, place, count))
    repeats: list[tuple[Tensor, Tensor]] = []
    for layer in range(1, int(later[held].max(initial=0)) + 1):
        rows, places, lengths = stretches(layer)
        repeats.append(
            (
                to_device(concatenated(places, places + lengths), device),
                to_device(concatenated(rows, rows + lengths), device),
            )
        )
    return Rows(sizes=tuple(sizes), runs=tuple(runs), copies=tuple(copies), repeats=tuple(repeats))
