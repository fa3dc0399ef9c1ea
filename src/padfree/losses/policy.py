"""Policy losses on packed tokens.

With r = π(token) / π_old(token), A the advantage and sg the identity without gradient, the loss of a token is

    clip        max(-r A, -clamp(r, 1 - low, 1 + high) A)          PPO; high > low is DAPO's clip-higher
                and, with `dual` c, at most -c A where A < 0       dual clip: a bad token that became likely is bounded
    gspo        the same with the sequence ratio s in place of r   s = exp(mean over the sequence of log r)
    cispo       -sg(clamp(r, 1 - low, 1 + high)) A log π           every token keeps its gradient, its weight is bounded
    reinforce   -A log π

times the corrections (`corrections.py`), plus kl_coefficient · KL(π ‖ reference), minus entropy_coefficient · entropy.

GSPO is written s·π/sg(π) token by token (GSPO-token in the paper): the value is that of s, and so is the gradient of a
sequence whose tokens share one advantage and one weight, as all weights of `weights.py` do; but each token's gradient
is its own, so that context ranks exchange numbers, not gradients.

Everything is elementwise in (log π, entropy) except GSPO and OPSM, which need the current log-probabilities of a
whole sequence, and sequence-level corrections when the current policy is its own old one: `is_elementwise`. Those need
scores first; the others can be computed, gradient included, while a chunk of logits exists: `PolicyTerms.token_loss`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from padfree.losses import checks
from padfree.losses.corrections import SAMPLER_CORRECTIONS, TOKEN_CORRECTIONS, sequence_factor, token_factor
from padfree.losses.kl import LOG_RATIO_BOUND, kl_divergence
from padfree.losses.segments import Reduce, no_reduce, segment_mean, spread
from padfree.losses.settings import (
    CISPOSettings,
    ClipSettings,
    GSPOSettings,
    OPSMSettings,
    PolicySettings,
    ReinforceSettings,
)
from padfree.losses.types import LossInputs, LossOutput, weighted_loss


def policy_loss(inputs: LossInputs, settings: PolicySettings, *, reduce: Reduce = no_reduce) -> LossOutput:
    """The weighted sum over the tokens that are here. `reduce` sums [B] tensors over the context group."""
    logprobs = inputs.need("logprobs", "a policy loss")
    entropy = inputs.need("entropy", "entropy_coefficient") if settings.entropy_coefficient else None
    terms = policy_terms(inputs, settings, current=logprobs.detach(), reduce=reduce)
    losses, parts = _token_losses(settings, terms, logprobs, entropy)
    return weighted_loss(inputs, losses, _statistics(inputs, settings, terms, parts, logprobs.detach()))


def is_elementwise(settings: PolicySettings) -> bool:
    """Whether a token's loss depends on its own log-probability and entropy alone (and on what is known before)."""
    if isinstance(settings.objective, GSPOSettings):
        return False
    for correction in settings.corrections:
        if isinstance(correction, OPSMSettings):
            return False
        if settings.old_policy == "current" and not isinstance(correction, TOKEN_CORRECTIONS):
            return False
    return True


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PolicyTerms:
    """What a token's loss depends on besides its log-probability and entropy: [T] each, without gradient."""

    weights: Tensor
    advantages: Tensor
    old: Tensor | None  # None: the current policy is the old one, or nobody asks
    sampler: Tensor | None
    ref: Tensor | None
    factor: Tensor | None  # sequence-level corrections
    sequence_log_ratio: Tensor | None  # GSPO's

    def at(self, rows: Tensor | slice) -> PolicyTerms:
        """The terms of some of the tokens."""
        present = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: values[rows] for name, values in present.items() if values is not None})

    def token_loss(self, settings: PolicySettings, logprobs: Tensor, entropy: Tensor | None) -> Tensor:
        """The weighted loss of each of these tokens."""
        return self.weights * _token_losses(settings, self, logprobs, entropy)[0]


def policy_terms(
    inputs: LossInputs, settings: PolicySettings, *, current: Tensor | None, reduce: Reduce = no_reduce
) -> PolicyTerms:
    """Everything but the scores. `current` [T] are the log-probabilities without gradient, where they are known."""
    assert current is not None or is_elementwise(settings), "a sequence-level loss needs the scores first"
    sampled = any(isinstance(correction, SAMPLER_CORRECTIONS) for correction in settings.corrections)
    needs_sampler = sampled or settings.old_policy == "sampler"
    sampler = inputs.need("rollout_logprobs", _why(settings)) if needs_sampler else None
    old = _old_logprobs(inputs, settings)

    factor = None
    if any(not isinstance(correction, TOKEN_CORRECTIONS) for correction in settings.corrections):
        trainer = old if old is not None else current
        assert trainer is not None
        factor = sequence_factor(
            settings.corrections, inputs, trainer=trainer, sampler=sampler, current=current, reduce=reduce
        )
    sequence_log_ratio = None
    if isinstance(settings.objective, GSPOSettings):
        assert current is not None
        before = current if old is None else old
        mean = segment_mean(current - before, inputs.mask, inputs.sample_index, inputs.num_samples, reduce)
        sequence_log_ratio = spread(mean, inputs.sample_index).to(current)
    return PolicyTerms(
        weights=inputs.weights,
        advantages=inputs.need("advantages", "a policy loss"),
        old=old,
        sampler=sampler,
        ref=inputs.need("ref_logprobs", "kl_coefficient") if settings.kl_coefficient else None,
        factor=factor,
        sequence_log_ratio=sequence_log_ratio,
    )


