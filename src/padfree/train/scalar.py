"""Models with a scalar head in training: reward models on pairs, and critics.

    RewardRowLoss   pairs of answers on a row    score at the end of each -> Bradley-Terry loss with margins
    ValueRowLoss    rollouts on a row            value of every prediction -> clipped squared error
    ScalarScorer    the same numbers without gradient: rewards [B] of samples, values [n] of their tokens

The value of a token is read where it is predicted, before it is written: entry j of a sample's `values` is what the
critic expects from token j on, having seen the tokens before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from padfree.batch import IGNORE, LocalBatch, Sample
from padfree.cp.shard import sum_over_context
from padfree.losses import (
    LossInputs,
    LossOutput,
    RewardModelSettings,
    ValueSettings,
    reward_model_loss,
    segment_sum,
    value_loss,
)
from padfree.model import hidden_states
from padfree.model.scalar import scalar_head_of, scalar_scores
from padfree.optim.masters import computing
from padfree.sharding.parallelize import inside
from padfree.train.finite import check_scores
from padfree.train.microbatch import make_micro_batch
from padfree.train.row_loss import pairs_of
from padfree.train.scorer import Scorer


def row_scores(model: PreTrainedModel, batch: LocalBatch) -> Tensor:
    """[T/cp], or [e]: numbers of this rank's entries, exactly 0 where there is no label."""
    scores = scalar_scores(hidden_states(model, batch), scalar_head_of(model))
    return torch.where(batch.labels != IGNORE, scores, 0.0)


class RewardRowLoss:
    """The Bradley-Terry loss of pairs of answers. Both are on one row, and may lie on different context ranks."""

    keeps_groups: ClassVar[bool] = True

    def __init__(self, settings: RewardModelSettings) -> None:
        self.settings = settings

    def __call__(self, model: PreTrainedModel, batch: LocalBatch) -> LossOutput:
        pairs, weights, margins = pairs_of(batch)
        return reward_model_loss(
            row_scores(model, batch), batch.labels != IGNORE, batch.sample_index, batch.num_samples, self.settings,
            pairs, weights, margins=margins,
            reduce=partial(sum_over_context, context=batch.context),
        )  # fmt: skip


class ValueRowLoss:
    """The clipped squared error of values, against the returns that the samples bring."""

    keeps_groups: ClassVar[bool] = False

    def __init__(self, settings: ValueSettings) -> None:
        self.settings = settings

    def __call__(self, model: PreTrainedModel, batch: LocalBatch) -> LossOutput:
        return value_loss(LossInputs.from_batch(batch, values=row_scores(model, batch)), self.settings)


class ScalarScorer(Scorer):
    """A parallelized model with a scalar head, and how rows are made for it."""

    def _check_head(self, model: PreTrainedModel) -> None:
        scalar_head_of(model)

    @torch.no_grad()
    def values(self, samples: Sequence[Sample]) -> list[NDArray[np.float32]]:
        """[n] for each sample, on every rank; 0 where a token is not scored."""
        return self._of_tokens(samples, row_scores, "value")

    @torch.no_grad()
    def rewards(self, samples: Sequence[Sample]) -> NDArray[np.float32]:
        """[B] the score at the end of each sample, on every rank."""
        training = self.model.training
        self.model.train(False)
        found = torch.zeros(len(samples), dtype=torch.float64, device=self.mesh.device)
        rows, plan = replace(self.rows, ends=True, pad_token=self.model.config.pad_token_id), self.plan(samples)
        with computing(self.model):
            for indices, width in plan.rows_of(self.mesh.data.rank):
                batch = make_micro_batch(samples, indices, self.mesh, rows, prefixes=plan.prefixes, width=width)
                scores = inside(self.model, row_scores, batch.local)
                if not batch.is_filler:
                    sums = segment_sum(scores, batch.local.sample_index, batch.local.num_samples)
                    found[torch.from_numpy(indices).to(self.mesh.device)] = sums
        self.model.train(training)
        dist.all_reduce(found, group=self.mesh.loss.group)
        ends: NDArray[np.float32] = found.float().cpu().numpy()
        check_scores(np.split(ends, len(samples)), samples, setting=self.setting, what="score")
        return ends
