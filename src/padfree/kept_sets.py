"""The token ids among which each token of a sample was sampled, for samplers with top-p, top-k or min-p.

The trainer computes its softmax over the same ids. If it chose ids by its own logits, rounding could change the choice
near the threshold.

For example, three tokens have the `counts` 1 0 3 and the `ids` 5 0 3 6. The first token was sampled from the id 5 only,
the second from the whole vocabulary, and the third from 0, 3 and 6.

A set of more than half of the vocabulary is stored as the excluded ids, each id i as -1 - i.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from padfree.arrays import concatenated_ranges, integer_array
from padfree.errors import UserError


@dataclass(frozen=True, slots=True, eq=False)
class KeptSets:
    """The kept sets of n tokens: the token ids that the sampler could choose from at each token.

    `counts` [n] are the lengths of the tokens' lists of ids, and `ids` [K] are all lists, one after the other.
    """

    counts: NDArray[np.int32]  # [n]
    ids: NDArray[np.int32]  # [K]

    def __post_init__(self) -> None:
        assert int(self.counts.sum()) == len(self.ids)

    def __len__(self) -> int:
        return len(self.counts)

    @property
    def offsets(self) -> NDArray[np.int64]:
        """Return offsets [n + 1] into `ids`: the ids stored for token j are `ids[offsets[j]:offsets[j + 1]]`."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.counts, dtype=np.int64)])

    @staticmethod
    def whole(length: int) -> KeptSets:
        """Return `KeptSets` for `length` tokens that were sampled from the whole vocabulary or not sampled at all."""
        return KeptSets(np.zeros(length, np.int32), np.zeros(0, np.int32))

    @staticmethod
    def joined(parts: Iterable[KeptSets]) -> KeptSets:
        """Concatenate kept sets along the tokens. A token's kept set is the ids that the sampler could choose from."""
        found = [KeptSets.whole(0), *parts]
        return KeptSets(np.concatenate([part.counts for part in found]), np.concatenate([part.ids for part in found]))

    @staticmethod
    def of_lists(lists: Sequence[Any], name: str) -> KeptSets:
        """Make `KeptSets` from one list per token. None and an empty list stand for the whole vocabulary.

        A list has the ids that the token was sampled from, or each excluded id i as -1 - i.
        """
        rows = [integer_array([] if one is None else one, f"{name}[{index}]") for index, one in enumerate(lists)]
        for index, row in enumerate(rows):
            mixed = len(row) and (row[0] < 0) != (row[-1] < 0)
            if len(row) and (mixed or len(np.unique(row)) < len(row) or np.abs(row).max() >= 2**31):
                raise UserError(
                    f"{name}[{index}]",
                    "is not a kept set (the ids from which a token was sampled)",
                    "give each kept id once, or each excluded id i once as the negative number -1 - i",
                    value=row[:8].tolist(),
                )
        return KeptSets.of_arrays(rows)

    @staticmethod
    def of_arrays(rows: Sequence[NDArray[np.integer[Any]]]) -> KeptSets:
        """Make `KeptSets` from one array per token.

        An array has the ids that the token was sampled from, or the excluded ids, with each excluded id i as -1 - i.
        """
        ids = np.concatenate([np.zeros(0, np.int32), *(row for row in rows if len(row))])
        return KeptSets(np.array([len(row) for row in rows], np.int32), ids.astype(np.int32, copy=False))

    def lists(self) -> list[list[int]]:
        """Return the result of `arrays` as lists, as rollout files store it."""
        return [part.tolist() for part in self.arrays()]

    def arrays(self) -> list[NDArray[np.int32]]:
        """Return one array per token. Each array has either the ids that the sampler could choose from, or the excluded
        ids, with each excluded id i as the number -1 - i. An empty array stands for the whole vocabulary.
        """
        return np.split(self.ids, self.offsets[1:-1]) if len(self) else []

    def take(self, index: NDArray[np.integer[Any]]) -> KeptSets:
        """Return the kept sets (the ids that the sampler could choose from) of the tokens with the indices `index`."""
        counts = self.counts[index]
        return KeptSets(counts, self.ids[concatenated_ranges(self.offsets[:-1][index], counts.astype(np.int64))])

    def __getitem__(self, chosen: slice) -> KeptSets:
        """Return the kept sets (the ids that the sampler could choose from) of the tokens in the slice `chosen`."""
        begin, end, _ = chosen.indices(len(self))
        offsets = self.offsets
        return KeptSets(self.counts[begin:end], self.ids[offsets[begin] : offsets[max(begin, end)]])

    def of_ids(self) -> NDArray[np.int64]:
        """Return the index of the token to which each of the K elements of `ids` belongs, [K]."""
        return np.repeat(np.arange(len(self)), self.counts)

    def contain(self, tokens: NDArray[np.integer[Any]]) -> NDArray[np.bool_]:
        """Return bools [n] that say whether each token is in its kept set, the ids from which it was sampled."""
        of_ids = self.of_ids()
        listed = np.zeros(len(self), np.bool_)
        own = tokens[of_ids]
        listed[of_ids[(self.ids == own) | (-1 - self.ids == own)]] = True
        found: NDArray[np.bool_] = (self.counts == 0) | (listed != self.are_excluded())
        return found

    def are_excluded(self) -> NDArray[np.bool_]:
        """Return bools [n] that are True for each token whose kept set (the ids that the sampler could choose from) is
        stored as the list of all other ids.
        """
        excluded = np.zeros(len(self), np.bool_)
        excluded[self.of_ids()[self.ids < 0]] = True
        return excluded


def kept_array(values: Any, length: int, name: str) -> KeptSets | None:
    """Convert `values` to the kept sets of a sample: for each token, the ids that the sampler could choose from.

    `values` are `KeptSets`, one list of ids per token, or None. Returns None if every token was sampled from the whole
    vocabulary.
    """
    if values is None:
        return None
    found = values if isinstance(values, KeptSets) else KeptSets.of_lists(values, f"kept of {name}")
    if len(found) != length:
        raise UserError(
            "kept",
            f"{name} has {len(found)} kept sets for {length} tokens",
            "give one list per token: the ids from which the token was sampled",
        )
    return found if len(found.ids) else None
