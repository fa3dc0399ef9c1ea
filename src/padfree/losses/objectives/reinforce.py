"""REINFORCE, the plain policy gradient: -A log π. Old log-probabilities, if available, are only used for metrics."""

from __future__ import annotations

from padfree.config.loss_settings import ReinforceSettings
from padfree.losses.objectives.contract import ObjectiveInputs, ObjectiveOutput, objective


@objective(elementwise=True, needs_no_old_logprobs=True, zero_without_advantage=True)
def reinforce(tokens: ObjectiveInputs, settings: ReinforceSettings) -> ObjectiveOutput:
    losses = -tokens.advantages * tokens.logprobs
    log_ratio = None if tokens.old_logprobs is None else tokens.logprobs - tokens.old_logprobs
    return ObjectiveOutput(losses=losses, log_ratio=log_ratio)
