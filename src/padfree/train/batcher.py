"""The batches of a run: data rows (SFT) or groups of rollouts (RL), in the order in which training takes them.

A data row can give several samples, and a batch consists of whole rows. `batch.samples` is the number of rows in a
batch (a preference pair counts as two rows) or, in RL, the maximum number of samples in a batch.

`make_batcher` returns the batcher. Its batches are the same on every rank. `count_steps` computes the number of steps
of a run from the lengths of the samples, before the run starts.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np

from padfree.config import Config, DataConfig, LossConfig, RolloutConfig
from padfree.config.reader import LARGEST_COUNT
from padfree.data import StoredSamples
from padfree.errors import UserError
from padfree.packing import FixedSizeBatcher, TokenBudgetBatcher
from padfree.packing.epochs import EpochOrder, SourcePart
from padfree.packing.fill import Indices
from padfree.rollout import Prompt
from padfree.rollout.group import RolloutGroup
from padfree.sample import Sample
from padfree.tasks.reading import Samples, TrainingData

Group = Sequence[Sample | Prompt]
Batcher = TokenBudgetBatcher[Group] | FixedSizeBatcher[Group]


BYTES_PER_TOKEN = 9
"""Bytes of host memory per token of a step: 4 for the token id, 1 for the loss mask, 4 for a log-probability."""

UNGROUPED = ("reinforce++", "gae", "teacher", "given")
"""Kinds of advantages (`loss.advantage`) that do not compare the samples of a group."""

MANY_SAMPLES = 1_000_000
"""Above this number of samples, the steps of a run are not counted, because counting takes too long."""


# Rows and groups


def in_rows(loss: LossConfig, rollout: RolloutConfig) -> bool:
    """Return whether batches consist of whole data rows, as in SFT.

    If not, batches consist of prompts, or of groups of rollouts (the samples of one prompt).
    """
    return loss.task.in_rows and rollout.source is None


def row_starts(loss: LossConfig, rollout: RolloutConfig, samples: Any) -> Indices:
    """Return an array [R+1]: the index of the first sample of each of R data rows, then the number of all samples.

    A conversation row can hold several samples, a preference pair holds two, and in RL every sample is a row.
    """
    known: Indices | None = getattr(samples, "row_starts", None)
    size = loss.task.group_size if in_rows(loss, rollout) else 1
    return np.arange(0, len(samples) + 1, size) if known is None else known


def row_counts(starts: Indices, parts: Sequence[int]) -> list[int]:
    """Return the number of data rows of each source. Data that is not a mixture counts as one source.

    `starts`: the result of `row_starts`. `parts`: the number of samples of each source; empty if there is no mixture.
    """
    ends = np.searchsorted(starts, np.cumsum(parts or starts[-1:]))
    counts: list[int] = np.diff(ends, prepend=0).tolist()
    return counts


def epoch_parts(data: DataConfig, sizes: Sequence[int]) -> list[SourcePart] | None:
    """Return the size and the weight of each source of a mixture, or None if the data is not a mixture.

    `sizes`: the size of each source, i.e. its number of data rows or rollout groups.
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


def lengths_of(samples: Samples) -> Indices:
    """Return the number of tokens of each of n samples, [n]. For a prompt, a response of maximum length is included."""
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


# Batches


