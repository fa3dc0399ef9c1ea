"""Policy losses: one loss for each token of a pack.

    loss of a token = objective · corrections + kl_coefficient · KL(π ‖ reference) - entropy_coefficient · entropy

π is the policy being trained. The folder `objectives` has the objectives, and `corrections.py` the corrections.

A loss is *elementwise* if the loss of a token depends on no other token's log π or entropy. Such a loss can be computed
for some tokens at a time. Losses with GSPO or OPSM (off-policy sequence masking) are not elementwise.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from padfree.config.policy_settings import TOKEN_CORRECTIONS, CustomObjective, OPSMSettings, PolicySettings
from padfree.losses.corrections import sequence_factor, token_factor
from padfree.losses.kl import LOG_RATIO_BOUND, kl_divergence
from padfree.losses.objectives import ObjectiveInputs, ObjectiveOutput, run_objective, traits
from padfree.losses.segment_sums import Reduce, no_reduce
from padfree.losses.types import LossInputs, LossOutput, weighted_loss


def policy_loss(inputs: LossInputs, settings: PolicySettings, *, reduce: Reduce = no_reduce) -> LossOutput:
    """Return the weighted sum of the policy loss over the tokens in `inputs`."""
    logprobs = inputs.need("logprobs", "a policy loss")
    entropy = inputs.need("entropy", "entropy_coefficient") if settings.entropy_coefficient else None
    terms = policy_terms(inputs, settings, current=logprobs.detach(), reduce=reduce)
    pack = None if traits(settings.objective).elementwise else inputs
    parts = _token_losses(settings, terms, logprobs, entropy, pack=pack, reduce=reduce)
    return weighted_loss(inputs, parts.losses, _statistics(inputs, settings, terms, parts, logprobs.detach()))


def is_elementwise(settings: PolicySettings) -> bool:
    """Return whether the loss of a token depends only on the token's own log-probability and entropy."""
    for correction in settings.corrections:
        if isinstance(correction, OPSMSettings):
            return False
        # With "current", factors of a sequence depend on the current log-probabilities of all its tokens.
        if settings.old_policy == "current" and not isinstance(correction, TOKEN_CORRECTIONS):
            return False
    return traits(settings.objective).elementwise


def needs_old_logprobs(settings: PolicySettings) -> bool:
    """Return whether the loss needs log-probabilities that the trainer computes before the update."""
    if settings.old_policy != "trainer":
        return False
    needed = bool(settings.corrections) or settings.weighs_kl
    return needed or not traits(settings.objective).needs_no_old_logprobs


def zero_without_advantage(settings: PolicySettings) -> bool:
    """Return whether a sample whose advantages are all 0 adds nothing to the loss and the gradient.

    The result is False if the loss has a KL or entropy term, because these terms do not depend on the advantage.
    """
    added = settings.kl_coefficient != 0.0 or settings.entropy_coefficient != 0.0
    return not added and traits(settings.objective).zero_without_advantage


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PolicyTerms:
    """The values of T tokens that the policy loss needs besides log-probabilities and entropies, e.g. advantages."""

    weights: Tensor
    advantages: Tensor
    old: Tensor | None  # old log-probabilities; None if the current policy is the old one, or if not needed
    sampler: Tensor | None
    ref: Tensor | None
    factor: Tensor | None  # sequence-level corrections

    def at(self, positions: Tensor | slice) -> PolicyTerms:
        """Return a copy with the values of the tokens at `positions` only."""
        present = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: values[positions] for name, values in present.items() if values is not None})

    def token_loss(self, settings: PolicySettings, logprobs: Tensor, entropy: Tensor | None) -> Tensor:
        """Return the losses of the tokens that this object describes, multiplied by the token weights.

        `logprobs` and `entropy` have one entry for each of these tokens.
        """
        return self.weights * _token_losses(settings, self, logprobs, entropy).losses


