"""`padfree dpo`: pairs of answers, compared by their log-probabilities (DPO, IPO, hinge, SimPO, ORPO).

Both answers of a pair are in one pack. They may be on different context ranks.
"""

from __future__ import annotations

import datetime
from functools import partial
from typing import Any, ClassVar

from transformers import PreTrainedModel

from padfree.batch import LocalBatch
from padfree.config import DataConfig, RolloutConfig
from padfree.config.loss_settings import DPOSettings
from padfree.cp.shard import sum_over_context
from padfree.data import SFTDataSettings, load_pairs
from padfree.data.image_processor import ImageSettings
from padfree.data.prepare import Progress
from padfree.head.budget import Memory
from padfree.losses import LossOutput, dpo_loss
from padfree.tasks.measures import PackMeasure, PairMeasure
from padfree.tasks.micro_batch_loss import MicroBatchLoss, pairs_of, scored_inputs
from padfree.tasks.reading import TrainingData, of_store, text_settings
from padfree.tasks.task import Task


class PairMicroBatchLoss:
    """The preference loss (DPO, IPO, hinge, SimPO or ORPO) of the pairs of answers in a pack."""

    keeps_groups: ClassVar[bool] = True
    teacher: ClassVar[None] = None

    def __init__(self, settings: DPOSettings, *, temperature: float = 1.0, memory: Memory = "speed") -> None:
        self.settings, self.temperature, self.memory = settings, temperature, memory

    def __call__(self, model: PreTrainedModel, batch: LocalBatch) -> LossOutput:
        reduce = partial(sum_over_context, context=batch.context)
        inputs = scored_inputs(model, batch, self.temperature, self.memory)
        pairs, weights, _ = pairs_of(batch)
        return dpo_loss(inputs, self.settings, pairs, weights, reduce=reduce)


class DPO(Task):
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
        settings = SFTDataSettings(**text_settings(data, day, images))
        return of_store(load_pairs(list(data.path), tokenizer, settings, progress=progress))

    def micro_batch_loss(
        self, settings: DPOSettings, *, temperature: float, memory: Memory, teacher: PreTrainedModel | None = None
    ) -> MicroBatchLoss:
        return PairMicroBatchLoss(settings, temperature=temperature, memory=memory)

    def measure(self, micro_batch_loss: MicroBatchLoss, temperature: float) -> PackMeasure:
        return PairMeasure(micro_batch_loss)


TASK = DPO()
