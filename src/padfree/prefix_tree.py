"""The nodes of a row whose samples share prefixes: pure index arithmetic.

    nodes      0: p p p     1: a a     2: b b b          parents   -1 0 0          offsets   0 3 5 8
    positions     0 1 2        3 4        3 4 5          first      0 3 3
    paths      0            0 1        0 2               what the queries of each node see, the last part causally

A node holds tokens once. It hangs on its parent, and a sample is a path from a root to the node where it ends. Parents
come before their children and the nodes below a node lie side by side behind it (preorder), so that a subtree is one
range of the row. A row that shares nothing has roots only.
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
    """Ranges [begin, end) of a row, path by path, each from its root down; `number` says whose path."""

    number: Indices  # [m], ascending
    begin: Indices  # [m]
    end: Indices  # [m]

    def lengths(self, count: int) -> Indices:
        """[count] tokens of each path."""
        sums: Indices = np.bincount(self.number, self.end - self.begin, minlength=count).astype(np.int64)
        return sums


def check_parents(parents: NDArray[Any], count: int) -> Indices:
    """[S] parents of so many nodes in preorder, as integers; anything else is refused."""
    array = np.asarray(parents, dtype=np.int64)
    if array.shape != (count,):
        raise UserError("parents", f"shape {array.shape} for {count} nodes", "give one parent per node, -1 for a root")
    path: list[int] = []
    for node, parent in enumerate(array.tolist()):
        while path and path[-1] != parent:
            path.pop()
        if parent != (path[-1] if path else -1):
            raise UserError(
                "parents", f"{parent} of node {node}", "give nodes in preorder, a parent before its children"
            )
        path.append(node)
    return array


def first_positions(parents: Indices, lengths: Indices) -> Indices:
    """[S] the position of each node's first token: how many tokens lie before it on its path."""
    first = np.zeros(len(parents), dtype=np.int64)
    for node in np.flatnonzero(parents >= 0).tolist():  # ascending: the parent's is known
        first[node] = first[parents[node]] + lengths[parents[node]]
    return first


def subtree_ends(parents: Indices) -> Indices:
    """[S] the node behind the last one below each node."""
    ends = np.arange(1, len(parents) + 1)
    for node in np.flatnonzero(parents >= 0)[::-1].tolist():
        parent = parents[node]
        ends[parent] = max(ends[parent], ends[node])
    return ends


def paths(parents: Indices) -> list[list[int]]:
    """[S] the nodes from the root to each node, itself the last."""
    found: list[list[int]] = []
    for node, parent in enumerate(parents.tolist()):
        found.append([*(found[parent] if parent >= 0 else ()), node])
    return found


def prefix_ranges(parents: Indices, offsets: Indices, without: Collection[int] = ()) -> PathRanges:
    """What the queries of each node see: the tokens of its ancestors, those in `without` left out, then its own."""
    chains = [[node for node in chain[:-1] if node not in without] + chain[-1:] for chain in paths(parents)]
    number = np.repeat(np.arange(len(chains)), [len(chain) for chain in chains])
    node = np.array([each for chain in chains for each in chain], dtype=np.int64)
    return PathRanges(number, offsets[node], offsets[node + 1])


def path_tokens(parents: Indices, offsets: Indices, node: int) -> Indices:
    """[n] where the tokens of a path lie in the row; none for node -1, which is the path of an empty sample."""
    chain: list[int] = []
    while node >= 0:
        chain.append(node)
        node = int(parents[node])
    index = np.array(chain[::-1], dtype=np.int64)
    return concatenated_ranges(offsets[index], offsets[index + 1] - offsets[index])


class PathPages(NamedTuple):
    """The keys of all paths in pages of one size. What is before a node in whole pages is read, the rest copied.

    nodes   p0 p1 p2 p3 p4 | a0 a1 | b0 b1 b2        table   0 1 2    0 1 3 4    0 1 5 6
    pages   p0 p1   p2 p3   p4 p4   p4 a0   a1 a1   p4 b0   b1 b2      the end of a path fills its last page
    """

    tokens: Indices  # [pages * size] the token of the row at each place
    table: Indices  # [S, m] the pages of each path; any behind its last


def page_counts(first: Indices, lengths: Indices, size: int) -> Indices:
    """[S] how many pages each node adds: from the last whole page before its first position to its own end."""
    counts: Indices = -(-(first % size + lengths) // size)
    return counts


def prefix_pages(parents: Indices, offsets: Indices, size: int) -> PathPages:
    lengths = np.diff(offsets)
    first = first_positions(parents, lengths)
    counts = page_counts(first, lengths, size)
    begins = np.cumsum(counts) - counts
    tokens = np.repeat(offsets[1:] - 1, counts * size)
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


def readers(parents: Indices, offsets: Indices) -> tuple[Indices, Indices]:
    """The transpose of `prefix_ranges`: where the copies of each token lie if all paths are laid end to end.

    [K] places of the copies, token by token, and [C + 1] where those of each token begin.
    """
    lengths = np.diff(offsets)
    key_ends = np.cumsum(first_positions(parents, lengths) + lengths)
    own_start = key_ends - lengths  # of each path, where the node's own tokens begin
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
