"""The prefix tree of a pack whose samples share prefixes: pure index arithmetic.

    nodes      0: p p p     1: a a     2: b b b          parents   -1 0 0          offsets   0 3 5 8
    positions     0 1 2        3 4        3 4 5          first      0 3 3

This tree stores the samples p p p a a and p p p b b b, whose letters stand for tokens. `first` is the position of a
node's first token. Queries of a node see all tokens of the node's ancestors.

Nodes are in preorder (descendants directly follow their node), so that a subtree is one range of the pack.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from padfree.arrays import concatenated_ranges
from padfree.errors import UserError

Indices = NDArray[np.int64]


class PathRanges(NamedTuple):
    """The path of each node of a prefix tree, from the root to the node, as token ranges [begin, end) of the pack."""

    number: Indices  # [m] index of the path, ascending
    begin: Indices  # [m]
    end: Indices  # [m]

    def lengths(self, count: int) -> Indices:
        """Return the number of tokens on the path from the root to each of `count` nodes, [count]."""
        sums: Indices = np.bincount(self.number, self.end - self.begin, minlength=count).astype(np.int64)
        return sums


def check_parents(parents: NDArray[Any], count: int) -> Indices:
    """Check that `parents` has one entry for each of `count` nodes, and that the nodes are in preorder (the descendants
    of a node directly follow the node). Return `parents` as int64.
    """
    array = np.asarray(parents, dtype=np.int64)
    if array.shape != (count,):
        raise UserError(
            "parents", f"has shape {array.shape} for {count} nodes", "give one parent per node, -1 for a root"
        )
    path: list[int] = []
    for node, parent in enumerate(array.tolist()):
        while path and path[-1] != parent:
            path.pop()
        if parent != (path[-1] if path else -1):
            raise UserError(
                "parents",
                f"{parent} cannot be the parent of node {node}",
                "sort the nodes in preorder, with each parent before its children",
            )
        path.append(node)
    return array


def first_positions(parents: Indices, lengths: Indices) -> Indices:
    """Return the total number of tokens of the ancestors of each of S prefix tree nodes, [S]."""
    first = np.zeros(len(parents), dtype=np.int64)
    for node in np.flatnonzero(parents >= 0).tolist():  # ascending, so the parent's value is known
        first[node] = first[parents[node]] + lengths[parents[node]]
    return first


def subtree_ends(parents: Indices) -> Indices:
    """Return, for each of S nodes, the index after the last node of its subtree, [S]."""
    ends = np.arange(1, len(parents) + 1)
    for node in np.flatnonzero(parents >= 0)[::-1].tolist():
        parent = parents[node]
        ends[parent] = max(ends[parent], ends[node])
    return ends


def paths(parents: Indices) -> list[list[int]]:
    """Return, for each node, the nodes on the path from its root to the node itself."""
    found: list[list[int]] = []
    for node, parent in enumerate(parents.tolist()):
        found.append([*(found[parent] if parent >= 0 else ()), node])
    return found


def prefix_ranges(parents: Indices, offsets: Indices, without: Collection[int] = ()) -> PathRanges:
    """Return the keys that each node's queries see, as ranges of the pack: its ancestors' tokens, then its own.

    The tokens of ancestors in `without` are left out.
    """
    chains = [[node for node in chain[:-1] if node not in without] + chain[-1:] for chain in paths(parents)]
    number = np.repeat(np.arange(len(chains)), [len(chain) for chain in chains])
    node = np.array([each for chain in chains for each in chain], dtype=np.int64)
    return PathRanges(number, offsets[node], offsets[node + 1])


def path_tokens(parents: Indices, offsets: Indices, node: int) -> Indices:
    """Return the pack indices of all tokens on the path from the root to `node`.

    If `node` is -1, as for an empty sample, the result is empty.
    """
    chain: list[int] = []
    while node >= 0:
        chain.append(node)
        node = int(parents[node])
    index = np.array(chain[::-1], dtype=np.int64)
    return concatenated_ranges(offsets[index], offsets[index + 1] - offsets[index])


class PathPages(NamedTuple):
    """The attention keys on the path from the root to each node of a prefix tree, stored in pages of equal size.

    In this example, node p0 p1 p2 has the children a0 and b0 b1:

    page      0       1       2       3       4
    tokens    p0 p1   p2 p2   p2 a0   p2 b0   b1 b1

    The path to a0 uses the pages 0 2, and the path to b1 the pages 0 3 4.
    """

    tokens: Indices  # [pages * size] for each slot of each page, the index in the pack of the token that fills it
    table: Indices  # [S, m] the pages of each path; entries after its last page are arbitrary


def page_counts(first: Indices, lengths: Indices, size: int) -> Indices:
    """Return how many pages of attention keys each of S prefix tree nodes needs besides those of its ancestors, [S].

    `first` [S]: number of tokens of the node's ancestors. `size`: tokens per page.
    """
    # The first page begins with copies of the ancestors' last `first % size` keys.
    counts: Indices = -(-(first % size + lengths) // size)
    return counts


def prefix_pages(parents: Indices, offsets: Indices, size: int) -> PathPages:
    lengths = np.diff(offsets)
    first = first_positions(parents, lengths)
    counts = page_counts(first, lengths, size)
    begins = np.cumsum(counts) - counts
    tokens = np.repeat(offsets[1:] - 1, counts * size)  # copies of a path's last key fill up its last page
    tokens[concatenated_ranges(begins * size + first % size, lengths)] = np.arange(offsets[-1])
    whole = first // size
    table = np.zeros((len(parents), int((whole + counts).max(initial=0))), dtype=np.int64)
    for node, (parent, shared) in enumerate(zip(parents.tolist(), whole.tolist(), strict=True)):
        table[node, :shared] = table[parent, :shared]
        table[node, shared : shared + counts[node]] = begins[node] + np.arange(counts[node])
        if rest := int(first[node]) % size:
            source, target = (int(page) * size for page in (table[parent, shared], begins[node]))
            tokens[target : target + rest] = tokens[source : source + rest]
    return PathPages(tokens, table)


def path_copies(parents: Indices, offsets: Indices) -> tuple[Indices, Indices]:
    """Return (`copies` [K], `begins` [C + 1]): where each of C tokens occurs in the concatenated paths of all nodes.

    Token i occurs at `copies[begins[i]:begins[i + 1]]`. For example, node p p has the children a and b. The paths are
    p p, p p a and p p b, so token 0 occurs at 0, 2 and 5.
    """
    lengths = np.diff(offsets)
    key_ends = np.cumsum(first_positions(parents, lengths) + lengths)
    own_start = key_ends - lengths  # for each node, where its own tokens start in the concatenated paths
    first = first_positions(parents, lengths)
    counts = np.repeat(subtree_ends(parents) - np.arange(len(parents)), lengths)
    places: list[Indices] = []
    for node, last in enumerate(subtree_ends(parents).tolist()):
        path_start = (own_start - first)[node:last]
        position = first[node] + np.arange(lengths[node])
        places.append((position[:, None] + path_start[None, :]).ravel())
    begins = np.zeros(int(offsets[-1]) + 1, dtype=np.int64)
    np.cumsum(counts, out=begins[1:])
    return np.concatenate([np.zeros(0, dtype=np.int64), *places]), begins
