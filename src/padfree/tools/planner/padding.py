"""Compute what the planned epoch would cost with padded micro-batches instead of packs.

    lengths    7 3 | 9 4        micro-batches of 2 samples, each padded to its longest sample
    computed   7 7 | 9 9        in this example, 32 tokens are computed for 23 tokens of data

Samples are in the order of the step, or sorted by length inside each step. With sorted samples, the cost is the lowest
that padding can reach without moving samples to other steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from padfree.packing import CostModel
from padfree.tools.planner.steps import Lengths

PADDED_SIZES = (2, 4, 8, 16, 32)
"""Batch sizes (samples per micro-batch) for which `padfree plan` compares the cost of padding with that of packing."""

USUAL_SIZE = 8
"""The printed plan compares packing with padded micro-batches of this number of samples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Padded:
    """The cost of an epoch with padded micro-batches of `size` samples, instead of packs."""

    size: int
    grouped: bool  # samples are sorted by length inside each step
    tokens: int  # computed tokens, padding included
    cost: float


def padded(steps: Sequence[Lengths], cost: CostModel, *, size: int, grouped: bool = False) -> Padded:
    """Return the cost of an epoch with padded micro-batches of `size` samples.

    The last micro-batch of a step may have fewer samples. `steps`: sample lengths of each step. `grouped`: whether
    samples are sorted by length inside each step.
    """
    tokens, total = 0, 0.0
    for step in steps:
        lengths = np.sort(step) if grouped else step
        starts = np.arange(0, len(lengths), size)
        longest = np.maximum.reduceat(lengths, starts)
        counts = np.diff(np.append(starts, len(lengths)))
        tokens += int((longest * counts).sum())
        total += float((cost(longest) * counts).sum())
    return Padded(size=size, grouped=grouped, tokens=tokens, cost=total)
