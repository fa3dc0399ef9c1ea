"""The interface of a task, e.g. SFT or DPO.

Each line shows an input, the method or attribute of `Task` that uses the input, and the result.

    rows of files   -> read               samples, or prompts for which the run generates responses
    a global batch  -> prepare            the batch with values of other models: log-probabilities, advantages
    a pack          -> loss               a loss that can be differentiated
    held-out data   -> measure            sums for each sample, from which an evaluation computes its metrics
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from padfree.config import LossConfig
from padfree.sample import Sample, with_arrays
from padfree.tasks.measures import PackMeasure
from padfree.tasks.micro_batch_loss import MicroBatchLoss
from padfree.tasks.reading import ReadSettings, TrainingData

Logprobs = Callable[[Sequence[Sample]], list[NDArray[np.float32]]]
"""Returns the log-probabilities [n] of each sample, the same on every rank. Collective.

Entry j belongs to token j and is 0 if token j is not scored.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Models:
    """Functions that score samples, one for each model of a run. The function of a model that the run lacks is None."""

    policy: Logprobs  # the model in training, with its current weights
    reference: Logprobs | None = None
    teacher: Logprobs | None = None
    critic: Callable[[Sequence[Sample]], tuple[list[Sample], dict[str, float]]] | None = None


class Task(ABC):
    """Base class: what one training command, e.g. `padfree dpo`, reads, minimises and measures."""

    loss: ClassVar[type[MicroBatchLoss]]
    """The class of the loss to minimise. The engine creates the loss with the `TaskSettings` of this task."""

    @abstractmethod
    def read(self, settings: ReadSettings) -> TrainingData:
        """Read and tokenise the data."""

    @abstractmethod
    def measure(self, micro_batch_loss: MicroBatchLoss, temperature: float) -> PackMeasure:
        """Return the object that computes the metrics of held-out samples."""

    def prepare(self, samples: list[Sample], models: Models, loss: LossConfig) -> tuple[list[Sample], dict[str, float]]:
        """Score samples with `models`. Return the samples with the scores that training needs, and metrics by name.

        An example of a score is the log-probability of each token under the reference model.
        """
        if models.reference is not None:
            samples = with_arrays(samples, ref_logprobs=models.reference(samples))
        return samples, {}

    def waits_for_updates(self, loss: LossConfig, *, asks: bool) -> bool:
        """Return whether `prepare` can be called only after the updates of the previous batch are done.

        An example is a task whose `prepare` uses the weights that are being trained. `asks`: whether the run has a
        reference model, a teacher or a critic.
        """
        return False

    def evaluation(self, samples: list[Sample], models: Models, loss: LossConfig) -> Callable[[], list[Sample]]:
        """Return a function that returns the held-out samples with all arrays that the metrics are computed from.

        An example is the array of the reference's log-probabilities. The function is called before each evaluation. The
        reference is frozen, so it scores the samples only once.
        """
        prepared, _ = self.prepare(samples, models, loss)
        return lambda: prepared


def task_of(command: str) -> Task:
    """Return the task of a command, e.g. "sft": the variable `TASK` of the module `padfree.tasks.sft`."""
    found: Task = importlib.import_module(f"padfree.tasks.{command}").TASK
    return found
