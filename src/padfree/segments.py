"""Where each sequence of a pack begins and ends.

In this example, a pack has two samples of 5 and 3 tokens, and a pad (padding tokens at the end) of 3 tokens. The pad is
the last of S = 3 segments.

    segment      0 0 0 0 0 | 1 1 1 | 2 2 2            index of the segment of each token
    cu_seqlens   0          5       8      11         [S+1], on the device and on the host

Values that a kernel launch needs, such as `max_seqlen`, are also on the host. Launches therefore do not synchronise
with the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from padfree.arrays import integer_array, need_whole
from padfree.errors import UserError
from padfree.prefix_tree import check_parents, first_positions


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Segments:
    """Where each sequence of a pack begins and ends: `cu_seqlens` on the device, `offsets` on the host.

    Segment i has the tokens `offsets[i]:offsets[i + 1]` and may be empty. If `pad_length` is above 0, the last segment
    is the pad (padding tokens). The other `num_samples` segments are samples or, if samples share prefixes, nodes of a
    prefix tree.
    """

    cu_seqlens: Tensor  # [S+1] int32
    offsets: NDArray[np.int64]  # [S+1] the same numbers on the host
    max_seqlen: int
    pad_length: int = 0
    num_samples: int = 0
    parents: NDArray[np.int64] | None = None  # [S] parent nodes, -1 for a root; None: segments are samples
    path_length: int = 0  # tokens on the longest path from a root to a node
    longest: Tensor | None = None  # [] `max_seqlen` as a tensor for compiled code, always on the host

    def __post_init__(self) -> None:
        if self.longest is None:
            object.__setattr__(self, "longest", torch.tensor(self.max_seqlen))

    @staticmethod
    def from_lengths(
        lengths: Sequence[int] | NDArray[np.integer[Any]],
        *,
        pad_length: int = 0,
        parents: NDArray[np.integer[Any]] | None = None,
        device: torch.device | str | None = None,
    ) -> Segments:
        """Make segments of these lengths, followed by a pad: lengths `[5, 3]` and pad 3 give cu_seqlens `0 5 8 11`.

        `parents` [B]: if the segments are nodes of a prefix tree, the index of each node's parent, or -1 for a root.
        """
        array = integer_array(lengths, "lengths")
        if (array < 0).any():
            raise UserError("lengths", f"{array.min()} is negative", "give lengths of 0 or more")
        need_whole("pad_length", pad_length, 0, "give 0 or more")
        num_samples = len(array)
        nodes = None if parents is None else check_parents(parents, num_samples)
        if pad_length:
            array = np.append(array, pad_length)
            nodes = None if nodes is None else np.append(nodes, -1)
        offsets = np.zeros(len(array) + 1, dtype=np.int64)
        np.cumsum(array, out=offsets[1:])
        if offsets[-1] > np.iinfo(np.int32).max:
            raise UserError("lengths", f"{offsets[-1]} tokens are too many for int32 cu_seqlens", "split the pack")
        return Segments(
            cu_seqlens=torch.from_numpy(offsets.astype(np.int32)).to(device=device, non_blocking=True),
            offsets=offsets,
            max_seqlen=int(array.max(initial=0)),
            pad_length=pad_length,
            num_samples=num_samples,
            parents=nodes,
            path_length=0 if nodes is None else int((first_positions(nodes, array) + array).max(initial=0)),
        )

    @property
    def num_segments(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> int:
        return int(self.offsets[-1])

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Return the lengths of the segments, [S], on the host. The pad counts as a segment."""
        return np.diff(self.offsets)

    @property
    def first_positions(self) -> NDArray[np.int64]:
        """Return the position of the first token of each segment, [S].

        The position is 0 or, for a node of a prefix tree, the number of tokens on the path before the node.
        """
        if self.parents is None:
            return np.zeros(self.num_segments, dtype=np.int64)
        return first_positions(self.parents, self.lengths)

    @property
    def num_positions(self) -> int:
        """Return the number of positions that a model needs for this pack.

        This is the length of the longest segment or, in a prefix tree, of the longest path from a root. The pad
        (padding tokens at the end) is also a segment.
        """
        return self.max_seqlen if self.parents is None else self.path_length

    def to(self, device: torch.device | str, *, non_blocking: bool = True) -> Segments:
        return replace(self, cu_seqlens=self.cu_seqlens.to(device, non_blocking=non_blocking))

    def with_pad(self, pad_length: int) -> Segments:
        """Return the same segments with a pad of `pad_length` tokens at the end, in place of the present pad."""
        samples = self.lengths[: self.num_samples]
        parents = None if self.parents is None else self.parents[: self.num_samples]
        return Segments.from_lengths(samples, pad_length=pad_length, parents=parents, device=self.cu_seqlens.device)
