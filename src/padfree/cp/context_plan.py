"""What one context rank must know of a micro-batch, prepared once on the host and copied to the device.

    row          0 0 0 0 0 | 1 1 1 | 2 2 2 2 2 | p p p        the tokens of the micro-batch, T
    own          the rows of this rank, piece by piece        its tokens are held in this order, T/world
    rank order   rank 0's rows, then rank 1's, ...            what an all-gather of everybody's tokens gives
    pieces       ranges of `own`, one document each           its query segments; those of a document side by side

A context-parallel layout is a permutation of the token axis, nothing more: `to_row_order` and `to_rank_order` apply it.
What a method needs beyond that (which keys each piece reads, who sends them) is prepared on first use and kept here for
the other layers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from padfree.batch import Layout, Segments
from padfree.cp.layout import document_index
from padfree.cp.rows import concatenated, segments_of, to_device

Prepared = TypeVar("Prepared")


class Pieces:
    """All pieces of a layout as arrays [P], rank 0's first: whose they are and where they lie."""

    def __init__(self, layout: Layout, segments: Segments) -> None:
        self.world, self.share = layout.world, layout.num_tokens // layout.world
        self.counts = np.array([len(starts) for starts in layout.starts])
        self.rank = np.repeat(np.arange(layout.world), self.counts)
        self.start = np.concatenate(layout.starts)
        self.end = np.concatenate(layout.ends)
        self.length = self.end - self.start
        self.place = self.length.cumsum() - self.length  # in rank order
        self.by_row = np.argsort(self.start)  # the pieces tile the row
        self.document = document_index(self.start, segments.offsets)
        self.document_start = segments.offsets[self.document]
        self.document_end = segments.offsets[self.document + 1]

    def of(self, rank: int) -> slice:
        begin = int(self.counts[:rank].sum())
        return slice(begin, begin + int(self.counts[rank]))


class ContextPlan:
    """The preparation of one (layout, segments, rank). Made by `padfree.cp.shard`; layers only read it."""

    def __init__(self, layout: Layout, segments: Segments, rank: int, device: torch.device) -> None:
        self.layout, self.segments, self.rank, self.device = layout, segments, rank, device
        self.pieces = Pieces(layout, segments)
        self.own = to_device(concatenated(layout.starts[rank], layout.ends[rank]), device)  # [T/world]
        self.queries = segments_of(layout.ends[rank] - layout.starts[rank], device)
        self._prepared: dict[Hashable, Any] = {}

    @property
    def world(self) -> int:
        return self.layout.world

    def to_row_order(self, gathered: Tensor) -> Tensor:
        """[T, ...] in rank order -> row order."""
        order = self.prepared("order", self._order)
        return gathered if order is None else gathered.index_select(0, order[1])

    def to_rank_order(self, row: Tensor) -> Tensor:
        """[T, ...] in row order -> rank order."""
        order = self.prepared("order", self._order)
        return row if order is None else row.index_select(0, order[0])

    def _order(self) -> tuple[Tensor, Tensor] | None:
        """[T] the row of each place in rank order, [T] the place of each row; None if they are the same."""
        rows = concatenated(self.pieces.start, self.pieces.end)
        if (rows == np.arange(len(rows))).all():
            return None
        places = np.empty_like(rows)
        places[rows] = np.arange(len(rows))
        return to_device(rows, self.device), to_device(places, self.device)

    def prepared(self, key: Hashable, prepare: Callable[[], Prepared]) -> Prepared:
        """What `prepare()` gives, made once per micro-batch."""
        if key not in self._prepared:
            self._prepared[key] = prepare()
        made: Prepared = self._prepared[key]
        return made
