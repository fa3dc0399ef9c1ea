"""GSPO: the clipped ratio of a whole sequence, s = exp(mean over the sequence of log π - log π_old).

    max(-s A, -clamp(s, 1 - low, 1 + high) A)

It is computed as s · π / sg(π) token by token, with sg the identity without gradient (GSPO-token in the paper). Its
value is s. Its gradient equals that of s if the tokens of the sequence share one advantage and one weight, as the
weights of `aggregation.py` do. But each token has its own gradient, so context ranks exchange values, not gradients.
"""

from __future__ import annotations

from padfree.config.loss_settings import GSPOSettings
from padfree.losses.objectives.clip import clipped_ratio
from padfree.losses.objectives.contract import ObjectiveInputs, ObjectiveOutput, objective


@objective(zero_without_advantage=True)
def gspo(tokens: ObjectiveInputs, settings: GSPOSettings) -> ObjectiveOutput:
    assert tokens.old_logprobs is not None
    current = tokens.logprobs.detach()
    log_ratio = tokens.sequence_mean(current - tokens.old_logprobs) + (tokens.logprobs - current)
    losses, clipped = clipped_ratio(log_ratio, tokens.advantages, low=settings.low, high=settings.high)
    return ObjectiveOutput(losses=losses, log_ratio=log_ratio, clipped=clipped)
