"""Compute the differentiable loss of one pack (samples laid end to end) with a model.

`MicroBatchLoss` is the base class. Its subclasses are the only part of a training step that differs between tasks:
`TokenMicroBatchLoss` sums losses of tokens (SFT, policy losses). Losses of whole answers are in the file of their task.

`Engine` plans a step, builds the packs (`LocalBatch`), calls the loss once for each pack, and runs backward.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from padfree.batch import LocalBatch
from padfree.cp.ranges import to_device
from padfree.cp.shard import sum_over_context
from padfree.head import fused_loss, score
from padfree.head.budget import Memory
from padfree.losses import (
    LossInputs,
    LossOutput,
    TokenLossSettings,
    compute_loss,
    is_elementwise,
    make_token_loss,
    needs_entropy,
    preference_pairs,
)
from padfree.model import hidden_states, lm_head_of


class MicroBatchLoss(ABC):
    """Base class: computes the loss of one pack, or this rank's share if context ranks share the pack.

    The loss of a step is the sum over all packs and ranks. Statistics are summed in the same way.
    """

    keeps_groups: ClassVar[bool] = False
    """Whether samples with the same `Sample.group` must be in one pack."""

    def __init__(
        self,
        settings: Any,
        teacher: PreTrainedModel | None = None,
        *,
        temperature: float = 1.0,
        memory: Memory = "speed",
    ) -> None:
        """`settings`: the settings of the loss. `teacher`: a frozen model, for losses that need one."""
        self.settings, self.temperature, self.memory = settings, temperature, memory
        self.teacher = None if teacher is None else teacher.train(False)  # without dropout, which is noise

    @abstractmethod
    def __call__(self, model: PreTrainedModel, batch: LocalBatch) -> LossOutput:
        """Return the loss of the pack `batch`. The output must also contain the losses of this rank's tokens
        (`token_losses`).

        The weights of the head and of the embeddings must be gathered (not sharded) during the call;
        `padfree.sharding.parallelize.inside` does this.
        """


def scored_inputs(model: PreTrainedModel, batch: LocalBatch, temperature: float, memory: Memory) -> LossInputs:
    """Run the model on a pack. Return the inputs of a loss function, such as the labels' log-probabilities [T/cp].

    `memory`: how much memory the logits may take (see `padfree.head.score`).
    """
    scores = score(
        hidden_states(model, batch), lm_head_of(model), batch.labels, temperature=temperature,
        num_labels=batch.num_labels, kept=batch.kept, memory=memory,
    )  # fmt: skip
    return LossInputs.from_batch(batch, logprobs=scores.logprobs)


class TokenMicroBatchLoss(MicroBatchLoss):
    """A loss that is a sum over tokens, such as SFT and policy losses.

    If the loss of a token depends only on its log-probability, no logits are stored.
    """

    settings: TokenLossSettings

    def __call__(self, model: PreTrainedModel, batch: LocalBatch) -> LossOutput:
        settings, head = self.settings, lm_head_of(model)
        reduce = partial(sum_over_context, context=batch.context)
        hidden, labels = hidden_states(model, batch), batch.labels
        inputs = LossInputs.from_batch(batch)
        entropy = needs_entropy(settings)
        if not is_elementwise(settings):
            scores = score(
                hidden, head, labels, temperature=self.temperature, entropy=entropy, num_labels=batch.num_labels,
                kept=batch.kept, memory=self.memory,
            )  # fmt: skip
            return compute_loss(inputs.with_scores(scores.logprobs, scores.entropy), settings, reduce=reduce)
        fused = fused_loss(
            hidden, head, labels, make_token_loss(inputs, settings, reduce=reduce),
            temperature=self.temperature, entropy=entropy, num_labels=batch.num_labels, kept=batch.kept,
            memory=self.memory,
        )  # fmt: skip
        with torch.no_grad():
            output = compute_loss(inputs.with_scores(fused.logprobs, fused.entropy), settings, reduce=reduce)
        return LossOutput(loss=fused.loss, token_losses=output.token_losses, statistics=output.statistics)


def pairs_of(batch: LocalBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Return the P pairs of answers in a pack: sample indices [P, 2] (chosen, rejected), weights [P], margins [P]."""
    pairs = preference_pairs(() if batch.is_filler else batch.samples)
    weights = np.full(len(pairs), 2.0 / batch.batch_samples)
    terms = [batch.samples[index].terms or {} for index in pairs[:, 0].tolist()]
    margins = np.array([term.get("margin", 0.0) for term in terms], dtype=np.float64)
    device = batch.labels.device
    return to_device(pairs, device), to_device(weights, device), to_device(margins, device)
