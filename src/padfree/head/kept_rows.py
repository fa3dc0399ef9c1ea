"""The kept sets of the scored tokens, on the device, and the mask of a tile of logits.

The kept set of a token is the set of vocabulary ids that sampling could choose, for example with top-p. All other
logits are set so low that their probability and gradient are 0.

A mask is True for the ids in the kept set. For example, the columns 2 to 5 of the masks of two tokens are:

    kept set         column 2    3        4        5
    0 and 3          False       True     False    False
    all but 4        True        True     False    True
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from padfree.errors import UserError
from padfree.kept_sets import KeptSets


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KeptRows:
    """The kept sets of R scored tokens: the vocabulary ids that the softmax of each token covers.

    Each token has a list of either its kept ids or its excluded ids. K is the total number of ids in the R lists.
    """

    ids: Tensor  # [K] int32, 0 or greater: the kept ids of a token, or its excluded ids
    row: Tensor  # [K] int32, the token of each id, counted from `first`
    is_excluded: Tensor  # [R] bool: whether the ids of the token are its excluded ids; True for an empty list
    offsets: NDArray[np.int64]  # [R + 1] on the host: where the ids of each token begin, counted from `offsets[0]`
    first: int = 0

    @staticmethod
    def of_sets(sets: KeptSets, vocabulary: int, device: torch.device) -> KeptRows:
        ids = np.where(sets.ids < 0, -1 - sets.ids, sets.ids)
        if len(ids) and int(ids.max()) >= vocabulary:
            raise UserError(
                "kept", f"has the id {int(ids.max())} outside the vocabulary", f"give ids from 0 to {vocabulary - 1}"
            )

        def moved(array: NDArray[np.generic]) -> Tensor:
            tensor = torch.from_numpy(np.ascontiguousarray(array))
            return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)

        return KeptRows(
            ids=moved(ids),
            row=moved(sets.of_ids().astype(np.int32)),
            is_excluded=moved(sets.are_excluded() | (sets.counts == 0)),
            offsets=sets.offsets,
        )

    def part(self, start: int, end: int) -> KeptRows:
        """Return the kept sets (vocabulary ids that the softmax covers) of the tokens [start, end)."""
        low, high = (int(self.offsets[index] - self.offsets[0]) for index in (start, end))
        return replace(
            self,
            ids=self.ids[low:high],
            row=self.row[low:high],
            is_excluded=self.is_excluded[start:end],
            offsets=self.offsets[start : end + 1],
            first=self.first + start,
        )

    def tile(self, first: int, num_columns: int) -> Tensor:
        """Return bools [R, W]: for each token, the ids in [first, first + W) that truncated sampling could choose."""
        num_rows = len(self.is_excluded)
        is_listed = self.is_excluded.new_zeros(num_rows * num_columns + 1)
        column = (self.ids - first).long()
        index = (self.row - self.first).long() * num_columns + column
        # Ids of other columns are written to the last element, which is left out.
        index = torch.where((column >= 0) & (column < num_columns), index, num_rows * num_columns)
        is_listed[index] = True
        return is_listed[:-1].view(num_rows, num_columns) != self.is_excluded[:, None]

    def contains(self, labels: Tensor) -> Tensor:
        """Return bools [R]: whether truncated sampling (such as top-p) could choose the label of each token."""
        row = (self.row - self.first).long()
        is_label = (self.ids == labels[row]).to(torch.int32)
        is_listed = torch.zeros_like(self.is_excluded, dtype=torch.int32).index_add_(0, row, is_label) > 0
        return is_listed != self.is_excluded