def policy_terms(
    inputs: LossInputs, settings: PolicySettings, *, current: Tensor | None, reduce: Reduce = no_reduce
) -> PolicyTerms:
    """Return the values that the policy loss needs besides log-probabilities and entropies, e.g. advantages.

    `current` [T] are the log-probabilities under the policy being trained, without gradient. `current` may be None if
    the loss is elementwise.
    """
    assert current is not None or is_elementwise(settings), (
        "a loss that is not elementwise needs the log-probabilities of all tokens first"
    )
    # A user-defined objective gets all values that are available. A built-in objective gets only the values it needs.
    offered = isinstance(settings.objective, CustomObjective)
    sampler = ref = None
    if settings.needs_sampler_logprobs or (offered and inputs.rollout_logprobs is not None):
        sampler = inputs.need("rollout_logprobs", _why(settings))
    if settings.kl_coefficient or (offered and inputs.ref_logprobs is not None):
        ref = inputs.need("ref_logprobs", "kl_coefficient")
    old = _old_logprobs(inputs, settings)

    factor = None
    if any(not isinstance(correction, TOKEN_CORRECTIONS) for correction in settings.corrections):
        trainer = old if old is not None else current
        assert trainer is not None
        factor = sequence_factor(
            settings.corrections, inputs, trainer=trainer, sampler=sampler, current=current, reduce=reduce
        )
    return PolicyTerms(
        weights=inputs.weights,
        advantages=inputs.need("advantages", "a policy loss"),
        old=old,
        sampler=sampler,
        ref=ref,
        factor=factor,
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Parts:
    """The policy losses [T] before weighting, and the values from which metrics are computed."""

    losses: Tensor
    objective: ObjectiveOutput
    factor: Tensor | None


def _token_losses(
    settings: PolicySettings,
    terms: PolicyTerms,
    logprobs: Tensor,
    entropy: Tensor | None,
    *,
    pack: LossInputs | None = None,
    reduce: Reduce = no_reduce,
) -> _Parts:
    """Compute the policy losses [T] of tokens, before they are multiplied by the token weights."""
    old = logprobs.detach() if settings.old_policy == "current" else terms.old
    tokens = ObjectiveInputs(
        logprobs=logprobs,
        advantages=terms.advantages,
        weights=terms.weights,
        old_logprobs=old,
        rollout_logprobs=terms.sampler,
        ref_logprobs=terms.ref,
        entropy=entropy,
        pack=pack,
        reduce=reduce,
    )
    objective = run_objective(settings.objective, tokens)
    losses, factor = objective.losses, terms.factor
    if any(isinstance(correction, TOKEN_CORRECTIONS) for correction in settings.corrections):
        assert old is not None
        assert terms.sampler is not None
        by_token = token_factor(settings.corrections, old, terms.sampler)
        factor = by_token if factor is None else factor * by_token
    if factor is not None:
        losses = losses * factor

    if settings.kl_coefficient:
        assert terms.ref is not None
        divergence = kl_divergence(logprobs, terms.ref, settings.kl_estimator)
        if settings.weighs_kl:
            assert old is not None
            divergence = divergence * torch.exp((logprobs - old).clamp(min=-LOG_RATIO_BOUND, max=LOG_RATIO_BOUND))
        losses = losses + settings.kl_coefficient * divergence
    if settings.entropy_coefficient:
        assert entropy is not None
        losses = losses - settings.entropy_coefficient * entropy
    return _Parts(losses=losses, objective=objective, factor=factor)


def _statistics(
    inputs: LossInputs, settings: PolicySettings, terms: PolicyTerms, parts: _Parts, current: Tensor
) -> dict[str, Tensor]:
    """Return the statistics for metrics, one tensor [T] per name. Some of them are not used by the loss itself."""
    objective = parts.objective
    found = {name: values.to(current.dtype) for name, values in objective.statistics.items()}
    found["advantage"] = terms.advantages
    if objective.clipped is not None:
        found["clip_fraction"] = objective.clipped.to(current.dtype)
    if objective.log_ratio is not None:
        log_ratio = objective.log_ratio.detach()
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
    if inputs.old_logprobs is None and not needs_old_logprobs(settings):
        return None
    return inputs.need("old_logprobs", _why(settings))


def _why(settings: PolicySettings) -> str:
    named = [type(settings.objective).__name__, *(type(correction).__name__ for correction in settings.corrections)]
    return f"{' with '.join(named)} and old_policy {settings.old_policy!r}"
