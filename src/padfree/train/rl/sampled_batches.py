"""Batches of rollouts that the run generates, sampled on demand or ahead of training.

    staleness 0      in training   1     2     3           staleness 2      in training   1     2     3
                     in the queue  -     -     -                            in the queue  2 3   3 4   4 5

The batcher is ahead of training by the length of the queue. A checkpoint therefore stores the position in the data
before the oldest queued batch: a resumed run takes the same batches again, and the collector restores the responses
that were already sampled for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from padfree.config import LossConfig, RolloutConfig, RunConfig
from padfree.optim.master_weights import compute_copies
from padfree.rollout.collect.collector import Collector
from padfree.sample import Sample
from padfree.train.batcher import Batcher
from padfree.train.engine import Engine


class SampledBatches:
    """Takes batches of prompts from the batcher, and returns their samples in the same order."""

    def __init__(
        self,
        rollout: RolloutConfig,
        loss: LossConfig,
        run: RunConfig,
        batcher: Batcher,
        collector: Collector,
        engine: Engine,
    ) -> None:
        self._batcher, self._collector, self._engine = batcher, collector, engine
        self._staleness, self._steps = rollout.staleness, run.steps
        self._updates = loss.epochs * loss.mini_batches  # updates per batch
        self._queue: list[tuple[int, dict[str, Any]]] = []  # batch number, and the position in the data before it

    @property
    def timings(self) -> Mapping[str, float]:
        """The seconds of each phase of the last batch, by name (see `padfree.train.batch_times`)."""
        return self._collector.timings

    def metrics(self) -> Mapping[str, float]:
        """Return the collector's metrics of the last batch, by name."""
        return self._collector.metrics()

    def resume(self, step: int, *, remaining: int) -> None:
        """After a resume, start to sample batches ahead. The batch in training has `remaining` updates left."""
        if self._staleness:
            self._fill(step, remaining)

    def _fill(self, step: int, remaining: int = 0) -> None:
        """Sync the current weights to the sampler, then request batches until the queue is full.

        The queue is full with `staleness` batches or, if no batch is in training, with one more. `step`: updates made
        so far. `remaining`: updates that the batch in training has left; 0 if no batch is in training.
        """
        with compute_copies(self._engine.model):  # the sampler gets the weights in the compute dtype
            self._collector.sync_weights(self._engine.model, step)
        self._collector.look()
        while len(self._queue) < self._staleness + (not remaining):
            version = step + remaining + len(self._queue) * self._updates  # policy version when it is trained
            if self._steps is not None and version >= self._steps:
                break
            cursor = self._batcher.state_dict()
            groups: Any = next(self._batcher, None)
            if groups is None:
                break
            self._queue.append((self._batcher.step, cursor))
            self._collector.put(groups, batch=self._batcher.step, version=version)

    def next(self, step: int) -> tuple[int, list[Sample]] | None:
        """Return the number and the samples of the next batch, or None after the last. `step`: updates made so far."""
        with compute_copies(self._engine.model):  # a sampler in this process may share the copies while it samples
            self._fill(step)
            if not self._queue:
                return None
            number, _ = self._queue.pop(0)
            return number, self._collector.take(number, version=step)

    def cursor(self) -> dict[str, Any]:
        """Return the position in the data before the oldest batch that is not in training yet."""
        return self._queue[0][1] if self._queue else self._batcher.state_dict()

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint stores in its `extra` dict: the responses that were sampled ahead. Collective."""
        return self._collector.state()

    def restore(self, extra: Mapping[str, Any]) -> None:
        self._collector.restore(extra)

    def dropped_reason(self, extra: Mapping[str, Any]) -> str | None:
        """Return why this run cannot use the responses that were sampled ahead and stored in a checkpoint.

        Return None if it can use them, or if there are none. `extra`: the dict that the checkpoint stores.
        """
        return self._collector.dropped_reason(extra)