def clipped_ratio(
    log_ratio: Tensor, advantages: Tensor, *, low: float, high: float, dual: float | None = None
) -> tuple[Tensor, Tensor]:
    """[T] losses, and where the clip to [1 - low, 1 + high] is what counts; float32, or float64 where either is."""
    ClipSettings(low=low, high=high, dual=dual)  # checks the bounds
    log_ratio, advantages = checks.loss_input("log_ratio", log_ratio), checks.loss_input("advantages", advantages)
    ratio = torch.exp(log_ratio.clamp(min=-LOG_RATIO_BOUND, max=LOG_RATIO_BOUND))
    free = -ratio * advantages
    held = -ratio.clamp(min=1.0 - low, max=1.0 + high) * advantages
    losses = torch.maximum(free, held)
    if dual is not None:
        losses = torch.where(advantages < 0, torch.minimum(losses, -dual * advantages), losses)
    return losses, held > free


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Parts:
    """Pieces of the loss that statistics are made of."""

    clipped: Tensor | None
    log_ratio: Tensor | None
    factor: Tensor | None


def _token_losses(
    settings: PolicySettings, terms: PolicyTerms, logprobs: Tensor, entropy: Tensor | None
) -> tuple[Tensor, _Parts]:
    """[T] losses before weighting. Elementwise: any subset of rows gives the same numbers."""
    current = logprobs.detach()
    old = current if settings.old_policy == "current" else terms.old
    objective = settings.objective
    log_ratio, clipped = None, None
    if isinstance(objective, ReinforceSettings):
        losses = -terms.advantages * logprobs
        if old is not None:
            log_ratio = logprobs - old
    else:
        assert old is not None
        log_ratio = logprobs - old
        if isinstance(objective, CISPOSettings):
            ratio = torch.exp(log_ratio.detach().clamp(max=LOG_RATIO_BOUND))
            lowest = None if objective.low is None else 1.0 - objective.low
            weight = ratio.clamp(min=lowest, max=1.0 + objective.high)
            losses = -weight * terms.advantages * logprobs
            clipped = weight != ratio
        else:
            if isinstance(objective, GSPOSettings):
                assert terms.sequence_log_ratio is not None
                log_ratio = terms.sequence_log_ratio + (logprobs - current)
            dual = objective.dual if isinstance(objective, ClipSettings) else None
            losses, clipped = clipped_ratio(
                log_ratio, terms.advantages, low=objective.low, high=objective.high, dual=dual
            )

    factor = terms.factor
    if any(isinstance(correction, TOKEN_CORRECTIONS) for correction in settings.corrections):
        assert old is not None
        assert terms.sampler is not None
        by_token = token_factor(settings.corrections, old, terms.sampler)
        factor = by_token if factor is None else factor * by_token
    if factor is not None:
        losses = losses * factor

    if terms.ref is not None:
        losses = losses + settings.kl_coefficient * kl_divergence(logprobs, terms.ref, settings.kl_estimator)
    if settings.entropy_coefficient:
        assert entropy is not None
        losses = losses - settings.entropy_coefficient * entropy
    return losses, _Parts(clipped=clipped, log_ratio=log_ratio, factor=factor)


def _statistics(
    inputs: LossInputs, settings: PolicySettings, terms: PolicyTerms, parts: _Parts, current: Tensor
) -> dict[str, Tensor]:
    """[T] each. What is there is reported, whether the loss uses it or not."""
    found = {"advantage": terms.advantages}
    if parts.clipped is not None:
        found["clip_fraction"] = parts.clipped.to(current.dtype)
    if parts.log_ratio is not None:
        log_ratio = parts.log_ratio.detach()
        found["approx_kl"] = -log_ratio
        found["ratio"] = torch.exp(log_ratio.clamp(max=LOG_RATIO_BOUND))
    if parts.factor is not None:
        found["importance_weight"] = parts.factor
        found["masked_fraction"] = (parts.factor == 0).to(current.dtype)
    if inputs.entropy is not None:
        found["entropy"] = inputs.need("entropy", "a statistic")
    if inputs.ref_logprobs is not None:
        found["kl"] = kl_divergence(current, inputs.need("ref_logprobs", "a statistic"), settings.kl_estimator)
    if inputs.rollout_logprobs is not None:
        trainer = current if terms.old is None or settings.old_policy == "sampler" else terms.old
        difference = trainer - inputs.need("rollout_logprobs", "a statistic")
        found["sampler_difference"] = difference.abs()
        found["sampler_kl"] = kl_divergence(difference.new_zeros(()), difference, "k3")
    return found


def _old_logprobs(inputs: LossInputs, settings: PolicySettings) -> Tensor | None:
    if settings.old_policy == "sampler":
        return inputs.need("rollout_logprobs", _why(settings))
    if settings.old_policy == "current":
        return None
    plain = isinstance(settings.objective, ReinforceSettings) and not settings.corrections
    if plain and inputs.old_logprobs is None:
        return None
    return inputs.need("old_logprobs", _why(settings))


def _why(settings: PolicySettings) -> str:
    named = [type(settings.objective).__name__, *(type(correction).__name__ for correction in settings.corrections)]
    return f"{' with '.join(named)} and old_policy {settings.old_policy!r}"
