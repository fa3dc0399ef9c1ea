"""Which token ranges of a packed row each context rank holds: pure index arithmetic on the host.

    segments    5 3 5, pad 3          0 0 0 0 0 | 1 1 1 | 2 2 2 2 2 | p p p              T = 16, world = 4
    contiguous  rank 0 1 2 3          0 0 0 0 1   1 1 1   2 2 2 2 3   3 3 3
    headtail    8 chunks of 2         0 0 1 1 2   2 3 3   3 3 2 2 1   1 0 0
    balanced    equal work as well    whole documents, and here and there the head or the tail of one

A range that crosses the border of a segment is cut there, so that every range is a *piece*: consecutive queries of one
document. The query at position p of its document reads p + 1 keys, so a piece [a, b) of a document costs
b(b+1)/2 - a(a+1)/2: its causal *work*. The pad is a document like any other, because the kernels do compute it.

Why `balanced` always exists. Lay the documents on a circle and slide a window of T/2 tokens round it. The mean work of
all windows is half of the whole work, and the work changes gradually with the place of the window (between two borders
of documents it is linear); so somewhere it is one half. Such a window cuts the circle in at most two places. It goes to
one half of the ranks and what is left to the other half, and both are divided the same way until every rank has its
own: equal tokens exactly, equal work to within a token's work, and at most S + 2 (world - 1) pieces, for documents of
any lengths. A document as long as the row becomes head-tail pairs, a shorter one uneven pieces, short ones stay whole.

A cut at position p of a document makes somebody read the p keys before it once more. Among the windows whose work is
close enough to one half (`TOLERANCE`), the one with the fewest such rows is taken: that is what keeps the cuts in short
documents and near the heads of long ones.
"""

from __future__ import annotations

from typing import NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from padfree.batch import Layout, LayoutKind, Segments

Indices = NDArray[np.int64]

TOLERANCE = 0.012
"""How much more than the mean a rank's work may be, where that saves key rows. Cuts at different depths share it."""

CUT_ROWS = 64
"""What a cut costs besides the key rows it repeats: kernels take queries by tiles, and a piece ends in half a one."""

REFUSED = 2.0**40
"""Above any number of rows: the score of a window whose work is not near enough."""


