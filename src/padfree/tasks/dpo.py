"""`padfree dpo`: pairs of answers, compared by their log-probabilities (DPO, IPO, hinge, SimPO, ORPO).

A pack contains both answers of a pair, possibly on different context ranks.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar

from transformers import PreTrainedModel

from padfree.batch import LocalBatch
from padfree.config.loss_settings import DPOSettings
from padfree.cp.shard import sum_over_context
from padfree.data import SFTDataSettings, load_pairs
from padfree.losses import LossOutput, dpo_loss
from padfree.tasks.measures import PackMeasure, PairMeasure
from padfree.tasks.micro_batch_loss import MicroBatchLoss, pairs_of, scored_inputs
from padfree.tasks.reading import ReadSettings, TrainingData, of_store
from padfree.tasks.task import Task


class PairMicroBatchLoss(MicroBatchLoss):
    """The preference loss (DPO, IPO, hinge, SimPO or ORPO) of the pairs of answers in a pack."""

    keeps_groups: ClassVar[bool] = True
    settings: DPOSettings

    def __call__(self, model: PreTrainedModel, batch: LocalBatch) -> LossOutput:
        reduce = partial(sum_over_context, context=batch.context)
        inputs = scored_inputs(model, batch, self.temperature, self.memory)
        pairs, weights, _ = pairs_of(batch)
        return dpo_loss(inputs, self.settings, pairs, weights, reduce=reduce)


class DPO(Task):
    loss = PairMicroBatchLoss

    def read(self, settings: ReadSettings) -> TrainingData:
        text = SFTDataSettings(**settings.text)
        return of_store(load_pairs(settings.paths, settings.tokenizer, text, progress=settings.progress))

    def measure(self, micro_batch_loss: MicroBatchLoss, temperature: float) -> PackMeasure:
        return PairMeasure(micro_batch_loss)


TASK = DPO()
