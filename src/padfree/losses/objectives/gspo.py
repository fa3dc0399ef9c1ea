"""GSPO: the clipped ratio of a whole sequence, s = exp(mean of log π - log π_old over the tokens of the sequence).

    max(-s A, -clamp(s, 1 - low, 1 + high) A)

A is the advantage. In place of s, each token uses s · π / sg(π), where sg is the identity without gradient (GSPO-token
in the paper). The value of this expression is s. Averaged over the sequence, its gradient equals the gradient of s if
all tokens of the sequence have the same advantage and the same weight, as with the weights of `aggregation.py`. Because
each token has its own gradient, context ranks exchange only values, not gradients.
"""

from __future__ import annotations

from padfree.config.policy_settings import GSPOSettings
from padfree.losses.objectives.clip import clipped_ratio
from padfree.losses.objectives.contract import ObjectiveInputs, ObjectiveOutput, objective


@objective(zero_without_advantage=True)
def gspo(tokens: ObjectiveInputs, settings: GSPOSettings) -> ObjectiveOutput:
    assert tokens.old_logprobs is not None
    current = tokens.logprobs.detach()
    log_ratio = tokens.sequence_mean(current - tokens.old_logprobs) + (tokens.logprobs - current)
    losses, clipped = clipped_ratio(log_ratio, tokens.advantages, low=settings.low, high=settings.high)
    return ObjectiveOutput(losses=losses, log_ratio=log_ratio, clipped=clipped)