def make_layout(segments: Segments, world: int, kind: LayoutKind = "balanced") -> Layout:
    """The pieces of each of `world` ranks. Every rank holds exactly T / world tokens."""
    num_tokens = segments.num_tokens
    if kind not in get_args(LayoutKind):
        raise ValueError(f"kind: {kind!r}; choose one of {', '.join(get_args(LayoutKind))}")
    if world < 1:
        raise ValueError(f"world: {world}; give 1 or more ranks")
    if num_tokens % world:
        raise ValueError(
            f"segments: {num_tokens} tokens for {world} context ranks; pad the batch with padded_to_multiple({world})"
        )
    offsets = segments.offsets
    if num_tokens == 0 or kind != "balanced":
        ranks, cuts = _chunks(num_tokens // world, world, pairs=kind == "headtail")
        starts = np.union1d(cuts, offsets[:-1][offsets[:-1] < num_tokens])
        owners = ranks[np.searchsorted(cuts, starts, side="right") - 1]
    else:
        starts, owners = _balanced(offsets, world)
    return _layout(kind, world, num_tokens, starts, owners, offsets)


def work(layout: Layout, segments: Segments) -> Indices:
    """[world] the causal work of each rank: how many (query, key) pairs it computes."""
    return np.array([_work(*_positions(layout, segments, rank)).sum() for rank in range(layout.world)], dtype=np.int64)


def pieces(layout: Layout) -> Indices:
    """[world] how many pieces each rank holds."""
    return np.array([len(starts) for starts in layout.starts], dtype=np.int64)


def key_rows(layout: Layout, segments: Segments) -> Indices:
    """[world] how many key rows each rank reads: every piece reads its document up to its own end."""
    return np.array([_positions(layout, segments, rank)[1].sum() for rank in range(layout.world)], dtype=np.int64)


def document_index(tokens: Indices, offsets: Indices) -> Indices:
    """The segments to which these tokens of the row belong."""
    return np.searchsorted(offsets, tokens, side="right") - 1


def _positions(layout: Layout, segments: Segments, rank: int) -> tuple[Indices, Indices]:
    """The first and the end position of each piece inside its document."""
    origin = segments.offsets[document_index(layout.starts[rank], segments.offsets)]
    return layout.starts[rank] - origin, layout.ends[rank] - origin


def _work(first: Indices, end: Indices) -> Indices:
    return (end - first) * (first + end + 1) // 2


def _chunks(share: int, world: int, *, pairs: bool) -> tuple[Indices, Indices]:
    """The rank and the start of each chunk: one chunk a rank, or two of which the first may be a token longer."""
    ranks = np.arange(world)
    if not pairs:
        return ranks, ranks * share
    sizes = np.repeat([share - share // 2, share // 2], world)
    return np.concatenate([ranks, ranks[::-1]]), np.cumsum(sizes) - sizes


def _layout(
    kind: LayoutKind, world: int, num_tokens: int, starts: Indices, owners: Indices, offsets: Indices
) -> Layout:
    """The row is tiled by pieces `[starts[i], starts[i + 1])` of `owners[i]`; neighbours of one document are joined."""
    ends = np.append(starts[1:], num_tokens)
    starts, owners = starts[starts < ends], owners[starts < ends]
    joins = (owners[1:] == owners[:-1]) & (document_index(starts[1:], offsets) == document_index(starts[:-1], offsets))
    first = np.insert(~joins, 0, True)[: len(starts)]
    starts, owners = starts[first], owners[first]
    ends = np.append(starts[1:], num_tokens)[: len(starts)]
    order = np.argsort(owners, kind="stable")
    splits = np.searchsorted(owners[order], np.arange(1, world))
    return Layout(
        kind=kind,
        world=world,
        num_tokens=num_tokens,
        starts=tuple(np.split(starts[order], splits)),
        ends=tuple(np.split(ends[order], splits)),
    )


def _balanced(offsets: Indices, world: int) -> tuple[Indices, Indices]:
    """Where the pieces start in the row, ascending, and who owns them."""
    share = int(offsets[-1]) // world
    lengths = np.diff(offsets)
    real = lengths > 0
    start = offsets[:-1][real]
    circles = _Circles(start, np.zeros_like(start), lengths[real], np.array([len(start)]), np.array([world]))
    tolerance = TOLERANCE / max(1, (world - 1).bit_length())
    while (circles.world > 1).any():
        circles = _divided(circles, share, tolerance)
    order = np.argsort(circles.start)
    return circles.start[order], np.repeat(np.arange(world), circles.counts)[order]


class _Circles(NamedTuple):
    """Pieces of the row, laid on one circle after the other; circle c is to be divided among `world[c]` ranks."""

    start: Indices  # [P] in the row
    first: Indices  # [P] position in the document
    length: Indices  # [P]
    counts: Indices  # [C] pieces of each circle
    world: Indices  # [C]


def _divided(circles: _Circles, share: int, tolerance: float) -> _Circles:
    """Each circle cut into two: a window for one half of its ranks, the rest for the other half."""
    circle = np.repeat(np.arange(len(circles.counts)), circles.counts)  # [P]
    search = _Search(circles, circle, share, tolerance)
    begin, score = search.at_borders()
    poor = score > CUT_ROWS + share // 128  # repeats more than 1% of what a rank holds
    if poor.any():
        better, lower = search.everywhere(poor)
        begin[poor] = np.where(lower < score[poor], better, begin[poor])

    edges, base, total, size = search.edges, search.base, search.total, search.size
    window = base + begin
    cuts = np.concatenate([edges[:-1], window, base + (begin + size) % total])
    cuts.sort()
    index = edges[:-1].searchsorted(cuts, side="right") - 1
    circle = circle[index]
    beyond = cuts - edges[index]
    length = np.append(cuts[1:], edges[-1]) - cuts
    outside = (cuts - window[circle]) % total[circle] >= size[circle]
    child = (2 * circle + outside)[length > 0]
    # numpy sorts 16 bits by radix, several times as fast as 64
    order = np.flatnonzero(length > 0)[np.argsort(child.astype(np.int16), kind="stable")]
    halves = np.stack([circles.world // 2, circles.world - circles.world // 2], axis=1).ravel()
    return _Circles(
        start=(circles.start[index] + beyond)[order],
        first=(circles.first[index] + beyond)[order],
        length=length[order],
        counts=np.bincount(child, minlength=len(halves))[halves > 0],
        world=halves[halves > 0],
    )


class _Search:
    """The search for the window of each circle: its share of the work, and cuts that repeat few key rows."""

    def __init__(self, circles: _Circles, circle: Indices, share: int, tolerance: float) -> None:
        self.circle, self.first = circle, circles.first
        self.edges = np.zeros(len(circle) + 1, dtype=np.int64)
        circles.length.cumsum(out=self.edges[1:])
        self.done = np.zeros(len(circle) + 1, dtype=np.int64)
        _work(circles.first, circles.first + circles.length).cumsum(out=self.done[1:])
        self.ends = circles.counts.cumsum()
        self.starts = self.ends - circles.counts
        self.total = circles.world * share
        self.size = circles.world // 2 * share
        self.base = self.edges[self.starts]
        self.whole = self.done[self.ends] - self.done[self.starts]
        self.target = self.whole * self.size / self.total
        self.allowed = tolerance * self.target

    def evaluate(self, begin: Indices, circle: Indices) -> tuple[Indices, NDArray[np.float64]]:
        """The work of the windows that begin here, and a score: the key rows that their cuts repeat, if work allows."""
        place = np.stack([begin, begin + self.size[circle]])
        wrapped = place >= self.total[circle]
        place += self.base[circle] - wrapped * self.total[circle]
        index = self.edges[:-1].searchsorted(place, side="right") - 1
        beyond = place - self.edges[index]
        position = self.first[index] + beyond
        before = self.done[index] + _work(self.first[index], position) + wrapped * self.whole[circle]
        load = before[1] - before[0]
        rows = ((position + CUT_ROWS) * (beyond > 0)).sum(axis=0)
        miss = np.abs(load - self.target[circle])
        return load, np.where(miss <= self.allowed[circle], rows, REFUSED + miss)

    def at_borders(self) -> tuple[Indices, NDArray[np.float64]]:
        """The best of at most about 128 windows that begin at the border of a piece, per circle, and its score."""
        stride = 1 + (self.ends - self.starts) // 128
        chosen = np.flatnonzero((np.arange(len(self.circle)) - self.starts[self.circle]) % stride[self.circle] == 0)
        circle = self.circle[chosen]
        begin = self.edges[chosen] - self.base[circle]
        return _best(begin, self.evaluate(begin, circle)[1], circle)

    def everywhere(self, which: NDArray[np.bool_]) -> tuple[Indices, NDArray[np.float64]]:
        """The best window of these circles."""
        # Halves are symmetrical: a window that begins in the second half is the complement of one that begins in the
        # first. So borders count modulo the half; in uneven circles they count as beginnings and as ends.
        even = 2 * self.size == self.total
        turn = np.where(even, self.size, self.total)
        mine = np.flatnonzero(which[self.circle])
        odd = mine[~even[self.circle[mine]]]
        circle = np.concatenate([self.circle[mine], self.circle[odd], np.flatnonzero(which)])
        begin = np.concatenate(
            [self.edges[mine], self.edges[odd] - self.size[self.circle[odd]], (self.base - 1)[which]]
        )
        begin = (begin - self.base[circle]) % turn[circle]
        order = np.lexsort([begin, circle])
        begin, circle = begin[order], circle[order]
        load, score = self.evaluate(begin, circle)
        # From one of these places to the next the work changes linearly. Where it passes the target, and where it comes
        # within the tolerance of it, are the other candidates.
        goal = (self.target + np.multiply.outer([0.0, -0.99, 0.99], self.allowed))[:, circle[:-1]]
        behind, ahead = load[:-1] - goal, load[1:] - goal
        line, where = np.nonzero((behind * ahead < 0) & (circle[1:] == circle[:-1]))
        step = behind[line, where] / (load[where] - load[where + 1]) * (begin[where + 1] - begin[where])
        between = begin[where] + np.rint(step).astype(np.int64)
        score = np.concatenate([score, self.evaluate(between, circle[where])[1]])
        return _best(np.concatenate([begin, between]), score, np.concatenate([circle, circle[where]]))


def _best(begin: Indices, score: NDArray[np.float64], circle: Indices) -> tuple[Indices, NDArray[np.float64]]:
    """Per circle the window with the lowest score, and that score."""
    order = np.lexsort([score, circle])
    first = order[np.flatnonzero(np.diff(circle[order], prepend=-1))]
    return begin[first], score[first]
