"""GSPO: clips the probability ratio s of a whole sequence. The loss of each of its tokens is

    max(-s A, -clamp(s, 1 - low, 1 + high) A)        s = exp(mean of log π - log π_old over the tokens of the sequence)

where A is the token's advantage. In place of s, this module uses sg(s) · π / sg(π) (GSPO-token in the paper), where π
is the probability of the token and sg(x) is x without gradient. This product has the value of s, but its gradient
involves only the token's own π. Ranks that share a sequence therefore exchange values, but no gradients. If all tokens
of a sequence have the same advantage and weight, the sum of their losses has the same gradient as with s.
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
