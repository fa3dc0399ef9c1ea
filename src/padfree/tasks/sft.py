"""`padfree sft`: the negative log-likelihood of the trained tokens of conversations, responses or plain text."""

from __future__ import annotations

from typing import ClassVar

from padfree.data import SFTDataSettings, load_sft
from padfree.tasks.measures import PackMeasure, TokenMeasure
from padfree.tasks.micro_batch_loss import MicroBatchLoss, TokenMicroBatchLoss
from padfree.tasks.reading import ReadSettings, TrainingData, of_store
from padfree.tasks.task import Task


class SFT(Task):
    loss: ClassVar[type[MicroBatchLoss]] = TokenMicroBatchLoss

    def read(self, settings: ReadSettings) -> TrainingData:
        text = SFTDataSettings(loss_on=settings.data.loss_on, **settings.text)
        return of_store(load_sft(settings.paths, settings.tokenizer, text, progress=settings.progress))

    def measure(self, micro_batch_loss: MicroBatchLoss, temperature: float) -> PackMeasure:
        return TokenMeasure(temperature)


TASK = SFT()
