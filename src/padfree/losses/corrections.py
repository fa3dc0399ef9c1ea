"""Corrections for differences between the log-probabilities of the sampler (log μ) and of the trainer (log π_old).

With the default settings, and d = log π_old - log μ, each token gets a factor:

    token TIS       clamp(exp(d), low, high)
    sequence TIS    clamp(exp(Σ d), low, high)
    IcePop          exp(d) if low <= exp(d) <= high, else 0
    sequence mask   1 if low <= exp(mean d) <= high, else 0
    OPSM            0 if advantage < 0 and mean(log π_old - log π) > delta, else 1

π is the policy being trained. Sums and means are over a sequence's scored tokens. Factors multiply only the policy
objective.
"""

from __future__ import annotations

import torch
from torch import Tensor

from padfree.config.policy_settings import (
    Correction,
    IcePopSettings,
    OPSMSettings,
    SequenceMaskSettings,
    SequenceTISSettings,
    TokenTISSettings,
)
from padfree.losses.kl import LOG_RATIO_BOUND
from padfree.losses.segment_sums import Reduce, no_reduce, segment_mean, segment_sum, spread
from padfree.losses.types import LossInputs


def token_factor(corrections: tuple[Correction, ...], trainer: Tensor, sampler: Tensor) -> Tensor:
    """Return, for each token, the product of the factors of the token-level corrections (token TIS, IcePop), [T].

    `trainer`, `sampler` [T]: the log-probabilities that the trainer computed and the sampler reported.
    """
    ratio = _ratio(trainer - sampler)
    factor = torch.ones_like(ratio)
    for correction in corrections:
        if isinstance(correction, TokenTISSettings):
            factor = factor * ratio.clamp(min=correction.low, max=correction.high)
        elif isinstance(correction, IcePopSettings):
            inside = (ratio >= correction.low) & (ratio <= correction.high)
            factor = factor * torch.where(inside, ratio, 0.0)
    return factor


def sequence_factor(
    corrections: tuple[Correction, ...],
    inputs: LossInputs,
    *,
    trainer: Tensor,
    sampler: Tensor | None,
    current: Tensor | None,
    reduce: Reduce = no_reduce,
) -> Tensor:
    """Return the product [T] of each token's factors from sequence TIS, sequence mask and OPSM (off-policy sequence
    masking).

    `trainer`, `sampler` and `current` are log-probabilities [T] without gradient. `current`, of the policy being
    trained, is only needed for OPSM, and `sampler` only for the other corrections.
    """
    mask, sample_index, num_samples = inputs.mask, inputs.sample_index, inputs.num_samples
    factor = torch.ones_like(trainer)
    for correction in corrections:
        if isinstance(correction, SequenceTISSettings):
            assert sampler is not None
            ratio = _sequence_ratio(inputs, trainer - sampler, mean=correction.geometric, reduce=reduce)
            weight = ratio.clamp(min=correction.low, max=correction.high)
            factor = factor * spread(weight, sample_index).to(factor)
        elif isinstance(correction, SequenceMaskSettings):
            assert sampler is not None
            if correction.statistic == "token":
                ratio = _ratio(trainer - sampler)
                outside = mask & ((ratio < correction.low) | (ratio > correction.high))
                keep = reduce(segment_sum(outside, sample_index, num_samples)) == 0
            else:
                ratio = _sequence_ratio(inputs, trainer - sampler, mean=correction.statistic == "mean", reduce=reduce)
                keep = (ratio >= correction.low) & (ratio <= correction.high)
            factor = factor * spread(keep.to(factor), sample_index)
        elif isinstance(correction, OPSMSettings):
            assert current is not None
            moved = segment_mean(trainer - current, mask, sample_index, num_samples, reduce)
            too_far = spread((moved > correction.delta).to(factor), sample_index) > 0
            harmful = inputs.need("advantages", "OPSM") < 0
            factor = torch.where(too_far & harmful, 0.0, factor)
    return factor


def _sequence_ratio(inputs: LossInputs, difference: Tensor, *, mean: bool, reduce: Reduce) -> Tensor:
    """Return the importance ratio of each sequence, [B] in float64: exp(sum of `difference` over the sequence).

    `difference` [T] are differences of log-probabilities. If `mean` is True, the mean replaces the sum.
    """
    if mean:
        return _ratio(segment_mean(difference, inputs.mask, inputs.sample_index, inputs.num_samples, reduce))
    total = segment_sum(torch.where(inputs.mask, difference, 0.0), inputs.sample_index, inputs.num_samples)
    return _ratio(reduce(total))


def _ratio(log_ratio: Tensor) -> Tensor:
    return torch.exp(log_ratio.clamp(max=LOG_RATIO_BOUND))
