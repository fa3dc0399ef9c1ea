"""Evaluation on held-out samples: for each sample, the sums (e.g. of token losses) that metrics are computed from."""

from __future__ import annotations

import math
from typing import ClassVar, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from padfree.batch import IGNORE, LocalBatch
from padfree.head import matches, score
from padfree.losses import segment_sum
from padfree.model import hidden_states, lm_head_of
from padfree.tasks.micro_batch_loss import MicroBatchLoss, pairs_of

LARGEST_EXPONENT = 709.0
"""Largest x for which exp(x) is a finite float."""


class PackMeasure(Protocol):
    """Computes, for each held-out sample of a pack, the sums (e.g. of token losses) that metrics are computed from.

    With context parallelism, each rank computes its share of every sum.
    """

    names: ClassVar[tuple[str, ...]]
    keeps_groups: ClassVar[bool]

    def __call__(self, model: PreTrainedModel, batch: LocalBatch) -> Tensor:
        """Return [B, 1 + len(names)] float64: for each of B samples, a count and then one sum per metric in `names`.

        The count is the number of tokens, pairs or answers in the sums. A mean is a sum divided by the count.
        """

    def metrics(self, means: dict[str, float]) -> dict[str, float]:
        """Compute the metrics of an evaluation, by name. `means`: for each name in `names`, its sum over the
        held-out data divided by its count.
        """


class TokenMeasure:
    """Measures the negative log-likelihood of scored tokens, and how many of them are the model's most likely token."""

    names: ClassVar[tuple[str, ...]] = ("loss", "accuracy")
    keeps_groups: ClassVar[bool] = False

    def __init__(self, temperature: float = 1.0) -> None:
        self.temperature = temperature

    def __call__(self, model: PreTrainedModel, batch: LocalBatch) -> Tensor:
        head = lm_head_of(model)
        hidden = hidden_states(model, batch)
        scores = score(
            hidden, head, batch.labels, temperature=self.temperature, num_labels=batch.num_labels, kept=batch.kept
        )
        sums = [batch.labels != IGNORE, -scores.logprobs, matches(hidden, head, batch.labels)]
        return segment_sum(torch.stack([each.double() for each in sums], 1), batch.sample_index, batch.num_samples)

    def metrics(self, means: dict[str, float]) -> dict[str, float]:
        loss = means["loss"]
        return {**means, "perplexity": math.inf if loss > LARGEST_EXPONENT else math.exp(loss)}


class PairMeasure:
    """Measures the loss, the accuracy and the margin of pairs of answers.

    The result has one matrix row per sample. The numbers of a pair are in the row of the chosen sample, and the row of
    the rejected sample is 0.
    """

    names: ClassVar[tuple[str, ...]] = ("loss", "accuracy", "margin")
    keeps_groups: ClassVar[bool] = True

    def __init__(self, micro_batch_loss: MicroBatchLoss) -> None:
        self.micro_batch_loss = micro_batch_loss

    def __call__(self, model: PreTrainedModel, batch: LocalBatch) -> Tensor:
        output = self.micro_batch_loss(model, batch)
        assert output.pair_statistics is not None
        shares = output.pair_statistics
        values = torch.stack([shares[name] for name in ("count", "pair_loss", "accuracy", "margin")], 1)
        return values.new_zeros(batch.num_samples, 4).index_add(0, pairs_of(batch)[0][:, 0], values)

    def metrics(self, means: dict[str, float]) -> dict[str, float]:
        return means
