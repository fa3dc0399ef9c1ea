"""REINFORCE, the plain policy gradient: the loss of a token with advantage A is -A log π.

If old log-probabilities are available, they are used only for metrics.
"""

from __future__ import annotations

from padfree.config.policy_settings import ReinforceSettings
from padfree.losses.objectives.contract import ObjectiveInputs, ObjectiveOutput, objective


@objective(elementwise=True, needs_no_old_logprobs=True, zero_without_advantage=True)
def reinforce(tokens: ObjectiveInputs, settings: ReinforceSettings) -> ObjectiveOutput:
    losses = -tokens.advantages * tokens.logprobs
    log_ratio = None if tokens.old_logprobs is None else tokens.logprobs - tokens.old_logprobs
    return ObjectiveOutput(losses=losses, log_ratio=log_ratio)
