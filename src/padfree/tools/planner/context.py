"""How evenly rows lie on the context ranks, for each kind of layout.

    row of 4 documents, 4 ranks      contiguous   0.2  0.5  1.1  2.2        modelled cost over the mean
                                     headtail     0.9  1.1  1.0  1.0
                                     balanced     1.0  1.0  1.0  1.0

Ranks that share a row wait for each other in every layer, so a row takes as long as its slowest rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from padfree.batch import Segments
from padfree.config.choices import LayoutKind
from padfree.cp import keys_read, make_layout, modelled_cost
from padfree.tools.planner.steps import Lengths

KINDS: tuple[LayoutKind, ...] = get_args(LayoutKind)
BALANCE_PACKS = 32
"""So many rows are laid out to tell how balanced they are."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ContextBalance:
    """One kind of layout over some rows."""

    kind: LayoutKind
    mean: float  # of (slowest rank over the mean), over the rows
    worst: float
    key_tokens: float  # read by a rank, over the tokens it holds; the mean over ranks and rows
    shares: NDArray[np.float64]  # [world] the ranks of the row with the longest document: cost over the mean


def context_balance(rows: Sequence[Lengths], world: int, kind: LayoutKind) -> ContextBalance:
    """Lay out rows of these lengths over `world` ranks."""
    ratios, reads, shares, longest = [], [], np.ones(world), -1
    for lengths in rows:
        segments = Segments.from_lengths(lengths, pad_length=-int(lengths.sum()) % world)
        layout = make_layout(segments, world, kind)
        cost = modelled_cost(layout, segments) / max(modelled_cost(layout, segments).mean(), 1.0)
        ratios.append(float(cost.max()))
        reads.append(float(keys_read(layout, segments).sum()) / segments.num_tokens)
        if int(lengths.max()) > longest:
            longest, shares = int(lengths.max()), cost
    return ContextBalance(
        kind=kind, mean=float(np.mean(ratios)), worst=max(ratios), key_tokens=float(np.mean(reads)), shares=shares
    )


def long_pack(lengths: Lengths, capacity: int) -> Lengths:
    """A row as a run might have it: the longest sample that fits, and others in their order while they fit."""
    fitting = lengths[lengths <= capacity]
    if not len(fitting):
        return np.array([capacity], dtype=np.int64)
    first = int(fitting.argmax())
    others = np.delete(fitting[:4096], first) if first < 4096 else fitting[:4096]
    row, room = [int(fitting[first])], capacity - int(fitting[first])
    for length in others.tolist():
        if length <= room:
            row.append(length)
            room -= length
    return np.array(row, dtype=np.int64)
