"""GSPO clips the probability ratio s of a whole sequence. With s = exp(mean of log π - log π_old over the sequence),
the loss of each token with advantage A is

    max(-s A, -clamp(s, 1 - low, 1 + high) A)

The gradient of s involves only the token's own π (GSPO-token in the paper), so ranks that share a sequence exchange no
gradients. If all tokens of a sequence have the same advantage and weight, the sum of their losses has the same gradient
as GSPO.
"""

from __future__ import annotations

from padfree.config.policy_settings import GSPOSettings
from padfree.losses.objectives.clip import clipped_ratio
from padfree.losses.objectives.contract import ObjectiveInputs, ObjectiveOutput, objective


@objective(zero_without_advantage=True)
def gspo(tokens: ObjectiveInputs, settings: GSPOSettings) -> ObjectiveOutput:
    assert tokens.old_logprobs is not None
    current = tokens.logprobs.detach()
    # the value of log s, with the gradient of the token's own log π
    log_ratio = tokens.sequence_mean(current - tokens.old_logprobs) + (tokens.logprobs - current)
    losses, clipped = clipped_ratio(log_ratio, tokens.advantages, low=settings.low, high=settings.high)
    return ObjectiveOutput(losses=losses, log_ratio=log_ratio, clipped=clipped)
