"""What one context rank needs to know about a micro-batch, prepared once on the host and copied to the device.

    pack order   0 0 0 0 0 | 1 1 1 | 2 2 2 2 2 | p p p        the tokens of the pack, T
    own          the tokens of this rank, piece by piece      as it holds them, T/world
    rank order   rank 0's tokens, then rank 1's, ...          the result of an all-gather
    pieces       ranges of `own`, one document each           the query segments; those of one document are adjacent

A context-parallel layout is a permutation of the token axis: `to_pack_order` and `to_rank_order` apply it.
Further data that a method needs (which keys each piece reads, which rank sends them) is prepared by the first layer
that uses it and cached here for the other layers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from padfree.arrays import concatenated_ranges
from padfree.batch import Layout
from padfree.cp.layout import document_index
from padfree.cp.ranges import segments_of, to_device
from padfree.prefix_tree import paths
from padfree.segments import Segments

Prepared = TypeVar("Prepared")


class Pieces:
    """All pieces of a layout as arrays [P], rank by rank: their owner and their location."""

    def __init__(self, layout: Layout, segments: Segments) -> None:
        self.world, self.share = layout.world, layout.num_tokens // layout.world
        self.counts = np.array([len(starts) for starts in layout.starts])
        self.rank = np.repeat(np.arange(layout.world), self.counts)
        self.start = np.concatenate(layout.starts)
        self.end = np.concatenate(layout.ends)
        self.length = self.end - self.start
        self.place = self.length.cumsum() - self.length  # start in rank order
        self.in_pack_order = np.argsort(self.start)  # the pieces tile the pack
        self.document = document_index(self.start, segments.offsets)
        self.document_start = segments.offsets[self.document]
        self.document_end = segments.offsets[self.document + 1]
        self.offsets = segments.offsets
        # If documents are nodes of a prefix tree: the ancestors of each node. Its queries also see their keys.
        self.ancestors = None if segments.parents is None else [path[:-1] for path in paths(segments.parents)]

    def of(self, rank: int) -> slice:
        begin = int(self.counts[:rank].sum())
        return slice(begin, begin + int(self.counts[rank]))


class ContextPlan:
    """The precomputed data of one (layout, segments, rank). Made by `padfree.cp.shard`; layers only read it."""

    def __init__(self, layout: Layout, segments: Segments, rank: int, device: torch.device) -> None:
        self.layout, self.segments, self.rank, self.device = layout, segments, rank, device
        self.pieces = Pieces(layout, segments)
        lengths = layout.ends[rank] - layout.starts[rank]
        self.own = to_device(concatenated_ranges(layout.starts[rank], lengths), device)  # [T/world]
        self.queries = segments_of(lengths, device)
        self._prepared: dict[Hashable, Any] = {}

    @property
    def world(self) -> int:
        return self.layout.world

    def to_pack_order(self, gathered: Tensor) -> Tensor:
        """Reorder the tokens of [T, ...] from rank order to pack order."""
        order = self.prepared("order", self._order)
        return gathered if order is None else gathered.index_select(0, order[1])

    def to_rank_order(self, values: Tensor) -> Tensor:
        """Reorder the tokens of [T, ...] from pack order to rank order."""
        order = self.prepared("order", self._order)
        return values if order is None else values.index_select(0, order[0])

    def _order(self) -> tuple[Tensor, Tensor] | None:
        """[T] the token at each index of the rank order, and [T] the rank-order index of each token.

        None if rank order and pack order are equal.
        """
        tokens = concatenated_ranges(self.pieces.start, self.pieces.length)
        if (tokens == np.arange(len(tokens))).all():
            return None
        places = np.empty_like(tokens)
        places[tokens] = np.arange(len(tokens))
        return to_device(tokens, self.device), to_device(places, self.device)

    def prepared(self, key: Hashable, prepare: Callable[[], Prepared]) -> Prepared:
        """The result of `prepare()`, computed once per micro-batch."""
        if key not in self._prepared:
            self._prepared[key] = prepare()
        made: Prepared = self._prepared[key]
        return made
