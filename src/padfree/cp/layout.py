"""The token ranges of a pack that each context rank holds: pure index arithmetic on the host.

    segments    lengths 5 3 5, pad 3  0 0 0 0 0 | 1 1 1 | 2 2 2 2 2 | p p p              the document of each token
    contiguous  4 chunks of 4         0 0 0 0 1   1 1 1   2 2 2 2 3   3 3 3              the rank of each token
    headtail    8 chunks of 2         0 0 1 1 2   2 3 3   3 3 2 2 1   1 0 0              the rank of each token
    balanced    nearly equal costs    most documents are whole, some are divided over ranks (see `balanced_layout`)

The example has T = 16 tokens and `world` = 4 ranks. In this module a document is a segment. A range that crosses a
segment boundary is cut there, so that every range is a *piece*: consecutive queries of one document. The query at
position p of its document reads p + 1 keys, so a piece [a, b) of a document costs b(b+1)/2 - a(a+1)/2 pairs: its causal
*work*. The pad counts as a document, because the kernels compute it too.

If samples share prefixes, a document is a node of the prefix tree. Its queries also read the keys of the node's
ancestors. Positions in the document therefore start at the number of these keys, and the formula for the work holds
with these positions.

A rank holds its pieces in pack order. In `balanced`, however, pieces of divided documents come first, because they read
keys of other ranks. Whole documents follow, the longest first, because kernels process segments in order and the last
ones to start should be short. This order also keeps received and own keys nearly in the order in which the kernel reads
them. The pieces of a document are always adjacent.
"""

from __future__ import annotations

from itertools import pairwise
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from padfree.arrays import need_whole
from padfree.batch import Layout
from padfree.choices import LayoutKind
from padfree.cp.balanced_layout import balanced_pieces, causal_work, tile_cost
from padfree.errors import UserError
from padfree.segments import Segments

Indices = NDArray[np.int64]


def make_layout(segments: Segments, world: int, kind: LayoutKind = "balanced") -> Layout:
    """The layout of a pack of T tokens over `world` ranks. Every rank holds exactly T / world tokens."""
    if not isinstance(segments, Segments):
        raise UserError("segments", f"got a {type(segments).__name__}", "give batch.segments, the segments of a batch")
    num_tokens = segments.num_tokens
    if kind not in get_args(LayoutKind):
        raise UserError("kind", "is unknown", f"choose one of {', '.join(get_args(LayoutKind))}", value=kind)
    need_whole("world", world, 1, "give 1 or more ranks")
    if num_tokens % world:
        raise UserError(
            "segments",
            f"the {num_tokens} tokens of the pack cannot be divided equally over {world} context ranks",
            f"pad the batch with padded_to_multiple({world})",
        )
    offsets = segments.offsets
    if num_tokens == 0 or kind != "balanced":
        ranks, cuts = _chunks(num_tokens // world, world, pairs=kind == "headtail")
        starts = np.union1d(cuts, offsets[:-1][offsets[:-1] < num_tokens])
        owners = ranks[np.searchsorted(cuts, starts, side="right") - 1]
    else:
        starts, owners = balanced_pieces(segments, world)
    return _layout(kind, world, num_tokens, starts, owners, offsets)


def work(layout: Layout, segments: Segments) -> Indices:
    """The causal work of each rank, i.e. the number of (query, key) pairs it computes: an array [world]."""
    return np.array(
        [causal_work(*_positions(layout, segments, rank)).sum() for rank in range(layout.world)], dtype=np.int64
    )


def pieces(layout: Layout) -> Indices:
    """[world] the number of pieces each rank holds."""
    return np.array([len(starts) for starts in layout.starts], dtype=np.int64)


def keys_read(layout: Layout, segments: Segments) -> Indices:
    """The number of keys each rank reads, an array [world]. A piece reads its document up to the end of the piece."""
    return np.array([_positions(layout, segments, rank)[1].sum() for rank in range(layout.world)], dtype=np.int64)


def modelled_cost(layout: Layout, segments: Segments) -> Indices:
    """The work of each rank in the whole tiles that kernels compute, plus the fixed costs of keys: an array [world]."""
    return np.array(
        [tile_cost(*_positions(layout, segments, rank)).sum() for rank in range(layout.world)], dtype=np.int64
    )


def document_index(tokens: Indices, offsets: Indices) -> Indices:
    """The index of the segment that contains each token. `tokens` holds indices in the pack."""
    return np.searchsorted(offsets, tokens, side="right") - 1


def _positions(layout: Layout, segments: Segments, rank: int) -> tuple[Indices, Indices]:
    """For each piece [a, b) of a rank, its bounds a and b as positions in the document."""
    origins = segments.offsets[:-1] - segments.first_positions
    origin = origins[document_index(layout.starts[rank], segments.offsets)]
    return layout.starts[rank] - origin, layout.ends[rank] - origin


def _chunks(share: int, world: int, *, pairs: bool) -> tuple[Indices, Indices]:
    """The rank and the start of each chunk. A rank has one chunk, or two if `pairs` is True.

    The first chunk of a pair may be one token longer than the second.
    """
    ranks = np.arange(world)
    if not pairs:
        return ranks, ranks * share
    sizes = np.repeat([share - share // 2, share // 2], world)
    return np.concatenate([ranks, ranks[::-1]]), np.cumsum(sizes) - sizes


def _layout(
    kind: LayoutKind, world: int, num_tokens: int, starts: Indices, owners: Indices, offsets: Indices
) -> Layout:
    """Make a layout from the pieces that tile the pack: piece i begins at `starts[i]` and belongs to rank `owners[i]`.

    Adjacent pieces of one document and one owner are merged.
    """
    ends = np.append(starts[1:], num_tokens)
    starts, owners = starts[starts < ends], owners[starts < ends]
    document = document_index(starts, offsets)
    first = np.ones(len(starts), dtype=np.bool_)
    first[1:] = (owners[1:] != owners[:-1]) | (document[1:] != document[:-1])
    starts, owners, document = starts[first], owners[first], document[first]
    ends = np.append(starts[1:], num_tokens)[: len(starts)]
    sort_keys = owners
    if kind == "balanced":
        sort_keys = _sort_keys(owners, document, starts - offsets[document], ends - offsets[document])
    order = np.argsort(sort_keys, kind="stable")
    splits = np.searchsorted(owners[order], np.arange(world + 1)).tolist()
    starts, ends = starts[order], ends[order]
    return Layout(
        kind=kind,
        world=world,
        num_tokens=num_tokens,
        starts=tuple(starts[a:b] for a, b in pairwise(splits)),
        ends=tuple(ends[a:b] for a, b in pairwise(splits)),
    )


def _sort_keys(owners: Indices, document: Indices, first: Indices, end: Indices) -> Indices:
    """Return a number for each piece, by which the pieces of the layout `balanced` are sorted.

    Pieces are sorted by owner. For one owner, the pieces of divided documents come before whole documents. Among
    divided documents, and among whole documents, the pieces with the largest `end` come first. All pieces that an owner
    has of one document are sorted by the `end` of the last of them, so that they stay adjacent. `first` and `end` are
    positions in the document.
    """
    number = owners * (document.max(initial=0) + 1) + document  # a number for each (owner, document) pair
    cut, furthest = np.zeros((2, number.max(initial=0) + 1), dtype=np.int64)
    cut[number[first > 0]] = 1
    furthest[number] = end  # the last piece of the pair is assigned last
    ranked: Indices = (2 * owners + 1 - cut[number] << 32) - furthest[number]
    return ranked
