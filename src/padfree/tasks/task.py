"""What a task is.

    rows of files   -> read        TrainingData: samples, or prompts that responses are still to be written to
    a global batch  -> prepare     the samples with what other models say of them: log-probabilities, advantages
    a pack          -> row_loss    a loss to differentiate
    held-out data   -> measure     sums of each sample, by which an evaluation is made

`Models` are the models that a task may ask. Every answer is the same on every rank, in any layout.
"""

from __future__ import annotations

import datetime
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

from padfree.batch import Sample, with_arrays
from padfree.config import Config, LossConfig
from padfree.data.prepare import Progress
from padfree.head.budget import Memory
from padfree.tasks.measures import PackMeasure
from padfree.tasks.micro_batch_loss import MicroBatchLoss
from padfree.tasks.reading import TrainingData

Logprobs = Callable[[Sequence[Sample]], list[NDArray[np.float32]]]
"""[n] for each sample, on every rank: entry j belongs to token j, 0 where it is not scored. A collective."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Models:
    """Whom a task may ask about samples; None: there is no such model in this run."""

    policy: Logprobs  # the model that is trained, as it is now
    reference: Logprobs | None = None
    teacher: Logprobs | None = None
    critic: Callable[[Sequence[Sample]], tuple[list[Sample], dict[str, float]]] | None = None


class Task(ABC):
    """What one command of training does."""

    @abstractmethod
    def read(
        self,
        config: Config,
        tokenizer: Any,
        *,
        progress: bool | Progress,
        import_reward: bool,
        day: datetime.date | None,
    ) -> TrainingData:
        """The data of `config.data`, tokenised."""

    @abstractmethod
    def micro_batch_loss(
        self, settings: Any, *, temperature: float, memory: Memory, teacher: PreTrainedModel | None = None
    ) -> MicroBatchLoss:
        """What is minimised; `settings` are the `TaskSettings` of this task."""

    @abstractmethod
    def measure(self, micro_batch_loss: MicroBatchLoss, temperature: float) -> PackMeasure:
        """What is measured on held-out samples."""

    def prepare(self, samples: list[Sample], models: Models, loss: LossConfig) -> tuple[list[Sample], dict[str, float]]:
        """The samples of a global batch with what its updates need of other models, and metrics of that."""
        if models.reference is not None:
            samples = with_arrays(samples, ref_logprobs=models.reference(samples))
        return samples, {}

    def waits_for_updates(self, loss: LossConfig, *, asks: bool) -> bool:
        """Whether `prepare` needs the weights that the batch before leaves; `asks`: there is a model besides."""
        return False

    def evaluation(self, samples: list[Sample], models: Models, loss: LossConfig) -> Callable[[], list[Sample]]:
        """Held-out samples as each evaluation measures them. The reference stays what it is, so once is enough."""
        prepared, _ = self.prepare(samples, models, loss)
        return lambda: prepared


def task_of(command: str) -> Task:
    """The task of a command: `TASK` of the module with that name."""
    found: Task = importlib.import_module(f"padfree.tasks.{command}").TASK
    return found
