"""What the same epoch would cost with padded rows.

    lengths    7 3 | 9 4        micro-batches of 2 rows, each padded to its longest
    computed   7 7 | 9 9        32 tokens for 23

Samples are in the order of the steps, or sorted by length inside each step, which is the least that padding can cost
without changing what a step holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from padfree.packing import CostModel
from padfree.tools.planner.steps import Lengths

PADDED_ROWS = (2, 4, 8, 16, 32)
"""The sizes of padded micro-batches that are shown."""

USUAL_ROWS = 8
"""The one that is called "padded" in a single number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Padded:
    """An epoch in padded micro-batches of `rows` samples."""

    rows: int
    grouped: bool  # sorted by length inside each step
    tokens: int  # computed, pads among them
    cost: float


def padded(steps: Sequence[Lengths], cost: CostModel, *, rows: int, grouped: bool = False) -> Padded:
    """All steps, their samples in micro-batches of `rows`; the last of a step may have fewer."""
    tokens, total = 0, 0.0
    for step in steps:
        lengths = np.sort(step) if grouped else step
        starts = np.arange(0, len(lengths), rows)
        longest = np.maximum.reduceat(lengths, starts)
        counts = np.diff(np.append(starts, len(lengths)))
        tokens += int((longest * counts).sum())
        total += float((cost(longest) * counts).sum())
    return Padded(rows=rows, grouped=grouped, tokens=tokens, cost=total)
