"""The loss of critics, and scores of models with a scalar head. `padfree.tasks.reward` has the loss of reward models.

    ValueMicroBatchLoss   rollouts in a pack   value of every prediction -> clipped squared error
    ScalarScorer          scores without gradients: rewards [B] of samples, values [n] of their tokens

The value of a token is read at the position that predicts the token: entry j of a sample's `values` is the reward that
the critic expects after it has seen only the tokens before token j.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from transformers import PreTrainedModel

from padfree.batch import LocalBatch
from padfree.losses import (
    LossInputs,
    LossOutput,
    ValueSettings,
    segment_sum,
    value_loss,
)
from padfree.model.scalar_head import scalar_head_of
from padfree.optim.master_weights import compute_copies
from padfree.sample import Sample
from padfree.sharding.parallelize import inside
from padfree.tasks.reward import pack_scores
from padfree.train.finite_checks import check_scores
from padfree.train.scorer import Scorer


class ValueMicroBatchLoss:
    """Clipped squared error between predicted values and the samples' `returns`."""

    keeps_groups: ClassVar[bool] = False
    teacher: ClassVar[None] = None

    def __init__(self, settings: ValueSettings) -> None:
        self.settings = settings

    def __call__(self, model: PreTrainedModel, batch: LocalBatch) -> LossOutput:
        return value_loss(LossInputs.from_batch(batch, values=pack_scores(model, batch)), self.settings)


class ScalarScorer(Scorer):
    """Computes values or rewards of samples with a parallelized model that has a scalar head."""

    def _check_head(self, model: PreTrainedModel) -> None:
        scalar_head_of(model)

    @torch.no_grad()
    def values(self, samples: Sequence[Sample]) -> list[NDArray[np.float32]]:
        """Return the values [n] of each sample's tokens, the same on every rank; 0 for a token that is not scored."""
        return self._score_tokens(samples, pack_scores, "value")

    @torch.no_grad()
    def rewards(self, samples: Sequence[Sample]) -> NDArray[np.float32]:
        """Return the score at the end of each of B samples, [B], on every rank."""
        training = self.model.training
        self.model.train(False)
        found = torch.zeros(len(samples), dtype=torch.float64, device=self.mesh.device)
        pack_settings = replace(self.packer.pack_settings, ends=True, pad_token=self.model.config.pad_token_id)
        with compute_copies(self.model):
            for batch, indices in self.packer.packs(samples, self.packer.plan(samples), pack_settings):
                scores = inside(self.model, pack_scores, batch.local)
                if not batch.is_filler:
                    sums = segment_sum(scores, batch.local.sample_index, batch.local.num_samples)
                    found[torch.from_numpy(indices).to(self.mesh.device)] = sums
        self.model.train(training)
        dist.all_reduce(found, group=self.mesh.loss.group)
        ends: NDArray[np.float32] = found.float().cpu().numpy()
        check_scores(np.split(ends, len(samples)), samples, setting=self.setting, what="score")
        return ends
