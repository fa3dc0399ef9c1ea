"""`padfree reward`: a model with a scalar head, trained on pairs of answers by the Bradley-Terry loss with margins.

The score of an answer is the output of the head at its last token. A pack contains both answers of a pair, possibly on
different context ranks.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from padfree.batch import IGNORE, LocalBatch
from padfree.config.loss_settings import RewardModelSettings
from padfree.cp.shard import sum_over_context
from padfree.data import SFTDataSettings, load_pairs
from padfree.losses import LossOutput, reward_model_loss
from padfree.model import hidden_states
from padfree.model.scalar_head import scalar_head_of, scalar_scores
from padfree.tasks.measures import PackMeasure, PairMeasure
from padfree.tasks.micro_batch_loss import MicroBatchLoss, pairs_of
from padfree.tasks.reading import ReadSettings, TrainingData, of_store
from padfree.tasks.task import Task


def pack_scores(model: PreTrainedModel, batch: LocalBatch) -> Tensor:
    """Return the outputs of the scalar head at this rank's T/cp positions, and exactly 0 at positions without a label.

    The shape is [T/cp]. If samples share prefixes, it is [e] instead, with one entry for each of the rank's e labels.
    """
    scores = scalar_scores(hidden_states(model, batch), scalar_head_of(model))
    return torch.where(batch.labels != IGNORE, scores, 0.0)


class RewardMicroBatchLoss(MicroBatchLoss):
    """The Bradley-Terry loss of the pairs of answers in a pack."""

    keeps_groups: ClassVar[bool] = True
    settings: RewardModelSettings

    def __call__(self, model: PreTrainedModel, batch: LocalBatch) -> LossOutput:
        pairs, weights, margins = pairs_of(batch)
        return reward_model_loss(
            pack_scores(model, batch), batch.labels != IGNORE, batch.sample_index, batch.num_samples, self.settings,
            pairs, weights, margins=margins, reduce=partial(sum_over_context, context=batch.context),
        )  # fmt: skip


class RewardModel(Task):
    loss = RewardMicroBatchLoss

    def read(self, settings: ReadSettings) -> TrainingData:
        text = SFTDataSettings(**settings.text)
        return of_store(load_pairs(settings.paths, settings.tokenizer, text, progress=settings.progress, margins=True))

    def measure(self, micro_batch_loss: MicroBatchLoss, temperature: float) -> PackMeasure:
        return PairMeasure(micro_batch_loss)


TASK = RewardModel()
