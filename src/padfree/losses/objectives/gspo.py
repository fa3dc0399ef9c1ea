"""GSPO: a clipped ratio of whole sequences. The ratio s is exp(mean of log π - log π_old over the tokens).

    max(-s A, -clamp(s, 1 - low, 1 + high) A)

A is the advantage, and sg(x) is x without gradient. Each token uses s · π / sg(π) in place of s (GSPO-token in the
paper). This product has the value of s, but its gradient involves only the token's own π. If the tokens of a sequence
have equal advantages and weights, the gradients of all tokens add up to the gradient of s. Context ranks that share the
sequence then exchange only values, not gradients.
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
