"""Compute how evenly each layout divides packs among context ranks. A layout says which tokens of a pack each rank
holds.

In this example, 4 ranks share a pack of 4 documents:

    layout       cost of ranks 0 to 3 / mean cost
    contiguous   0.2  0.5  1.1  2.2
    headtail     0.9  1.1  1.0  1.0
    balanced     1.0  1.0  1.0  1.0

Ranks that share a pack wait for each other in every layer, so a pack takes as long as its slowest rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from padfree.choices import LayoutKind
from padfree.cp import keys_read, make_layout, modelled_cost
from padfree.segments import Segments
from padfree.tools.planner.steps import Lengths

KINDS: tuple[LayoutKind, ...] = get_args(LayoutKind)
BALANCE_PACKS = 32
"""The number of packs from which the balance of the context ranks is estimated."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ContextBalance:
    """How evenly one layout divides some packs among context ranks.

    The imbalance of a pack is the cost of its slowest rank, divided by the mean cost of its ranks.
    """

    kind: LayoutKind
    mean: float  # mean imbalance of the packs
    worst: float  # largest imbalance of a pack
    key_tokens: float  # keys that a rank reads / tokens that it holds, mean over ranks and packs
    shares: NDArray[np.float64]  # [world] cost of each rank / mean cost, for the pack with the longest document


def context_balance(packs: Sequence[Lengths], world: int, kind: LayoutKind) -> ContextBalance:
    """Return how evenly the layout `kind` divides packs over `world` ranks. `packs`: document lengths of each pack."""
    ratios, reads, shares, longest = [], [], np.ones(world), -1
    for lengths in packs:
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
    """Return the document lengths of a realistic pack with at most `capacity` tokens, made of the samples' `lengths`.

    The pack has the longest sample that fits, and then samples in their order as long as they fit.
    """
    fitting = lengths[lengths <= capacity]
    if not len(fitting):
        return np.array([capacity], dtype=np.int64)
    first = int(fitting.argmax())
    others = np.delete(fitting[:4096], first) if first < 4096 else fitting[:4096]
    pack, room = [int(fitting[first])], capacity - int(fitting[first])
    for length in others.tolist():
        if length <= room:
            pack.append(length)
            room -= length
    return np.array(pack, dtype=np.int64)
