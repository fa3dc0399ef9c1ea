"""Which token ranges of a packed row each context rank holds: pure index arithmetic on the host.

    segments    5 3 5, pad 3          0 0 0 0 0 | 1 1 1 | 2 2 2 2 2 | p p p              T = 16, world = 4
    contiguous  rank 0 1 2 3          0 0 0 0 1   1 1 1   2 2 2 2 3   3 3 3
    headtail    8 chunks of 2         0 0 1 1 2   2 3 3   3 3 2 2 1   1 0 0
    balanced    equal cost as well    whole documents, and here and there the head or the tail of one

A range that crosses the border of a segment is cut there, so that every range is a *piece*: consecutive queries of one
document. The query at position p of its document reads p + 1 keys, so a piece [a, b) of a document costs
b(b+1)/2 - a(a+1)/2: its causal *work*. The pad is a document like any other, because the kernels do compute it.

Why `balanced` always exists. Lay the documents on a circle and slide a window of T/2 tokens round it. The mean work of
all windows is half of the whole work, and the work changes gradually with the place of the window (between two borders
of documents it is linear); so somewhere it is one half. Such a window cuts the circle in at most two places. It goes to
one half of the ranks and what is left to the other half, and both are divided the same way until every rank has its
own: equal tokens exactly, equal work as nearly as wanted, and at most S + 2 (world - 1) pieces, for documents of
any lengths. A document as long as the row becomes head-tail pairs, a shorter one uneven pieces, short ones stay whole.

Work is not all that takes time. A piece [a, b) also has the a keys before it gathered and their gradients sent back;
kernels compute whole tiles of queries against whole tiles of keys; and each tile of keys takes some time by itself, so
that short documents are dear. `modelled_cost` counts all that. Of the windows that leave every rank at most
1 + TOLERANCE of the mean work, the one is taken whose dearer side is the cheapest: whoever reads many keys gets less
work, cuts are few and near the heads of documents, and the last ones fall between tiles. Work has the last word: the
rank that holds the head of a very long document reads the fewest keys, and is left the cheapest.

Where samples share prefixes a document is a node. Its first query reads the keys of its ancestors as well: positions
begin at their number, and all of the above holds with these.

A rank holds its pieces in row order, but in `balanced` those that read keys of others come first, then the longest:
kernels take segments in their order, and what starts last should not take long. So lie received keys and own ones
nearly in the order in which the kernel wants them, too. The pieces of a document are always side by side.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from padfree.arrays import need_whole
from padfree.batch import Layout, Segments
from padfree.config.choices import LayoutKind
from padfree.errors import UserError

Indices = NDArray[np.int64]
Reals = NDArray[np.float64]

TILE_BITS = 7
TILE, QUERY_TILE = 1 << TILE_BITS, 1 << TILE_BITS - 1
"""Kernels compute so many keys, and so many queries, at a time."""

OWN_KEY_PAIRS = 400
"""What a key of a piece itself costs besides its pairs, in (query, key) pairs; the last tile is filled up."""

EARLIER_KEY_PAIRS = 240
"""The same for a key before a piece: it is gathered, and its gradient is sent back, but it is no query."""

TOLERANCE = 0.019
"""How much more than the mean a rank's work may be, where that makes the modelled cost more equal."""

GOOD = 1.015
"""The cost per rank, over the mean, at which a window is taken without a longer search."""

REFUSED = 2.0**40
"""Above any cost over the mean: the score of a window whose work is not near enough."""


