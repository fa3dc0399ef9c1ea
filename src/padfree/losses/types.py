"""What a loss is given and what it returns.

    LossInputs    everything [T], aligned with the labels: entry t speaks of the token that position t predicts
    LossOutput    loss          scalar: Σ weightₜ · lossₜ over the tokens that are here
                  token_losses  [T] what was added up, to find the sample to blame for a loss that is not finite
                  statistics    name -> (sum, count), so that whoever holds all parts can add them up and divide once

The weights already carry the global normaliser (`weights.py`), hence losses of micro-batches and of ranks add up.
Nothing here waits for the device: statistics stay tensors.
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
"""name -> (sum, count), both scalar tensors without gradient; sums are float64."""


TRAINED = ("logprobs", "entropy", "values")
"""The inputs that gradients flow to."""


GIVEN_BY = {
    "ref_logprobs": "give one entry per token (in a run: set reference.path, or give the column 'ref_logprobs')",
    "rollout_logprobs": "give one entry per token (in a run: the column 'logprobs')",
}
"""Where an input comes from that a run is not given by itself."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LossInputs:
    """One micro-batch, or one context rank's share of it, as a loss sees it. A loss names the field it misses."""

    mask: Tensor  # [T] bool: the position has a label
    weights: Tensor  # [T] float32, 0 where the mask is False
    sample_index: Tensor  # [T] the sample of each token; the pad's is num_samples
    num_samples: int
    logprobs: Tensor | None = None  # [T] of the labels, under the policy being trained
    entropy: Tensor | None = None  # [T] of its distribution; only asked for where `needs_entropy`
    old_logprobs: Tensor | None = None  # [T] the trainer's own, before the update
    rollout_logprobs: Tensor | None = None  # [T] what the sampler reported
    ref_logprobs: Tensor | None = None  # [T]
    advantages: Tensor | None = None  # [T]
    values: Tensor | None = None  # [T] of the value model being trained
    old_values: Tensor | None = None  # [T] of the value model before the update
    returns: Tensor | None = None  # [T] what the value model is to predict

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
        """A batch with what came with its rollouts, and with what the trainer has computed for it."""
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
        """The same inputs with the scores of a forward pass."""
        return replace(self, logprobs=logprobs, entropy=entropy)

    def need(self, name: str, why: str) -> Tensor:
        """The field of this name, which the loss cannot do without.

        With 0 where there is no label: what stands there (a prompt's log-probability, say) may be anything, even NaN.
        Without gradient unless it comes from the model being trained: old and reference numbers are constants.
        """
        values: Tensor | None = getattr(self, name)
        if values is None:
            raise UserError(name, f"None, but {why} needs it", f"{GIVEN_BY.get(name, 'give one entry per token')}")
        values = checks.loss_input(name, values)
        if values.shape != self.mask.shape:
            raise UserError(
                name, f"shape {tuple(values.shape)} for {len(self.mask)} tokens", "give one entry per token"
            )
        values = torch.where(self.mask, values, 0.0)
        return values if name in TRAINED else values.detach()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LossOutput:
    """The weighted sum of a loss over the tokens that are here, and statistics that add up."""

    loss: Tensor  # scalar
    token_losses: Tensor | None = None  # [T] weighted, without gradient; None where pairs, not tokens, have losses
    statistics: Statistics = field(default_factory=dict)
    pair_statistics: dict[str, Tensor] | None = None  # [P] float64, of losses of pairs: this rank's share, and `count`


def weighted_loss(inputs: LossInputs, losses: Tensor, statistics: Mapping[str, Tensor]) -> LossOutput:
    """The output for the loss [T] of each token and statistics [T], which are summed over the scored tokens."""
    weighted = inputs.weights * losses
    count = inputs.mask.sum()
    shown = {name: torch.where(inputs.mask, values.detach(), 0.0) for name, values in statistics.items()}
    return LossOutput(
        loss=weighted.sum(),
        token_losses=weighted.detach(),
        statistics={name: (values.sum(dtype=torch.float64), count) for name, values in shown.items()},
    )


def merge_statistics(first: Statistics, second: Statistics) -> Statistics:
    """Statistics of two parts added up. A name that only one part has is kept as it is."""
    merged = dict(first)
    for name, (total, count) in second.items():
        if name in merged:
            total, count = merged[name][0] + total, merged[name][1] + count
        merged[name] = (total, count)
    return merged
