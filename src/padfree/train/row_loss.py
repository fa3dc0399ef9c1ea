"""What is minimised on one row: from the hidden states of a model to a loss to differentiate.

    RowLoss(model, batch) -> LossOutput         the one thing in which the ways of training differ inside a step
      TokenRowLoss      losses of tokens (SFT, policy losses), fused with the head where that can be
      PairRowLoss       losses of pairs of answers (DPO and its relatives)

`Engine` plans, weighs, lays rows out, calls this once for each row, differentiates and adds up. What else a row loss
needs, a teacher or a head of its own, it is made with. What it needs of a row is in the `MicroBatch`.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from padfree.batch import AttnContext
from padfree.head import fused_loss, score
from padfree.head.budget import Memory
from padfree.losses import (
    DPOSettings,
    LossInputs,
    LossOutput,
    TokenLossSettings,
    compute_loss,
    dpo_loss,
    is_elementwise,
    make_token_loss,
    needs_entropy,
)
from padfree.model import hidden_states, lm_head_of
from padfree.train.microbatch import MicroBatch


class RowLoss(Protocol):
    """The loss of one row, or this context rank's share of it. Losses and statistics of all rows and ranks add up."""

    keeps_groups: ClassVar[bool]
    """Whether samples of a group must lie on one row (`Sample.group`)."""

    def __call__(self, model: PreTrainedModel, batch: MicroBatch) -> LossOutput:
        """Called by `inside`: the head and the embeddings are whole. `token_losses` [T/cp] must be there."""


class TokenRowLoss:
    """Losses of tokens. One that is elementwise in the log-probabilities never stores logits."""

    keeps_groups: ClassVar[bool] = False

    def __init__(self, settings: TokenLossSettings, *, temperature: float = 1.0, memory: Memory = "speed") -> None:
        self.settings, self.temperature, self.memory = settings, temperature, memory

    def __call__(self, model: PreTrainedModel, batch: MicroBatch) -> LossOutput:
        settings, head = self.settings, lm_head_of(model)
        reduce = partial(sum_over_context, context=batch.local.context)
        hidden, labels = hidden_states(model, batch.local), batch.local.labels
        inputs = LossInputs.from_batch(batch.local, old_logprobs=batch.old_logprobs)
        entropy = needs_entropy(settings)
        if not is_elementwise(settings):
            scores = score(
                hidden, head, labels, temperature=self.temperature, entropy=entropy, num_labels=batch.num_labels,
                memory=self.memory,
            )  # fmt: skip
            return compute_loss(inputs.with_scores(scores.logprobs, scores.entropy), settings, reduce=reduce)
        fused = fused_loss(
            hidden, head, labels, make_token_loss(inputs, settings, reduce=reduce),
            temperature=self.temperature, entropy=entropy, num_labels=batch.num_labels, memory=self.memory,
        )  # fmt: skip
        with torch.no_grad():
            output = compute_loss(inputs.with_scores(fused.logprobs, fused.entropy), settings, reduce=reduce)
        return LossOutput(loss=fused.loss, token_losses=output.token_losses, statistics=output.statistics)


class PairRowLoss:
    """Losses of pairs of answers. Both are on one row, and may lie on different context ranks."""

    keeps_groups: ClassVar[bool] = True

    def __init__(self, settings: DPOSettings, *, temperature: float = 1.0, memory: Memory = "speed") -> None:
        self.settings, self.temperature, self.memory = settings, temperature, memory

    def __call__(self, model: PreTrainedModel, batch: MicroBatch) -> LossOutput:
        assert batch.pairs is not None
        assert batch.pair_weights is not None
        scores = score(
            hidden_states(model, batch.local), lm_head_of(model), batch.local.labels, temperature=self.temperature,
            num_labels=batch.num_labels, memory=self.memory,
        )  # fmt: skip
        reduce = partial(sum_over_context, context=batch.local.context)
        inputs = LossInputs.from_batch(batch.local, logprobs=scores.logprobs)
        return dpo_loss(inputs, self.settings, batch.pairs, batch.pair_weights, reduce=reduce)


def sum_over_context(values: Tensor, context: AttnContext) -> Tensor:
    """Sums over the ranks that share a row."""
    if context.world == 1:
        return values
    total = values.clone()
    dist.all_reduce(total, group=context.group)
    return total
