"""The tokens of a pack that each context-parallel rank holds: pure index arithmetic on the host.

In this example, 4 ranks divide a pack of 16 tokens: three documents (segments of the pack) and 3 padding tokens, p.

    document      0 0 0 0 0 1 1 1 2 2 2 2 2 p p p    the document of each token
    contiguous    0 0 0 0 1 1 1 1 2 2 2 2 3 3 3 3    the rank of each token: one chunk per rank
    headtail      0 0 1 1 2 2 3 3 3 3 2 2 1 1 0 0    the rank of each token: two chunks per rank

The layout `balanced` gives all ranks nearly the same attention cost (see `balanced_layout`). The padding tokens count
as a document, because kernels compute them too.
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
    """Divide a pack of T tokens over `world` ranks. In the layout, every rank holds exactly T / world tokens."""
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
    """Return the number of (query, key) pairs that each rank computes: an array [world]."""
    return np.array(
        [causal_work(*_positions(layout, segments, rank)).sum() for rank in range(layout.world)], dtype=np.int64
    )


def pieces(layout: Layout) -> Indices:
    """Return the number of pieces (ranges of tokens of one document) that each rank holds: an array [world]."""
    return np.array([len(starts) for starts in layout.starts], dtype=np.int64)


def keys_read(layout: Layout, segments: Segments) -> Indices:
    """Return the number of keys that each rank reads: an array [world].

    If two pieces (ranges of one document) of a rank read the same key, the key counts twice.
    """
    return np.array([_positions(layout, segments, rank)[1].sum() for rank in range(layout.world)], dtype=np.int64)


def modelled_cost(layout: Layout, segments: Segments) -> Indices:
    """Return the modelled cost of attention on each rank (see `tile_cost`), as an array [world]."""
    return np.array(
        [tile_cost(*_positions(layout, segments, rank)).sum() for rank in range(layout.world)], dtype=np.int64
    )


def document_index(tokens: Indices, offsets: Indices) -> Indices:
    """Return the index of the document (segment) that holds each token. `tokens` are indices in the pack."""
    return np.searchsorted(offsets, tokens, side="right") - 1


def _positions(layout: Layout, segments: Segments, rank: int) -> tuple[Indices, Indices]:
    """Return the bounds [a, b) of each piece (range of a document) of rank `rank`, as positions in the document."""
    # In a prefix tree, the positions of a node start after the tokens of its ancestors.
    origins = segments.offsets[:-1] - segments.first_positions
    origin = origins[document_index(layout.starts[rank], segments.offsets)]
    return layout.starts[rank] - origin, layout.ends[rank] - origin


def _chunks(share: int, world: int, *, pairs: bool) -> tuple[Indices, Indices]:
    """Return the rank and the start of each chunk of tokens, in pack order.

    Each rank has `share` tokens: in two chunks if `pairs` is True (layout `headtail`), otherwise in one (`contiguous`).
    """
    ranks = np.arange(world)
    if not pairs:
        return ranks, ranks * share
    sizes = np.repeat([share - share // 2, share // 2], world)
    return np.concatenate([ranks, ranks[::-1]]), np.cumsum(sizes) - sizes


def _layout(
    kind: LayoutKind, world: int, num_tokens: int, starts: Indices, owners: Indices, offsets: Indices
) -> Layout:
    """Make a layout from pieces (ranges of documents). Piece i begins at `starts[i]`, and rank `owners[i]` holds it."""
    ends = np.append(starts[1:], num_tokens)
    starts, owners = starts[starts < ends], owners[starts < ends]
    document = document_index(starts, offsets)
    first = np.ones(len(starts), dtype=np.bool_)
    first[1:] = (owners[1:] != owners[:-1]) | (document[1:] != document[:-1])
    starts, owners, document = starts[first], owners[first], document[first]
    ends = np.append(starts[1:], num_tokens)[: len(starts)]
    sort_keys = owners
    if kind == "balanced":  # kernels process segments in order, and the last segments should be short
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
    """Return the sort key of each piece (the positions [first, end) of a document) in the layout `balanced`.

    Pieces are sorted by rank. On each rank, documents with a piece that begins after position 0 come first. Ties are
    sorted by the end of the document's last piece, largest first.
    """
    number = owners * (document.max(initial=0) + 1) + document  # a number for each (owner, document) pair
    cut, furthest = np.zeros((2, number.max(initial=0) + 1), dtype=np.int64)
    cut[number[first > 0]] = 1
    furthest[number] = end  # the last piece of the pair is assigned last
    ranked: Indices = (2 * owners + 1 - cut[number] << 32) - furthest[number]
    return ranked