def make_batcher(config: Config, samples: Samples, parts: Sequence[int] = ()) -> Batcher:
    """Return the batcher, which yields global batches of whole data rows (SFT) or whole groups of rollouts (RL).

    `parts`: the number of samples of each data source; empty without `data.sources`.
    """
    data, batch = config.data, config.batch
    if not len(samples):
        raise UserError("data.path", f"{', '.join(data.paths)} has no samples", "give files with at least one sample")
    _check_step_memory(config, samples)
    order: dict[str, Any] = {"shuffle": data.shuffle, "seed": config.run.seed, "epochs": data.epochs}
    groups, sizes = groups_of(config, samples, parts)
    order["parts"] = epoch_parts(data, sizes)
    if in_rows(config.loss, config.rollout):
        if batch.samples is not None:
            size = config.loss.task.group_size
            return FixedSizeBatcher(groups, batch_size=batch.samples // size, length=_num_tokens, **order)
        assert batch.tokens is not None
        return TokenBudgetBatcher(
            groups,
            budget=batch.tokens,
            buffer_size=batch.buffer,
            overlong=batch.overlong,
            length=_num_tokens,
            **order,
        )
    assert batch.samples is not None
    largest = max(groups, key=len)
    if len(largest) > batch.samples:
        assert isinstance(largest[0], Sample), "batch.samples is a multiple of rollout.samples_per_prompt"
        raise UserError(
            "batch.samples",
            f"{batch.samples} is less than the {len(largest)} samples of group {largest[0].group!r}",
            f"give {len(largest)} or more",
        )
    # `length=len` makes the budget count samples instead of tokens, so that a batch takes as many whole groups as fit.
    return TokenBudgetBatcher(groups, budget=batch.samples, buffer_size=1, length=len, **order)


def _check_step_memory(config: Config, samples: Samples) -> None:
    """Raise a `UserError` if the samples of one step do not fit into this machine's memory."""
    lengths = lengths_of(samples)
    total = int(lengths.sum()) * (config.data.epochs or LARGEST_COUNT)
    if config.batch.samples is not None:
        name, size, tokens_each = "samples", config.batch.samples, float(lengths.mean())
    else:
        assert config.batch.tokens is not None
        name, size, tokens_each = "tokens", config.batch.tokens, 1.0
    needed = BYTES_PER_TOKEN * min(size * tokens_each, total)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > memory:
        gib = f"{needed / 2**30:.3g} GiB of memory, but this machine has {memory / 2**30:.3g} GiB"
        most = int(memory / BYTES_PER_TOKEN / tokens_each)
        raise UserError(f"batch.{name}", f"a step of {size} {name} needs about {gib}", f"give at most {most}")


def groups_of(config: Config, samples: Samples, parts: Sequence[int] = ()) -> tuple[Sequence[Group], list[int]]:
    """Return the data rows (SFT) or groups of rollouts (RL) that form batches, and their number in each data source.

    `parts`: the number of samples of each source; empty without `data.sources`.
    """
    if in_rows(config.loss, config.rollout):
        starts = row_starts(config.loss, config.rollout, samples)
        return Rows(samples, starts), row_counts(starts, parts)
    ends = np.cumsum(parts or [len(samples)]).tolist()
    by_part = [_groups(config, [samples[i] for i in range(a, b)]) for a, b in pairwise([0, *ends])]
    return [group for groups in by_part for group in groups], [len(groups) for groups in by_part]


def _num_tokens(group: Group) -> int:
    return sum(len(sample) for sample in group)


def _groups(config: Config, samples: Samples) -> list[Group]:
    """Group the samples by their field `group`, or one by one if `loss.advantage` is in `UNGROUPED`.

    A prompt becomes the group of its future rollouts. Groups are ordered by their first sample.
    """
    alone: list[Group] = []
    grouped: dict[str | int | None, list[Sample]] = {}
    for sample in samples:
        if isinstance(sample, Prompt):
            alone.append(RolloutGroup(prompt=sample, size=config.rollout.samples_per_prompt))
        elif config.loss.advantage in UNGROUPED:
            alone.append((sample,))
        else:
            grouped.setdefault(sample.group, []).append(sample)
    return [*alone, *grouped.values()]


# Steps


def count_steps(config: Config, source: TrainingData, *, enough: int) -> int:
    """Return the number of optimizer steps in all epochs of the data.

    Without a fixed number of rows per batch, the result is the steps of the first epoch × the number of epochs. If the
    number of tokens implies at least `enough` steps, return `enough`.
    """
    samples, epochs = source.samples, config.data.epochs
    assert epochs is not None
    if in_rows(config.loss, config.rollout) and config.batch.samples is not None:
        starts = row_starts(config.loss, config.rollout, samples)
        order = epoch_order(config.data, row_counts(starts, source.parts), seed=config.run.seed)
        rows = config.batch.samples // config.loss.task.group_size
        same_every_epoch = all((part.weight * part.size).denominator == 1 for part in order.parts)
        looked_at = range(1 if same_every_epoch else epochs)
        steps = sum(-(-(order.start(epoch + 1) - order.start(epoch)) // rows) for epoch in looked_at)
        return steps * epochs if same_every_epoch else steps
    if (
        not source.parts
        and config.batch.tokens is not None
        and int(lengths_of(samples).sum()) * epochs >= config.batch.tokens * enough
    ):
        return enough  # a step has at most `batch.tokens` tokens
    once = replace(config, data=replace(config.data, epochs=1), batch=replace(config.batch, overlong="alone"))
    counted: Any = (
        _Lengths(samples, row_starts(config.loss, config.rollout, samples))
        if in_rows(config.loss, config.rollout)
        else samples
    )
    updates = 0
    for groups in make_batcher(once, counted, source.parts):
        in_batch = sum(len(group) for group in groups)
        updates += config.loss.epochs * min(config.loss.mini_batches, in_batch)
    return updates * epochs


def planned_steps(config: Config, source: TrainingData) -> int | None:
    """Return the approximate number of optimizer steps of the run.

    If `data.epochs` is None or counting would take too long, the result is the setting `run.steps`, which may be None.
    """
    steps, quick = config.run.steps, config.batch.samples is not None and config.rollout.source is None
    if config.data.epochs is None or (not quick and len(source.samples) > MANY_SAMPLES):
        return steps
    steps_in_data = count_steps(config, source, enough=steps or LARGEST_COUNT)
    return steps_in_data if steps is None else min(steps, steps_in_data)


class _Lengths(Sequence[Any]):
    """Stands in for the samples while steps are counted: entry i has the length of sample i, but no tokens."""

    def __init__(self, samples: Samples, starts: Indices) -> None:
        self._lengths, self.row_starts = lengths_of(samples), starts

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, index: Any) -> Any:
        return range(int(self._lengths[index]))


# Sources of a mixture


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceShare:
    """The size of one source of a data mixture, and its share of the mixture's tokens."""

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
    """Return the numbers of rows, samples and tokens of each of `data.sources`, and its share of the tokens.

    The list is empty without `data.sources`. `parts`: the number of samples of each source.
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
