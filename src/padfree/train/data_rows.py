"""Data rows, which are the units of a batch, and the number of rows of each source in one epoch of a data mixture.

samples       0 | 1 2 3 | 4 5 | 6         row_starts  0 1 4 6 7
rows          0   1       2     3         a batch takes whole rows; batch.samples counts rows (with pairs, answers)
sources       a   a a a | b b   b         parts       4 3: samples of each source; row_counts 2 2: rows of each source
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from padfree.config import DataConfig, LossConfig, RolloutConfig
from padfree.data import StoredSamples
from padfree.errors import UserError
from padfree.packing.epochs import EpochOrder, SourcePart
from padfree.packing.fill import Indices
from padfree.rollout import Prompt
from padfree.sample import Sample
from padfree.tasks.reading import Samples

Group = Sequence[Sample | Prompt]


def in_rows(loss: LossConfig, rollout: RolloutConfig) -> bool:
    """Whether batches consist of data rows; if not, they consist of groups of rollouts or of prompts."""
    return loss.task.in_rows and rollout.source is None


def row_starts(loss: LossConfig, rollout: RolloutConfig, samples: Any) -> Indices:
    """Return [R+1]: the index of the first sample of each of the R data rows, and last the number of samples.

    `StoredSamples` record their rows. For other samples, the task defines the number of samples per row (1 in RL).
    """
    known: Indices | None = getattr(samples, "row_starts", None)
    size = loss.task.group_size if in_rows(loss, rollout) else 1
    return np.arange(0, len(samples) + 1, size) if known is None else known


def row_counts(starts: Indices, parts: Sequence[int]) -> list[int]:
    """Return the number of data rows of each source of a mixture.

    `starts`: the result of `row_starts`. `parts`: the number of samples of each source; empty if there is no mixture.
    """
    ends = np.searchsorted(starts, np.cumsum(parts or starts[-1:]))
    counts: list[int] = np.diff(ends, prepend=0).tolist()
    return counts


def epoch_parts(data: DataConfig, sizes: Sequence[int]) -> list[SourcePart] | None:
    """Return the size and the weight of each source of a mixture. `sizes`: number of rows or groups of each source.

    If the data is not a mixture, return None: each row then occurs once per epoch.
    """
    if not data.sources:
        return None
    return [SourcePart(size=size, weight=one.exact_weight) for size, one in zip(sizes, data.sources, strict=True)]


def check_shown(data: DataConfig, sizes: Sequence[int]) -> None:
    """Raise a `UserError` for a source whose weight is so small that no row of it is ever trained.

    `sizes`: number of rows of each source.
    """
    epochs = data.epochs
    for number, part in enumerate(epoch_parts(data, sizes) or ()):
        if epochs is not None and not part.shown(epochs):
            raise UserError(
                f"data.sources.{number}.weight",
                f"{data.sources[number].weight:g} × {part.size} rows × {epochs} epochs (data.epochs) "
                "is less than one row",
                "give a larger weight, or more epochs",
            )


def epoch_order(data: DataConfig, sizes: Sequence[int], *, seed: int) -> EpochOrder:
    """Return the order in which the batcher takes rows in each epoch. `sizes`: number of rows of each source."""
    parts = epoch_parts(data, sizes) or [SourcePart(size=sum(sizes), weight=Fraction(1))]
    return EpochOrder(parts, shuffle=data.shuffle, seed=seed)


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceShare:
    """The share of one source in a mixture."""

    name: str
    weight: float
    rows: int  # number of rows, or of groups of rollouts
    samples: int
    tokens: int
    share: float  # share of the tokens of an average epoch
    epochs: float | None  # how many times the run trains each row; None if only run.steps limits it

    def line(self) -> str:
        times = ""
        if self.epochs is not None:
            shown = "once" if self.epochs == 1 else f"{self.epochs:g} times"
            times = f", each row {shown} in {self.epochs / self.weight:g} epochs"
        return (
            f"{self.name}: {self.rows:,} rows, {self.samples:,} samples, {self.tokens:,} tokens, weight "
            f"{self.weight:g}: {self.share:.1%} of the tokens{times}"
        )


def source_shares(
    data: DataConfig, loss: LossConfig, rollout: RolloutConfig, samples: Samples, parts: Sequence[int]
) -> list[SourceShare]:
    """Return the share of each of `data.sources` in the mixture; an empty list if there is no mixture.

    `parts`: the number of samples of each source.
    """
    if not data.sources:
        return []
    lengths = lengths_of(samples)
    ends = np.cumsum(parts)
    tokens = [int(part.sum()) for part in np.split(lengths, ends[:-1])]
    rows = row_counts(row_starts(loss, rollout, samples), parts)
    weighted = [count * each.weight for count, each in zip(tokens, data.sources, strict=True)]
    epochs = data.epochs
    return [
        SourceShare(
            name=each.label,
            weight=each.weight,
            rows=rows[number],
            samples=parts[number],
            tokens=tokens[number],
            share=weighted[number] / max(sum(weighted), 1.0),
            epochs=None if epochs is None else each.weight * epochs,
        )
        for number, each in enumerate(data.sources)
    ]


def lengths_of(samples: Samples) -> Indices:
    """Return the number of tokens of each of n samples, [n]. A prompt counts with a response of maximum length."""
    if isinstance(samples, StoredSamples):
        return samples.lengths
    return np.array([len(sample) for sample in samples], dtype=np.int64)


class Rows(Sequence[Group]):
    """Sequence of data rows. A row is the tuple of its samples, which are read on access."""

    def __init__(self, samples: Samples, starts: Indices) -> None:
        self._samples, self._starts = samples, starts

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return tuple(self._samples[i] for i in range(int(self._starts[index]), int(self._starts[index + 1])))
