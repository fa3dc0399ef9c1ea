"""The input and the output of a loss.

    LossInputs    everything [T], aligned with the labels: element t describes the token that position t predicts
    LossOutput    loss          scalar: Σ weightₜ · lossₜ over these tokens
                  token_losses  [T] the summands, to find the sample that makes a loss non-finite
                  statistics    name -> (sum, count): sums and counts of micro-batches are added, then divided once

T is the number of tokens. The weights include the global normaliser, so the losses of micro-batches and ranks can be
added. Nothing here synchronises with the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from padfree.batch import IGNORE, LocalBatch, PackedBatch
from padfree.errors import UserError
from padfree.losses import checks

Statistics = dict[str, tuple[Tensor, Tensor]]
"""Maps the name of a statistic to (sum, count), two scalar tensors without gradient."""


TRAINED = ("logprobs", "entropy", "values")
"""The fields of `LossInputs` that may have a gradient."""


GIVEN_BY = {
    "ref_logprobs": "give one value per token (in a run: set reference.path, or give the column 'ref_logprobs')",
    "rollout_logprobs": "give one value per token (in a run: give the column 'logprobs')",
}
"""For error messages: how a user can supply an input of the loss that the run does not compute."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LossInputs:
    """The tokens of a micro-batch, or the part of them on one context rank, with the values that a loss needs."""

    mask: Tensor  # [T] bool: whether the position has a label
    weights: Tensor  # [T] float32, 0 where the mask is False
    sample_index: Tensor  # [T] the index of each token's sample; num_samples for the pad
    num_samples: int
    logprobs: Tensor | None = None  # [T] log-probabilities of the labels under the policy being trained
    entropy: Tensor | None = None  # [T] entropy of the policy being trained; only needed if `needs_entropy`
    old_logprobs: Tensor | None = None  # [T] log-probabilities that the trainer computed before the update
    rollout_logprobs: Tensor | None = None  # [T] log-probabilities that the sampler reported
    ref_logprobs: Tensor | None = None  # [T]
    advantages: Tensor | None = None  # [T]
    values: Tensor | None = None  # [T] outputs of the value model being trained
    old_values: Tensor | None = None  # [T] outputs of the value model before the update
    returns: Tensor | None = None  # [T] targets of the value model

    def __post_init__(self) -> None:
        checks.mask("mask", self.mask)
        checks.quantity("weights", self.weights)
        checks.index("sample_index", self.sample_index)
        checks.same_length("tokens in mask", len(self.mask), weights=self.weights, sample_index=self.sample_index)

    @staticmethod
    def from_batch(
        batch: PackedBatch | LocalBatch,
        *,
        logprobs: Tensor | None = None,
        entropy: Tensor | None = None,
        values: Tensor | None = None,
    ) -> LossInputs:
        """Return the inputs of a loss for a batch: the arrays of its samples, such as advantages, and the given
        arguments.

        The arguments `logprobs`, `entropy` and `values` were computed by the trainer.
        """
        rollout = batch.rollout
        return LossInputs(
            mask=batch.labels != IGNORE,
            weights=batch.weights,
            sample_index=batch.sample_index,
            num_samples=batch.num_samples,
            logprobs=logprobs,
            entropy=entropy,
            old_logprobs=None if rollout is None else rollout.old_logprobs,
            rollout_logprobs=None if rollout is None else rollout.logprobs,
            ref_logprobs=None if rollout is None else rollout.ref_logprobs,
            advantages=None if rollout is None else rollout.advantages,
            values=values,
            old_values=None if rollout is None else rollout.values,
            returns=None if rollout is None else rollout.returns,
        )

    def with_scores(self, logprobs: Tensor, entropy: Tensor | None = None) -> LossInputs:
        """Return a copy of these inputs with new log-probabilities and entropies."""
        return replace(self, logprobs=logprobs, entropy=entropy)

    def need(self, name: str, why: str) -> Tensor:
        """Return the field `name` [T], with 0 at positions without a label. Raise a `UserError` if the field is None.

        `why` names the part of the loss that needs the field, for the message.
        """
        values: Tensor | None = getattr(self, name)
        if values is None:
            raise UserError(
                name, f"is missing, but {why} needs it", f"{GIVEN_BY.get(name, 'give one value per token')}"
            )
        values = checks.loss_input(name, values)
        if values.shape != self.mask.shape:
            raise UserError(
                name,
                f"has shape {tuple(values.shape)}, but there are {len(self.mask)} tokens",
                "give one value per token",
            )
        values = torch.where(self.mask, values, 0.0)  # values at positions without a label can be NaN
        return values if name in TRAINED else values.detach()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LossOutput:
    """The weighted sum of a loss over some tokens, and statistics that can be added to those of other tokens."""

    loss: Tensor  # scalar
    token_losses: Tensor | None = None  # [T] weighted losses, without gradient; None if the losses belong to pairs
    statistics: Statistics = field(default_factory=dict)
    # name -> [P] float64: a statistic of each of P pairs times this rank's share of the pair; "count" holds the shares
    pair_statistics: dict[str, Tensor] | None = None


def weighted_loss(inputs: LossInputs, losses: Tensor, statistics: Mapping[str, Tensor]) -> LossOutput:
    """Make a `LossOutput` from losses [T] and statistics [T] of single tokens.

    Losses are multiplied by the token weights and summed. Statistics are summed over the scored tokens.
    """
    weighted = inputs.weights * losses
    count = inputs.mask.sum()
    shown = {name: torch.where(inputs.mask, values.detach(), 0.0) for name, values in statistics.items()}
    return LossOutput(
        loss=weighted.sum(),
        token_losses=weighted.detach(),
        statistics={name: (values.sum(dtype=torch.float64), count) for name, values in shown.items()},
    )


def merge_statistics(first: Statistics, second: Statistics) -> Statistics:
    """Return the sum of the statistics of two parts of a batch. A statistic that only one part has is kept."""
    merged = dict(first)
    for name, (total, count) in second.items():
        if name in merged:
            total, count = merged[name][0] + total, merged[name][1] + count
        merged[name] = (total, count)
    return merged
