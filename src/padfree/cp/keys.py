"""Which keys each rank reads, and which ranks own these keys: pure index arithmetic.

A piece is a range of positions [a, b) of a document on one rank. With causal attention, a piece reads the keys [0, b)
of the document. With a window of W, it reads the keys from a - W + 1 on. If samples share prefixes, a piece also reads
the keys of its node's ancestors in the prefix tree.

The pool of a rank is its own keys, then the received keys. A rank receives each key once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from padfree.arrays import concatenated_ranges
from padfree.cp.context_plan import ContextPlan, Pieces
from padfree.cp.ranges import Indices, Selection, segments_of, select_ranges, to_device
from padfree.prefix_tree import PathRanges
from padfree.segments import Segments


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KeyPlan:
    """The keys that the queries of one context rank see, and the keys that the rank sends and receives."""

    # the ranges of the pool, (starts, ends) in the pack: the rank's own, then those received from rank 0, rank 1, ...
    pool: tuple[Indices, Indices]
    selection: Selection  # selects from own and received keys the keys of the pieces, piece by piece
    segments: Segments  # the segments of the selected keys, one per piece
    quiet: bool  # True if no rank needs keys of another rank, so that nothing is sent
    send: tuple[int, ...]  # [world] number of keys sent to each rank
    receive: tuple[int, ...]  # [world] number of keys received from each rank
    leaving: tuple[tuple[tuple[int, int], ...], ...]  # [world] own keys sent to each rank: ranges (start, length)
    read_elsewhere: Tensor  # indices of own keys that other ranks also read, and send a part of the gradient for
    returning: tuple[Tensor, ...]  # [world] indices into `read_elsewhere` of the gradients received from each rank

    @property
    def pool_tokens(self) -> Tensor:
        """Return the pack indices [N] of the keys that this rank owns or receives. With them, one process can simulate
        a rank.
        """
        starts, ends = self.pool
        return to_device(concatenated_ranges(starts, ends - starts), self.read_elsewhere.device)


def prepare_keys(plan: ContextPlan, *, causal: bool = True, window: int | None = None, key_block: int = 1) -> KeyPlan:
    """Return the plan of which keys this rank sends, receives and reads. The plan is computed once per micro-batch.

    `key_block` is the number of keys in a block of the attention kernel (see `AttentionBackend`).
    """
    if window is None:
        key_block = 1  # all keys from the first on are read
    return plan.prepared(("keys", causal, window, key_block), lambda: _key_plan(plan, causal, window, key_block))


def key_traffic(pieces: Pieces, *, causal: bool = True, window: int | None = None) -> Indices:
    """Return an array [world, world]: element (i, j) is the number of keys that rank i receives from rank j."""
    needs = _needs(pieces, _key_ranges(pieces, causal, window))
    moved = np.zeros((pieces.world, pieces.world), dtype=np.int64)
    np.add.at(moved, (needs.reader, needs.owner), needs.end - needs.begin)
    return moved


def _key_plan(plan: ContextPlan, causal: bool, window: int | None, key_block: int) -> KeyPlan:
    pieces, rank, world, device = plan.pieces, plan.rank, plan.world, plan.device
    share, mine = pieces.share, pieces.of(plan.rank)
    ranges = _key_ranges(pieces, causal, window, key_block)
    needs = _needs(pieces, ranges)
    received = needs.of(needs.reader == rank, sort="owner")
    sent = needs.of(needs.owner == rank, sort="reader")

    own_ranges = (mine.start <= ranges.number) & (ranges.number < mine.stop)
    piece, begins, ends = _cut(pieces, ranges.begin[own_ranges], ranges.end[own_ranges])[1:]
    own = pieces.rank[piece] == rank
    number = pieces.place[piece] + begins - pieces.start[piece] - rank * share  # index in the pool, for own keys
    number[~own] = share + received.position(begins[~own])
    receive = np.bincount(received.owner, received.length, minlength=world).astype(np.int64).tolist()
    send = np.bincount(sent.reader, sent.length, minlength=world).astype(np.int64).tolist()

    first = sent.place - rank * share
    sent_keys = concatenated_ranges(first, sent.length)
    elsewhere = np.zeros(share, dtype=np.bool_)
    elsewhere[sent_keys] = True
    return KeyPlan(
        pool=(
            np.concatenate([pieces.start[mine], received.begin]),
            np.concatenate([pieces.end[mine], received.end]),
        ),
        selection=select_ranges(number, number + ends - begins, (share, *receive), device),
        segments=segments_of(ranges.lengths(len(pieces.start))[mine], device),
        quiet=len(needs.reader) == 0,
        send=tuple(send),
        receive=tuple(receive),
        leaving=tuple(
            tuple(zip(first[chosen].tolist(), sent.length[chosen].tolist(), strict=True))
            for chosen in (sent.reader == other for other in range(world))
        ),
        read_elsewhere=to_device(np.flatnonzero(elsewhere), device),
        returning=tuple(torch.split_with_sizes(to_device((np.cumsum(elsewhere) - 1)[sent_keys], device), send)),
    )


def _key_ranges(pieces: Pieces, causal: bool, window: int | None, key_block: int = 1) -> PathRanges:
    """Return the keys that each piece (range of a document) reads, as ranges of the pack. Keys of ancestors in the
    prefix tree come first.
    """
    every = np.arange(len(pieces.start))
    if not causal:
        return PathRanges(every, pieces.document_start, pieces.document_end)

    def first_visible(position: Indices) -> Indices:
        """Return the position of the first key that a query at `position` reads. Positions count from the start of the
        sample.

        With a window, the result is rounded down to the start of a block of `key_block` keys.
        """
        if window is None:
            return np.zeros_like(position)
        # Blocks count from the start of the sample, as without context parallelism.
        return np.maximum(position - window + 1, 0) // key_block * key_block

    inside = pieces.start - pieces.document_start
    if pieces.ancestors is None:
        return PathRanges(every, pieces.document_start + first_visible(inside), pieces.end)
    lengths = np.diff(pieces.offsets)
    before = np.array([lengths[above].sum() for above in pieces.ancestors], dtype=np.int64)[pieces.document]
    found: list[tuple[int, int, int]] = []
    for number, skipped in enumerate(first_visible(before + inside).tolist()):
        node = int(pieces.document[number])
        for each in (*pieces.ancestors[node], node):
            begin = int(pieces.offsets[each]) + max(skipped, 0)
            end = int(pieces.end[number] if each == node else pieces.offsets[each + 1])
            if begin < end:
                found.append((number, begin, end))
            skipped -= int(lengths[each])
    return PathRanges(*(np.array(column, dtype=np.int64) for column in zip(*found, strict=True)))


def _cut(pieces: Pieces, begin: Indices, end: Indices) -> tuple[Indices, Indices, Indices, Indices]:
    """Cut ranges [begin, end) of keys at the borders of pieces (ranges of tokens on one rank).

    Return four arrays with an element for each part: the index of the cut range, the index of the piece, the begin and
    the end.
    """
    ordered = pieces.in_pack_order
    starts = pieces.start[ordered]
    low = np.searchsorted(starts, begin, side="right") - 1
    high = np.maximum(np.searchsorted(starts, end, side="left"), low)
    number = np.repeat(np.arange(len(begin)), high - low)
    piece = ordered[concatenated_ranges(low, high - low)]
    return number, piece, np.maximum(begin[number], pieces.start[piece]), np.minimum(end[number], pieces.end[piece])


class _Needs(NamedTuple):
    """The keys that ranks need from each other, as n ranges of tokens in the pack. All arrays have the shape [n].

    Rank `reader[i]` needs the keys of the tokens `begin[i]` to `end[i]` (exclusive). Rank `owner[i]` has these keys.
    """

    reader: Indices
    owner: Indices
    begin: Indices
    end: Indices
    place: Indices  # index of the range's first key in rank order

    @property
    def length(self) -> Indices:
        return self.end - self.begin

    def of(self, which: NDArray[np.bool_], *, sort: Literal["reader", "owner"]) -> _Needs:
        """Select the key ranges for which the mask `which` [n] is True, and sort these ranges.

        The ranges are sorted by the rank that needs the keys (`sort="reader"`) or by the rank that has the keys
        (`sort="owner"`), and then by their position in the pack.
        """
        some = _Needs(*(column[which] for column in self))
        order = np.lexsort([some.begin, getattr(some, sort)])
        return _Needs(*(column[order] for column in some))

    def position(self, keys: Indices) -> Indices:
        """Convert indices in the pack (`keys`) to indices in the concatenation of all key ranges of this object."""
        order = np.argsort(self.begin)
        index = order[np.searchsorted(self.begin[order], keys, side="right") - 1]
        return (np.cumsum(self.length) - self.length)[index] + keys - self.begin[index]


def _needs(pieces: Pieces, ranges: PathRanges) -> _Needs:
    # A rank receives each key once, even if several of its pieces read it.
    readers = pieces.rank[ranges.number]
    order = np.lexsort([-ranges.end, ranges.begin, readers])
    readers, begin, end = readers[order], ranges.begin[order].copy(), ranges.end[order]
    num_tokens = int(pieces.offsets[-1])
    covered = (
        np.maximum.accumulate(end + readers * num_tokens)[:-1] - readers[1:] * num_tokens
    )  # end of the keys that earlier ranges of a reader cover; negative for its first range
    begin[1:] = np.clip(covered, begin[1:], end[1:])
    number, piece, begin, end = _cut(pieces, begin, end)
    reader, owner = readers[number], pieces.rank[piece]
    foreign = (reader != owner) & (begin < end)
    place = pieces.place[piece] + begin - pieces.start[piece]
    return _Needs(*(column[foreign] for column in (reader, owner, begin, end, place)))