def make_layout(segments: Segments, world: int, kind: LayoutKind = "balanced") -> Layout:
    """The pieces of each of `world` ranks. Every rank holds exactly T / world tokens."""
    if not isinstance(segments, Segments):
        raise UserError("segments", f"{type(segments).__name__}", "give those of a batch, batch.segments")
    num_tokens = segments.num_tokens
    if kind not in get_args(LayoutKind):
        raise UserError("kind", "", f"choose one of {', '.join(get_args(LayoutKind))}", value=kind)
    need_whole("world", world, 1, "give 1 or more ranks")
    if num_tokens % world:
        raise UserError(
            "segments",
            f"{num_tokens} tokens for {world} context ranks",
            f"pad the batch with padded_to_multiple({world})",
        )
    offsets = segments.offsets
    if num_tokens == 0 or kind != "balanced":
        ranks, cuts = _chunks(num_tokens // world, world, pairs=kind == "headtail")
        starts = np.union1d(cuts, offsets[:-1][offsets[:-1] < num_tokens])
        owners = ranks[np.searchsorted(cuts, starts, side="right") - 1]
    else:
        starts, owners = _balanced(segments, world)
    return _layout(kind, world, num_tokens, starts, owners, offsets)


def work(layout: Layout, segments: Segments) -> Indices:
    """[world] the causal work of each rank: how many (query, key) pairs it computes."""
    return np.array([_work(*_positions(layout, segments, rank)).sum() for rank in range(layout.world)], dtype=np.int64)


def pieces(layout: Layout) -> Indices:
    """[world] how many pieces each rank holds."""
    return np.array([len(starts) for starts in layout.starts], dtype=np.int64)


def keys_read(layout: Layout, segments: Segments) -> Indices:
    """[world] how many keys each rank reads: every piece reads its document up to its own end."""
    return np.array([_positions(layout, segments, rank)[1].sum() for rank in range(layout.world)], dtype=np.int64)


def modelled_cost(layout: Layout, segments: Segments) -> Indices:
    """[world] the work of each rank as kernels do it, in whole tiles, and what its keys cost besides."""
    return np.array([_cost(*_positions(layout, segments, rank)).sum() for rank in range(layout.world)], dtype=np.int64)


def document_index(tokens: Indices, offsets: Indices) -> Indices:
    """The segments to which these tokens of the row belong."""
    return np.searchsorted(offsets, tokens, side="right") - 1


def _positions(layout: Layout, segments: Segments, rank: int) -> tuple[Indices, Indices]:
    """The first and the end position of each piece inside its document."""
    origins = segments.offsets[:-1] - segments.first_positions
    origin = origins[document_index(layout.starts[rank], segments.offsets)]
    return layout.starts[rank] - origin, layout.ends[rank] - origin


def _work(first: Indices, end: Indices) -> Indices:
    return (end - first) * (first + end + 1) // 2


def _cost(first: Indices, end: Indices) -> Indices:
    """Like `_work`, but in whole tiles, those of queries counted from `first`; and what keys cost besides."""
    # shifts are several times as fast as divisions
    queries, before = (x + (QUERY_TILE - 1) >> TILE_BITS - 1 for x in (end - first, first))
    keys, diagonal = end + (TILE - 1) >> TILE_BITS, (first >> TILE_BITS) + 1
    # key tile j >= diagonal is not seen by the first 2 j - before tiles of queries
    tiles = keys * queries - (keys - diagonal) * (keys + diagonal - 1 - before)
    beside = (OWN_KEY_PAIRS << TILE_BITS) * keys - (OWN_KEY_PAIRS - EARLIER_KEY_PAIRS) * first
    cost: Indices = (tiles << 2 * TILE_BITS - 1) + beside * (end > first)
    return cost


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
    document = document_index(starts, offsets)
    first = np.ones(len(starts), dtype=np.bool_)
    first[1:] = (owners[1:] != owners[:-1]) | (document[1:] != document[:-1])
    starts, owners, document = starts[first], owners[first], document[first]
    ends = np.append(starts[1:], num_tokens)[: len(starts)]
    places = owners
    if kind == "balanced":
        places = _ranked(owners, document, starts - offsets[document], ends - offsets[document])
    order = np.argsort(places, kind="stable")
    splits = np.searchsorted(owners[order], np.arange(world + 1)).tolist()
    starts, ends = starts[order], ends[order]
    return Layout(
        kind=kind,
        world=world,
        num_tokens=num_tokens,
        starts=tuple(starts[a:b] for a, b in pairwise(splits)),
        ends=tuple(ends[a:b] for a, b in pairwise(splits)),
    )


def _ranked(owners: Indices, document: Indices, first: Indices, end: Indices) -> Indices:
    """Numbers that sort pieces, given in row order, by owner: documents that are cut first, then the longest."""
    number = owners * (document.max(initial=0) + 1) + document  # of what a rank holds of a document
    cut, furthest = np.zeros((2, number.max(initial=0) + 1), dtype=np.int64)
    cut[number[first > 0]] = 1
    furthest[number] = end  # of its last piece there, which is assigned last
    ranked: Indices = (2 * owners + 1 - cut[number] << 32) - furthest[number]
    return ranked


def _balanced(segments: Segments, world: int) -> tuple[Indices, Indices]:
    """Where the pieces start in the row, ascending, and who owns them."""
    offsets, first = segments.offsets, segments.first_positions
    share = int(offsets[-1]) // world
    lengths = np.diff(offsets)
    # Short documents stay mixed: what whole tiles add to them depends on their lengths. Long ones behind them, the
    # longest last: then those who get its tail, and read most keys, get short documents as well. The nodes of a tree
    # stay together: who holds a prefix then has those who read it.
    together = _tree_lengths(segments)
    order = np.argsort(np.where(together >= 4 * TILE, together, 0), kind="stable")
    order = order[lengths[order] > 0]
    start, length = offsets[order], lengths[order]
    circles = _Circles(start, first[order], length, np.array([len(start)]), np.array([world]))
    mean_work = float(_work(circles.first, circles.first + length).sum()) / world
    depth = (world - 1).bit_length()
    for level in range(1, depth + 1):
        most_work = (1 + TOLERANCE * level / depth) * mean_work
        circles = _divided(circles, share, mean_work, most_work, last=level == depth)
    order = np.argsort(circles.start)
    return circles.start[order], np.repeat(np.arange(world), circles.counts)[order]


def _tree_lengths(segments: Segments) -> Indices:
    """[S] tokens of the document, or of all nodes of the tree that it belongs to."""
    lengths: Indices = np.diff(segments.offsets)
    if segments.parents is None:
        return lengths
    tree = np.cumsum(segments.parents < 0) - 1
    sums: Indices = np.bincount(tree, lengths).astype(np.int64)[tree]
    return sums


class _Circles(NamedTuple):
    """Pieces of the row, laid on one circle after the other; circle c is to be divided among `world[c]` ranks."""

    start: Indices  # [P] in the row
    first: Indices  # [P] position in the document
    length: Indices  # [P]
    counts: Indices  # [C] pieces of each circle
    world: Indices  # [C]


def _divided(circles: _Circles, share: int, mean_work: float, most_work: float, *, last: bool) -> _Circles:
    """Each circle cut into two: a window for one half of its ranks, the rest for the other half."""
    circle = np.repeat(np.arange(len(circles.counts)), circles.counts)  # [P]
    search = _Search(circles, circle, share, mean_work, most_work, last)
    begin, score = search.at_borders()
    two_tiles = 2 * TILE * TILE * circles.world / search.whole_cost  # what another cut would add
    poor = (score > GOOD + two_tiles) & (circles.world > 1)
    if poor.any():
        better, lower = search.everywhere(poor, least=np.where(score < REFUSED, max(TILE, share // 64), 0))
        begin = np.where(lower < score, better, begin)

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
    order = (length > 0).nonzero()[0][np.argsort(child.astype(np.int16), kind="stable")]
    halves = np.stack([circles.world // 2, circles.world - circles.world // 2], axis=1).ravel()
    return _Circles(
        start=(circles.start[index] + beyond)[order],
        first=(circles.first[index] + beyond)[order],
        length=length[order],
        counts=np.bincount(child, minlength=len(halves))[halves > 0],
        world=halves[halves > 0],
    )


class _RankPlaces(NamedTuple):
    """Both ends of windows."""

    piece: Indices  # [2, N]
    first: Indices  # [2, N] where it begins in its document
    position: Indices  # [2, N] where it is cut
    wrapped: NDArray[np.bool_]  # [2, N] once round the circle
    circle: Indices  # [N]

    def these(self, which: Indices) -> _RankPlaces:
        piece, first, position = self.piece[:, which], self.first[:, which], self.position[:, which]
        return _RankPlaces(piece, first, position, self.wrapped[:, which], self.circle[which])


class _Search:
    """The search for the window of each circle: the lowest modelled cost per rank that the work allows."""

    def __init__(
        self, circles: _Circles, circle: Indices, share: int, mean_work: float, most_work: float, last: bool
    ) -> None:
        self.circle, self.first, self.end = circle, circles.first, circles.first + circles.length
        self.mean_work, self.last = mean_work, last
        self.ends = circles.counts.cumsum()
        self.starts = self.ends - circles.counts
        self.stride = 1 + circles.counts // 64
        self.edges, self.done = np.zeros((2, len(circle) + 1), dtype=np.int64)
        circles.length.cumsum(out=self.edges[1:])
        _work(self.first, self.end).cumsum(out=self.done[1:])
        cost = _cost(self.first, self.end).astype(np.float64)
        if not last:
            cost += self.cost_to_come(self.first.astype(np.float64), self.end.astype(np.float64))
        self.spent = np.zeros(len(circle) + 1)
        cost.cumsum(out=self.spent[1:])
        self.base = self.edges[self.starts]
        self.whole = self.done[self.ends] - self.done[self.starts]
        self.whole_cost = self.spent[self.ends] - self.spent[self.starts]
        inside = circles.world // 2
        outside = circles.world - inside
        ranks = np.maximum(np.array([inside, outside]), 1)
        self.scale = circles.world / (ranks * self.whole_cost)
        self.mean_loads = ranks * mean_work
        self.total, self.size = circles.world * share, inside * share
        self.target = self.whole * self.size / self.total
        self.low = np.minimum(self.whole - outside * most_work, self.target)
        self.high = np.maximum(inside * most_work, self.target)

    def cost_of(self, first: Indices, end: Indices) -> Reals:
        """The modelled cost of parts that a cut would make."""
        if self.last:
            return _cost(first, end).astype(np.float64)
        # Other cuts are to come, so the tiles are not known. On average half a tile of keys is too much for whole tiles
        # of queries, half a tile of queries more if the part does not begin with its document; and half a tile of
        # either at the end.
        a, b = first.astype(np.float64), end.astype(np.float64)
        pairs = (b - a) * ((a + b) / 2 + (TILE // 2 + OWN_KEY_PAIRS) + QUERY_TILE // 2 * (a > 0))
        at_end = EARLIER_KEY_PAIRS * a + QUERY_TILE // 2 * b + OWN_KEY_PAIRS * (TILE // 2)
        return pairs + (b > a) * at_end + self.cost_to_come(a, b)

    def cost_to_come(self, first: Reals, end: Reals) -> Reals:
        """Of the cuts that parts of more than a rank's work still need.

        The work of [first, end) lies, on average, at 2/3 (end^3 - first^3) / (end^2 - first^2). So there begin, on
        average, the n ranks who share it equally, but for half a rank's length each; and the first of them is no cut.
        """
        ends = end + first
        keys = (end - first) * (ends * ends - end * first) / (3 * self.mean_work) - ends / 2  # n times that, less first
        return (EARLIER_KEY_PAIRS + QUERY_TILE // 2) * np.maximum(keys, 0)

    def places(self, begin: Indices, circle: Indices) -> _RankPlaces:
        total = self.total[circle]
        place = np.array([begin, begin + self.size[circle]])
        wrapped = place >= total
        place += self.base[circle] - wrapped * total
        piece = self.edges[:-1].searchsorted(place, side="right") - 1
        first = self.first[piece]
        return _RankPlaces(piece, first, first + place - self.edges[piece], wrapped, circle)

    def load(self, places: _RankPlaces) -> Indices:
        """The work of windows."""
        piece, first, position, wrapped, circle = places
        before: Indices = self.done[piece] + _work(first, position) + wrapped * self.whole[circle]
        load: Indices = before[1] - before[0]
        return load

    def costs(self, places: _RankPlaces) -> Reals:
        """[2, windows] the cost per rank of windows and of what is left, over the mean of the circle."""
        piece, first, position, wrapped, circle = places
        head, tail = self.cost_of(np.array([first, position]), np.array([position, self.end[piece]]))
        before, behind, whole = self.spent[piece], self.spent[piece + 1], self.whole_cost[circle]
        if not self.last:
            tail = np.where(position == first, behind - before, tail)
        turn = wrapped * whole
        before += turn
        behind += turn
        inside = before[1] - behind[0] + tail[0] + head[1]
        outside = whole - behind[1] + before[0] + head[0] + tail[1]
        costs: Reals = np.array([inside, outside]) * self.scale[:, circle]
        return costs

    def score(self, begin: Indices, circle: Indices) -> Reals:
        """The cost of the dearer side of windows, if their work allows them."""
        places = self.places(begin, circle)
        load = self.load(places)
        miss: Reals = np.maximum(self.low[circle] - load, load - self.high[circle])
        score = REFUSED + miss
        fine = (miss <= 0).nonzero()[0]
        if len(fine) == 0:
            return score
        places, load = places.these(fine), load[fine]
        costs = self.costs(places)
        if not self.last:  # work counts too: a side near the limit leaves the divisions to come no choice
            costs += np.array([load, self.whole[places.circle] - load]) / self.mean_loads[:, places.circle] - 1
        score[fine] = np.maximum(costs[0], costs[1])
        return score

    def at_borders(self) -> tuple[Indices, Reals]:
        """The best of at most about 64 windows that begin at the border of a piece, per circle, and its score."""
        ordinal = np.arange(len(self.circle)) - self.starts[self.circle]
        chosen = (ordinal % self.stride[self.circle] == 0).nonzero()[0]
        circle = self.circle[chosen]
        begin = self.edges[chosen] - self.base[circle]
        return self.best(begin, circle, self.score(begin, circle))

    def everywhere(self, which: NDArray[np.bool_], least: Indices) -> tuple[Indices, Reals]:
        """The best window of these circles with a cut where borders are more than `least` tokens apart; its score."""
        # Halves are symmetrical: a window that begins in the second half is the complement of one that begins in the
        # first. So borders count modulo the half; in uneven circles they count as beginnings and as ends.
        even = 2 * self.size == self.total
        turn = np.where(even, self.size, self.total)
        mine = which[self.circle].nonzero()[0]
        odd = mine[~even[self.circle[mine]]]
        circle = np.concatenate([self.circle[mine], self.circle[odd], which.nonzero()[0]])
        begin = np.concatenate(
            [self.edges[mine], self.edges[odd] - self.size[self.circle[odd]], (self.base - 1)[which]]
        )
        begin = (begin - self.base[circle]) % turn[circle]
        order = np.argsort(circle * self.total.max() + begin)
        begin, circle = begin[order], circle[order]
        # From one of these places to the next the work changes linearly, and but for tiles the cost does, if neither is
        # itself a border. Where the sides cost the same, where the work passes the target, and where it comes within
        # the tolerance, are the candidates.
        load = self.load(self.places(begin, circle))
        wide = ((circle[1:] == circle[:-1]) & (begin[1:] - begin[:-1] > least[circle[1:]])).nonzero()[0]
        low, high = np.minimum(load[wide], load[wide + 1]), np.maximum(load[wide], load[wide + 1])
        interval = wide[(low <= self.high[circle[wide]]) & (high >= self.low[circle[wide]])]
        left, right, within = begin[interval], begin[interval + 1], circle[interval]
        margin = 0.01 * (self.high - self.low)
        goal = np.array([self.target, self.low + margin, self.high - margin])[:, within]
        costs = self.costs(self.places(np.concatenate([left + 1, right - 1]), np.concatenate([within, within])))
        excess = (costs[0] - costs[1]).reshape(2, 1, -1)
        behind = np.concatenate([load[interval] - goal, excess[0]])
        ahead = np.concatenate([load[interval + 1] - goal, excess[1]])
        line, where = np.nonzero(behind * ahead < 0)
        step = behind[line, where] / (behind - ahead)[line, where] * (right - left)[where]
        between, within = left[where] + np.rint(step).astype(np.int64), within[where]
        if self.last:
            between, within = self.aligned(between, within)
        more = (~even | (least == 0) & (self.stride > 1))[circle]  # borders that `at_borders` leaves out
        begin, circle = np.concatenate([between, begin[more]]), np.concatenate([within, circle[more]])
        return self.best(begin, circle, self.score(begin, circle))

    def aligned(self, begin: Indices, circle: Indices) -> tuple[Indices, Indices]:
        """These windows, and those beside them of which a cut has whole tiles before it or behind it."""
        piece, first, position, _, _ = self.places(begin, circle)
        step = np.concatenate([first - position, self.end[piece] - position]) % QUERY_TILE
        moved = (begin + np.concatenate([step, step - QUERY_TILE])) % self.total[circle]
        return np.concatenate([begin, moved.ravel()]), np.concatenate([circle] * 9)

    def best(self, begin: Indices, circle: Indices, score: Reals) -> tuple[Indices, Reals]:
        """Per circle the window with the lowest score, and that score."""
        lowest = np.full(len(self.base), np.inf)
        np.minimum.at(lowest, circle, score)
        chosen = (score == lowest[circle]).nonzero()[0]
        found = np.zeros(len(lowest), dtype=np.int64)
        found[circle[chosen[::-1]]] = begin[chosen[::-1]]  # the first of equals
        return found, lowest
