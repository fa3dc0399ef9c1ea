"""The layout `balanced`: the same number of tokens and nearly the same attention cost on every context-parallel rank.

The tokens of the pack form a circle. One half of the ranks gets a window (a contiguous range of the circle), and the
other half gets the tokens outside the window. Each half is divided again in the same way.

A window with half of the tokens and half of the (query, key) pairs always exists. Of the windows with about half of the
pairs, the search takes the one with the most equal costs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from padfree.segments import Segments

Indices = NDArray[np.int64]
Reals = NDArray[np.float64]

TILE_BITS = 7
TILE, QUERY_TILE = 1 << TILE_BITS, 1 << TILE_BITS - 1
"""Kernels process TILE keys and QUERY_TILE queries at a time."""

OWN_KEY_PAIRS = 400
"""The fixed attention cost of each key inside a piece (a range of a document), in addition to the cost of its (query,
key) pairs. The unit is the cost of one pair.
"""

EARLIER_KEY_PAIRS = 240
"""The fixed attention cost of each key that a piece (a range of a document) reads but does not contain. The unit is the
cost of one (query, key) pair. A rank may have to fetch such a key and return its gradient.
"""

TOLERANCE = 0.019
"""The fraction by which a rank's number of (query, key) pairs may exceed the mean over the ranks. The pairs are only a
part of the attention cost (`tile_cost`), so the costs of the ranks can be more equal if the numbers of pairs differ.
"""

GOOD = 1.015
"""The longer search is left out if a quick search divides the tokens with about this imbalance or less. The imbalance
is the higher of two groups' costs per rank, divided by the mean cost per rank.
"""

REFUSED = 2.0**40
"""A division of tokens between ranks has at least this score if the ranks have too unequal numbers of (query, key)
pairs. Other divisions have scores near 1. A lower score is better.
"""


def causal_work(first: Indices, end: Indices) -> Indices:
    """Return the number of causal (query, key) pairs of the queries at positions [first, end) of a document."""
    return (end - first) * (first + end + 1) // 2


def tile_cost(first: Indices, end: Indices) -> Indices:
    """Return the attention cost of the queries at positions [first, end) of a document.

    The cost is the number of (query, key) pairs in the tiles that the kernel computes, plus a fixed cost for each key.
    """
    # Numbers of tiles, rounded up. Bit shifts are several times as fast as divisions.
    queries, before = (x + (QUERY_TILE - 1) >> TILE_BITS - 1 for x in (end - first, first))
    keys, diagonal = end + (TILE - 1) >> TILE_BITS, (first >> TILE_BITS) + 1
    # for j >= diagonal, the first 2 j - before tiles of queries see no key of tile j
    tiles = keys * queries - (keys - diagonal) * (keys + diagonal - 1 - before)
    beside = (OWN_KEY_PAIRS << TILE_BITS) * keys - (OWN_KEY_PAIRS - EARLIER_KEY_PAIRS) * first
    cost: Indices = (tiles << 2 * TILE_BITS - 1) + beside * (end > first)
    return cost


def balanced_pieces(segments: Segments, world: int) -> tuple[Indices, Indices]:
    """Divide the documents of a pack into pieces for `world` ranks, with equal tokens and nearly equal cost per rank.

    Returns the ascending start of each piece in the pack, and the rank of each piece.
    """
    offsets, first = segments.offsets, segments.first_positions
    share = int(offsets[-1]) // world
    lengths = np.diff(offsets)
    # Short documents come first on the circle, and long documents follow, the longest last. So the ranks that hold the
    # tail of the longest document, and read the most keys, also get short documents. The nodes of a prefix tree stay
    # together, so that a rank that holds a prefix also holds nodes that read it.
    together = _tree_lengths(segments)
    order = np.argsort(np.where(together >= 4 * TILE, together, 0), kind="stable")
    order = order[lengths[order] > 0]
    start, length = offsets[order], lengths[order]
    circles = _Circles(start, first[order], length, np.array([len(start)]), np.array([world]))
    mean_work = float(causal_work(circles.first, circles.first + length).sum()) / world
    depth = (world - 1).bit_length()
    for level in range(1, depth + 1):
        most_work = (1 + TOLERANCE * level / depth) * mean_work
        circles = _divided(circles, share, mean_work, most_work, last=level == depth)
    # A division cuts at most 2 pieces, so S documents become at most S + 2 (world - 1) pieces.
    order = np.argsort(circles.start)
    return circles.start[order], np.repeat(np.arange(world), circles.counts)[order]


def _tree_lengths(segments: Segments) -> Indices:
    """Return, for each of the S documents of a pack, the number of tokens in its prefix tree, as an array [S].

    A document that shares no prefix is a tree of its own.
    """
    lengths: Indices = np.diff(segments.offsets)
    if segments.parents is None:
        return lengths
    tree = np.cumsum(segments.parents < 0) - 1
    sums: Indices = np.bincount(tree, lengths).astype(np.int64)[tree]
    return sums


class _Circles(NamedTuple):
    """The P pieces (ranges of tokens of one document) of C groups of ranks.

    The pieces of a group form a circle: after the last piece comes the first piece again.
    """

    start: Indices  # [P] index in the pack
    first: Indices  # [P] position in the document
    length: Indices  # [P]
    counts: Indices  # [C] number of pieces of each circle
    world: Indices  # [C] number of ranks of each circle


def _divided(circles: _Circles, share: int, mean_work: float, most_work: float, *, last: bool) -> _Circles:
    """Divide each circle (the tokens of a group of ranks) into two circles, one for each half of the group.

    `share`: the tokens per rank. `mean_work` and `most_work`: the mean and the maximum (query, key) pairs per rank.
    `last`: whether each new circle belongs to one rank.
    """
    circle = np.repeat(np.arange(len(circles.counts)), circles.counts)  # [P]
    search = _Search(circles, circle, share, mean_work, most_work, last)
    begin, score = search.at_borders()
    two_tiles = 2 * TILE * TILE * circles.world / search.whole_cost  # the cost of one more cut
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
    # numpy sorts 16-bit integers by radix, several times as fast as 64-bit ones
    order = (length > 0).nonzero()[0][np.argsort(child.astype(np.int16), kind="stable")]
    halves = np.stack([circles.world // 2, circles.world - circles.world // 2], axis=1).ravel()
    return _Circles(
        start=(circles.start[index] + beyond)[order],
        first=(circles.first[index] + beyond)[order],
        length=length[order],
        counts=np.bincount(child, minlength=len(halves))[halves > 0],
        world=halves[halves > 0],
    )


class _WindowEnds(NamedTuple):
    """Where N windows (ranges of tokens) begin (row 0 of each array [2, N]) and end (row 1)."""

    piece: Indices  # [2, N]
    first: Indices  # [2, N] start of the piece in its document
    position: Indices  # [2, N] where the piece is cut
    wrapped: NDArray[np.bool_]  # [2, N] whether the end is past the end of the circle
    circle: Indices  # [N]

    def these(self, which: Indices) -> _WindowEnds:
        piece, first, position = self.piece[:, which], self.first[:, which], self.position[:, which]
        return _WindowEnds(piece, first, position, self.wrapped[:, which], self.circle[which])


class _Search:
    """Finds how to divide each circle (the tokens of a group of ranks) at nearly the same cost per rank.

    One half of the ranks gets a window (a contiguous range of the circle). The other half gets the tokens outside the
    window.
    """

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
        causal_work(self.first, self.end).cumsum(out=self.done[1:])
        cost = tile_cost(self.first, self.end).astype(np.float64)
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
        # A window with the target work exists: work changes continuously as it slides, and its mean is the target.
        self.target = self.whole * self.size / self.total
        self.low = np.minimum(self.whole - outside * most_work, self.target)
        self.high = np.maximum(inside * most_work, self.target)

    def cost_of(self, first: Indices, end: Indices) -> Reals:
        """Return the modelled attention cost of parts of documents, in (query, key) pairs.

        A part holds the positions `first` to `end` (exclusive) of a document.
        """
        if self.last:
            return tile_cost(first, end).astype(np.float64)
        # A part may be cut again, so its tiles are not known yet. On average, rounding to whole tiles adds half a tile
        # at each cut end.
        a, b = first.astype(np.float64), end.astype(np.float64)
        pairs = (b - a) * ((a + b) / 2 + (TILE // 2 + OWN_KEY_PAIRS) + QUERY_TILE // 2 * (a > 0))
        at_end = EARLIER_KEY_PAIRS * a + QUERY_TILE // 2 * b + OWN_KEY_PAIRS * (TILE // 2)
        return pairs + (b > a) * at_end + self.cost_to_come(a, b)

    def cost_to_come(self, first: Reals, end: Reals) -> Reals:
        """Estimate the cost, in (query, key) pairs, of dividing the positions [first, end) of a document over ranks."""
        # Positions with too much work for a rank will be cut. Each cut makes one more rank read all earlier keys.
        ends = end + first
        # The integral of (position)^2 / mean_work over the part, minus the part's mean position.
        keys = (end - first) * (ends * ends - end * first) / (3 * self.mean_work) - ends / 2
        return (EARLIER_KEY_PAIRS + QUERY_TILE // 2) * np.maximum(keys, 0)

    def window_ends(self, begin: Indices, circle: Indices) -> _WindowEnds:
        total = self.total[circle]
        location = np.array([begin, begin + self.size[circle]])
        wrapped = location >= total
        location += self.base[circle] - wrapped * total
        piece = self.edges[:-1].searchsorted(location, side="right") - 1
        first = self.first[piece]
        return _WindowEnds(piece, first, first + location - self.edges[piece], wrapped, circle)

    def load(self, window_ends: _WindowEnds) -> Indices:
        """Return the number of (query, key) pairs of the queries in each window (a range of tokens)."""
        piece, first, position, wrapped, circle = window_ends
        before: Indices = self.done[piece] + causal_work(first, position) + wrapped * self.whole[circle]
        load: Indices = before[1] - before[0]
        return load

    def costs(self, window_ends: _WindowEnds) -> Reals:
        """Return the attention costs per rank for N windows (ranges of tokens), divided by the mean cost, as an array
        [2, N].

        Row 0 is for the tokens inside a window, and row 1 for the tokens outside.
        """
        piece, first, position, wrapped, circle = window_ends
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
        """Return the score of each window (a range of tokens). A lower score is better.

        If one group of ranks gets too much work, the score is at least `REFUSED`. Otherwise, the score grows with the
        cost of the more expensive group.
        """
        window_ends = self.window_ends(begin, circle)
        load = self.load(window_ends)
        miss: Reals = np.maximum(self.low[circle] - load, load - self.high[circle])
        score = REFUSED + miss
        fine = (miss <= 0).nonzero()[0]
        if len(fine) == 0:
            return score
        window_ends, load = window_ends.these(fine), load[fine]
        costs = self.costs(window_ends)
        if not self.last:  # work counts too: a side near the limit restricts later cuts
            costs += (
                np.array([load, self.whole[window_ends.circle] - load]) / self.mean_loads[:, window_ends.circle] - 1
            )
        score[fine] = np.maximum(costs[0], costs[1])
        return score

    def at_borders(self) -> tuple[Indices, Reals]:
        """Find, for each circle, the best window (range of tokens) that begins at the start of a piece.

        Return the index of the window's first token on the circle, and the window's score.
        """
        # Of many pieces, only every `stride`-th is tried.
        ordinal = np.arange(len(self.circle)) - self.starts[self.circle]
        chosen = (ordinal % self.stride[self.circle] == 0).nonzero()[0]
        circle = self.circle[chosen]
        begin = self.edges[chosen] - self.base[circle]
        return self.best(begin, circle, self.score(begin, circle))

    def everywhere(self, which: NDArray[np.bool_], least: Indices) -> tuple[Indices, Reals]:
        """Find the best window (range of tokens), also inside pieces, on each circle that the mask `which` [C] selects.

        `least` [C] is the resolution in tokens. Return the index of the window's first token on the circle, and the
        window's score.
        """
        # Windows that begin or end at a boundary of pieces. If a window is half of its circle, its complement is also a
        # window, so half of the boundaries are enough.
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
        # Between two of these windows, work and cost change linearly, apart from the rounding to tiles. The candidates
        # are the windows where both sides cost the same, and those where the work reaches the target or a limit of the
        # tolerance. Intervals of at most `least` tokens are skipped.
        load = self.load(self.window_ends(begin, circle))
        wide = ((circle[1:] == circle[:-1]) & (begin[1:] - begin[:-1] > least[circle[1:]])).nonzero()[0]
        low, high = np.minimum(load[wide], load[wide + 1]), np.maximum(load[wide], load[wide + 1])
        interval = wide[(low <= self.high[circle[wide]]) & (high >= self.low[circle[wide]])]
        left, right, within = begin[interval], begin[interval + 1], circle[interval]
        margin = 0.01 * (self.high - self.low)
        goal = np.array([self.target, self.low + margin, self.high - margin])[:, within]
        costs = self.costs(self.window_ends(np.concatenate([left + 1, right - 1]), np.concatenate([within, within])))
        excess = (costs[0] - costs[1]).reshape(2, 1, -1)
        behind = np.concatenate([load[interval] - goal, excess[0]])
        ahead = np.concatenate([load[interval + 1] - goal, excess[1]])
        line, where = np.nonzero(behind * ahead < 0)
        step = behind[line, where] / (behind - ahead)[line, where] * (right - left)[where]
        between, within = left[where] + np.rint(step).astype(np.int64), within[where]
        if self.last:
            between, within = self.aligned(between, within)
        more = (~even | (least == 0) & (self.stride > 1))[circle]  # boundaries that `at_borders` skips
        begin, circle = np.concatenate([between, begin[more]]), np.concatenate([within, circle[more]])
        return self.best(begin, circle, self.score(begin, circle))

    def aligned(self, begin: Indices, circle: Indices) -> tuple[Indices, Indices]:
        """Return the given windows (ranges of tokens), and shifted copies with fewer partly filled tiles.

        A copy is the whole window, shifted by at most one tile so that it begins or ends at a boundary of tiles.
        """
        piece, first, position, _, _ = self.window_ends(begin, circle)
        step = np.concatenate([first - position, self.end[piece] - position]) % QUERY_TILE
        moved = (begin + np.concatenate([step, step - QUERY_TILE])) % self.total[circle]
        return np.concatenate([begin, moved.ravel()]), np.concatenate([circle] * 9)

    def best(self, begin: Indices, circle: Indices, score: Reals) -> tuple[Indices, Reals]:
        """Return the start (`begin`) and the score of the window with the lowest `score` on each circle."""
        lowest = np.full(len(self.base), np.inf)
        np.minimum.at(lowest, circle, score)
        chosen = (score == lowest[circle]).nonzero()[0]
        found = np.zeros(len(lowest), dtype=np.int64)
        found[circle[chosen[::-1]]] = begin[chosen[::-1]]  # the first one on a tie
        return found, lowest
