"""The number of optimizer steps of a run, counted from its data before it starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from padfree.config import Config
from padfree.config.reader import LARGEST_COUNT
from padfree.packing.fill import Indices
from padfree.tasks.reading import Samples, TrainingData
from padfree.train.data_rows import epoch_order, in_rows, lengths_of, row_counts, row_starts
from padfree.train.training_data import make_batcher

MANY_SAMPLES = 1_000_000
"""For more samples than this, steps are not counted, because counting forms all batches of an epoch."""


def count_steps(config: Config, source: TrainingData, *, enough: int) -> int:
    """The number of optimizer steps in all epochs of the data.

    With a token budget, the result assumes that all epochs have as many steps as the first. If the number of tokens
    alone shows that there are at least `enough` steps, the result is `enough`.
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
        return enough  # no step exceeds its token budget
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

    If `data.epochs` is None or counting would take long, return `run.steps`, which may be None.
    """
    steps, quick = config.run.steps, config.batch.samples is not None and config.rollout.source is None
    if config.data.epochs is None or (not quick and len(source.samples) > MANY_SAMPLES):
        return steps
    steps_in_data = count_steps(config, source, enough=steps or LARGEST_COUNT)
    return steps_in_data if steps is None else min(steps, steps_in_data)


class _Lengths(Sequence[Any]):
    """A substitute for the samples that knows only their lengths, so that no tokens are read."""

    def __init__(self, samples: Samples, starts: Indices) -> None:
        self._lengths, self.row_starts = lengths_of(samples), starts

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, index: Any) -> Any:
        return range(int(self._lengths[index]))
