"""`padfree sft`: the negative log-likelihood of the trained tokens of conversations, responses or plain text."""

from __future__ import annotations

import datetime
from typing import Any

from transformers import PreTrainedModel

from padfree.config import DataConfig, RolloutConfig
from padfree.config.loss_settings import SFTSettings
from padfree.data import SFTDataSettings, load_sft
from padfree.data.image_processor import ImageSettings
from padfree.data.prepare import Progress
from padfree.head.budget import Memory
from padfree.tasks.measures import PackMeasure, TokenMeasure
from padfree.tasks.micro_batch_loss import MicroBatchLoss, TokenMicroBatchLoss
from padfree.tasks.reading import TrainingData, of_store, text_settings
from padfree.tasks.task import Task


class SFT(Task):
    def read(
        self,
        data: DataConfig,
        rollout: RolloutConfig,
        tokenizer: Any,
        *,
        progress: bool | Progress,
        import_reward: bool,
        day: datetime.date | None,
        images: ImageSettings | None = None,
    ) -> TrainingData:
        settings = SFTDataSettings(loss_on=data.loss_on, **text_settings(data, day, images))
        return of_store(load_sft(list(data.path), tokenizer, settings, progress=progress))

    def micro_batch_loss(
        self, settings: SFTSettings, *, temperature: float, memory: Memory, teacher: PreTrainedModel | None = None
    ) -> MicroBatchLoss:
        return TokenMicroBatchLoss(settings, temperature=temperature, memory=memory)

    def measure(self, micro_batch_loss: MicroBatchLoss, temperature: float) -> PackMeasure:
        return TokenMeasure(temperature)


TASK = SFT()
