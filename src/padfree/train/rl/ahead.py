"""The batches of a run whose responses are sampled ahead of their training (`rollout.staleness`).

    staleness 2      in training   1     2     3
                     in the queue  2 3   3 4   4 5

The batcher is ahead of training by the queue. A checkpoint therefore holds its place before the oldest batch of the
queue: a resumed run takes the same batches again, and the queue knows what there is of them already.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from padfree.batch import Sample
from padfree.config import Config
from padfree.optim.masters import computing
from padfree.rollout.queue import AheadQueue
from padfree.train.engine import Engine
from padfree.train.training_data import Batcher


class BatchesAhead:
    """Takes batches of prompts from the batcher, and gives their samples in the same order."""

    def __init__(self, config: Config, batcher: Batcher, writer: AheadQueue[Any], engine: Engine) -> None:
        self._batcher, self._writer, self._engine = batcher, writer, engine
        self._staleness, self._steps = config.rollout.staleness, config.run.steps
        self._updates = config.loss.epochs * config.loss.mini_batches  # of a batch
        self._queue: list[tuple[int, dict[str, Any]]] = []  # numbers, and places in the data before them

    @property
    def timings(self) -> Mapping[str, float]:
        return self._writer.timings

    def fill(self, step: int, *, remaining: int = 0) -> None:
        """Hand the present weights over, and have `staleness` batches sampled besides the one that is next.

        `remaining`: so many updates are still to be made with the batch that is in training.
        """
        with computing(self._engine.model):  # the sampler gets the weights in the type that training computes in
            self._writer.exchange(self._engine.model, step)
        self._writer.look()
        while len(self._queue) < self._staleness + (not remaining):
            version = step + remaining + len(self._queue) * self._updates  # when its turn has come
            if self._steps is not None and version >= self._steps:
                break
            cursor = self._batcher.state_dict()
            groups: Any = next(self._batcher, None)
            if groups is None:
                break
            self._queue.append((self._batcher.step, cursor))
            self._writer.put(groups, batch=self._batcher.step, version=version)

    def next(self, step: int) -> tuple[int, list[Sample]] | None:
        """The number and the samples of the next batch, which is trained after `step` optimizer steps."""
        self.fill(step)
        if not self._queue:
            return None
        number, _ = self._queue.pop(0)
        return number, self._writer.take(number, version=step)

    def cursor(self) -> dict[str, Any]:
        """The place in the data before all that is not in training yet."""
        return self._queue[0][1] if self._queue else self._batcher.state_dict()

    @property
    def key(self) -> str:
        """Of what a checkpoint holds of the queue."""
        return self._writer.key

    def state(self) -> dict[str, Any]:
        """For `extra` of a checkpoint. Every rank calls it."""
        return self._writer.state()

    def restore(self, extra: Mapping[str, Any]) -> None:
        self._writer.restore(extra)
