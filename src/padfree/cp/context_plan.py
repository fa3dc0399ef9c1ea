"""What one context-parallel rank needs to know about a micro-batch, computed once on the host.

The T tokens of a pack are divided over `world` ranks. The tokens have two orders, and `ContextPlan` converts between
them:

    pack order    document after document, as in the pack
    rank order    rank 0's tokens, then rank 1's, and so on: the result of an all-gather

`ContextPlan` also caches what the first attention layer computes for all layers, such as which rank sends which keys.
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
    """The P pieces of a layout. A piece is a range of tokens of one document on one rank.

    Arrays [P] hold the rank, the start and the end of each piece. The pieces are sorted by rank.
    """

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
        # The ancestors of each node of a prefix tree, whose keys the queries of the node also see. None without shared
        # prefixes.
        self.ancestors = None if segments.parents is None else [path[:-1] for path in paths(segments.parents)]

    def of(self, rank: int) -> slice:
        begin = int(self.counts[:rank].sum())
        return slice(begin, begin + int(self.counts[rank]))


class ContextPlan:
    """What one context rank needs to know about a pack that is divided over ranks: its tokens, all pieces (ranges of
    tokens of one document on one rank), and cached results.
    """

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
        """Reorder the values [T, ...] of all tokens from rank order (rank 0's tokens first) to pack order."""
        order = self.prepared("order", self._order)
        return gathered if order is None else gathered.index_select(0, order[1])

    def to_rank_order(self, values: Tensor) -> Tensor:
        """Reorder the values [T, ...] of all tokens from pack order to rank order (rank 0's tokens first)."""
        order = self.prepared("order", self._order)
        return values if order is None else values.index_select(0, order[0])

    def _order(self) -> tuple[Tensor, Tensor] | None:
        """Return two index arrays [T], or None if rank order (rank 0's tokens first) equals pack order.

        The first array has the pack index of each token in rank order. The second array is the inverse of the first.
        """
        tokens = concatenated_ranges(self.pieces.start, self.pieces.length)
        if (tokens == np.arange(len(tokens))).all():
            return None
        places = np.empty_like(tokens)
        places[tokens] = np.arange(len(tokens))
        return to_device(tokens, self.device), to_device(places, self.device)

    def prepared(self, key: Hashable, prepare: Callable[[], Prepared]) -> Prepared:
        """Return the result of `prepare()`. It is computed once per micro-batch and cached under `key`."""
        if key not in self._prepared:
            self._prepared[key] = prepare()
        made: Prepared = self._prepared[key]
        return made
