"""Find the prefixes that the samples of a pack share, so that each prefix is computed once.

For example, the samples p p p a a and p p p b b b become the nodes p p p, a a and b b b of a tree. A shared prefix may
end anywhere, even inside a response.

Attention copies the keys of shared prefixes. A prefix is shared only if this saves more time than it costs
(`SharingCost`).
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from padfree.packing.cost import CostModel
from padfree.prefix_tree import path_tokens

Indices = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class SharingCost:
    """The cost of sharing prefixes, in units of the time to compute one token.

    `key` is the cost of copying one attention key. `node` is the cost of a further node in the prefix tree, whose last
    tile of queries is only half full on average.
    """

    key: float = 0.01  # twice the estimate for a layer of a 4B model (24 KiB per copy, 0.6 GFLOP per token)
    node: float = 32.0

    def pays(self, model: CostModel, *, num_samples: int, begin: int, end: int, num_keys: int) -> bool:
        """Return whether it saves time to compute the tokens [begin, end) of `num_samples` samples only once.

        Sharing makes attention copy about `num_keys` keys: the total number of tokens of these samples.
        """
        pairs = float(end) ** 2 - float(begin) ** 2
        saved = (num_samples - 1) * (model.linear * (end - begin) + model.quadratic * pairs)
        return saved > model.linear * (self.node + self.key * num_keys)


FREE = SharingCost(key=0.0, node=0.0)
"""A cost of 0: with this `SharingCost`, every common prefix is shared."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PrefixTree:
    """The prefix tree of a pack: N nodes in preorder, and the node where each of B samples ends.

    Made by `find_prefixes`.
    """

    parents: Indices  # [N] the parent of each node, -1 for a root
    sample: Indices  # [N] a sample whose path contains the node
    begin: Indices  # [N] the node's tokens are sample.tokens[begin:end]; begin is also their first position
    end: Indices  # [N]
    last: Indices  # [B] the node where each sample ends; -1 for an empty sample

    @property
    def lengths(self) -> Indices:
        """Return the number of tokens of each of the N nodes of the prefix tree, [N]."""
        return self.end - self.begin

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of all nodes of the prefix tree. A token that samples share counts once."""
        return int(self.lengths.sum())

    @property
    def is_shared(self) -> bool:
        """Return whether any token of the tree belongs to more than one sample."""
        return bool((self.parents >= 0).any()) or len(self.parents) < int((self.last >= 0).sum())

    def cost(self, model: CostModel) -> float:
        """Return the cost of computing all tokens of the prefix tree.

        Each token is computed once. Its query attends to the keys on the path from the root to this token.
        """
        pairs = self.end.astype(np.float64) ** 2 - self.begin.astype(np.float64) ** 2
        return float(model.linear * self.num_tokens + model.quadratic * pairs.sum())

    @property
    def roots(self) -> Indices:
        """Return the root node of each of B samples, [B]; -1 for an empty sample.

        A sample is a path of nodes that begins at a root. Samples with different roots share no tokens.
        """
        root = np.arange(len(self.parents))
        for node in np.flatnonzero(self.parents >= 0).tolist():
            root[node] = root[self.parents[node]]
        return np.where(self.last >= 0, np.append(root, -1)[self.last], -1)

    def restricted(self, samples: NDArray[Any]) -> PrefixTree:
        """Return a prefix tree of only the samples with the indices `samples`, in this order.

        The samples share the same tokens as in this tree. A node at which none of them ends and no two diverge is
        merged with its child.
        """
        through: dict[int, int] = {}  # node -> a sample whose path contains it
        last = self.last[np.asarray(samples, dtype=np.int64)].tolist()
        for number, node in enumerate(last):
            while node >= 0 and node not in through:
                through[node] = number
                node = int(self.parents[node])
        children: dict[int, int] = {}
        for node in through:
            parent = int(self.parents[node])
            children[parent] = children.get(parent, 0) + 1
        ends = set(last)
        nodes: list[tuple[int, int, int, int]] = []
        new_index: dict[int, int] = {-1: -1}
        for node in sorted(through):
            parent = int(self.parents[node])
            if parent >= 0 and children[parent] == 1 and parent not in ends:
                new_index[node] = new_index[parent]
                above, _, begin, _ = nodes[new_index[node]]
                nodes[new_index[node]] = (above, through[node], begin, int(self.end[node]))
            else:
                new_index[node] = len(nodes)
                nodes.append((new_index[parent], through[node], int(self.begin[node]), int(self.end[node])))
        return _tree(nodes, [new_index[node] for node in last])

    def token_positions(self) -> Indices:
        """Return where the pack holds the tokens of the samples: an index [T] for the T tokens of all samples in order.

        The pack stores a shared token once, so that the tokens of several samples can have the same index.
        """
        offsets = np.concatenate([[0], np.cumsum(self.lengths)])
        positions = [path_tokens(self.parents, offsets, node) for node in self.last.tolist()]
        return np.concatenate([np.zeros(0, dtype=np.int64), *positions])


def find_prefixes(
    tokens: Sequence[NDArray[Any]],
    groups: Sequence[Hashable | None],
    *,
    cost: CostModel | None = None,
    overhead: SharingCost | None = None,
    across_groups: bool = False,
) -> PrefixTree:
    """Find the prefix tree of samples with these `tokens`, one array [n] per sample.

    Only samples of the same group are compared; a sample whose group is None shares nothing. With `across_groups`, all
    samples are compared. `cost` and `overhead` decide which prefixes are worth sharing.
    """
    model, overhead = cost or CostModel.tokens(), overhead or SharingCost()
    families: dict[Hashable, list[int]] = {}
    for index, group in enumerate(groups):
        key: Hashable = "all" if across_groups else ("group", group) if group is not None else ("alone", index)
        families.setdefault(key, []).append(index)
    growth = _Growth(tokens, model, overhead)
    for members in families.values():
        growth.add(members)
    return growth.tree()


class _Growth:
    """Builds a prefix tree, one family (set of samples that may share tokens) at a time."""

    def __init__(self, tokens: Sequence[NDArray[Any]], model: CostModel, overhead: SharingCost) -> None:
        self.tokens, self.model, self.overhead = tokens, model, overhead
        self.nodes: list[tuple[int, int, int, int]] = []  # (parent, sample, begin, end)
        self.last = [-1] * len(tokens)

    def tree(self) -> PrefixTree:
        return _tree(self.nodes, self.last)

    def add(self, members: list[int]) -> None:
        """Add the nodes of one family (samples that may share tokens): the samples with the indices `members`.

        Samples are sorted by their tokens, so that samples with a common prefix are neighbours.
        """
        ordered = members
        if len(members) > 1:
            ordered = sorted(members, key=lambda index: self.tokens[index].astype(np.int64, copy=False).tobytes())
        common = [0] + [
            common_length(self.tokens[one], self.tokens[other]) for one, other in itertools.pairwise(ordered)
        ]
        # An entry (low, high, begin, parent) stands for samples that are not divided into nodes yet: the samples
        # [low, high) in sorted order. They share their first `begin` tokens, and node `parent` holds the last of these.
        stack = [(0, len(ordered), 0, -1)]
        while stack:
            low, high, begin, parent = stack.pop()
            if high - low == 1:
                sample = ordered[low]
                self.last[sample] = self._node(parent, sample, begin, len(self.tokens[sample]))
                continue
            end = min(common[low + 1 : high])
            # Samples that end in this node come first. The longer samples are split at each pair of neighbours that
            # have only `end` tokens in common.
            ending = low
            while ending < high and len(self.tokens[ordered[ending]]) == end:
                ending += 1
            cuts = [ending, *(at for at in range(ending + 1, high) if common[at] == end), high]
            below = [(one, other) for one, other in itertools.pairwise(cuts) if one < other]
            if end == begin or self._pays(ordered[low:high], begin, end):
                parent = self._node(parent, ordered[low], begin, end)
                for index in ordered[low:ending]:
                    self.last[index] = parent
                begin = end
            else:
                below = [(at, at + 1) for at in range(low, ending)] + below
            stack.extend((one, other, begin, parent) for one, other in reversed(below))

    def _pays(self, members: list[int], begin: int, end: int) -> bool:
        num_keys = sum(len(self.tokens[index]) for index in members)
        return self.overhead.pays(self.model, num_samples=len(members), begin=begin, end=end, num_keys=num_keys)

    def _node(self, parent: int, sample: int, begin: int, end: int) -> int:
        """Add a node with the tokens [begin, end) of a sample and return its index. If there are no tokens, return
        `parent`.
        """
        if begin == end:
            return parent
        self.nodes.append((parent, sample, begin, end))
        return len(self.nodes) - 1


def _tree(nodes: list[tuple[int, int, int, int]], last: list[int]) -> PrefixTree:
    """Make a `PrefixTree`.

    `nodes` holds (parent, sample, begin, end) for each node, whose tokens are the tokens [begin, end) of the sample.
    `last` holds, for each sample, the node where the sample ends.
    """
    columns = np.array(nodes, dtype=np.int64).reshape(-1, 4).T
    parents, sample, begin, end = (np.ascontiguousarray(column) for column in columns)
    return PrefixTree(parents=parents, sample=sample, begin=begin, end=end, last=np.array(last, dtype=np.int64))


def common_length(one: NDArray[Any], other: NDArray[Any]) -> int:
    """Return the length of the common prefix of two token arrays."""
    length = min(len(one), len(other))
    different = one[:length] != other[:length]
    return int(np.argmax(different)) if different.any() else length
