"""CISPO: the importance weight of a token is clipped, but the token keeps its gradient.

    -sg(clamp(r, 1 - low, 1 + high)) A log π

r = π / π_old is the probability ratio of a token, A its advantage, and sg(x) is x without gradient.
"""

from __future__ import annotations

import torch

from padfree.config.policy_settings import CISPOSettings
from padfree.losses.kl import LOG_RATIO_BOUND
from padfree.losses.objectives.contract import ObjectiveInputs, ObjectiveOutput, objective


@objective(elementwise=True, zero_without_advantage=True)
def cispo(tokens: ObjectiveInputs, settings: CISPOSettings) -> ObjectiveOutput:
    assert tokens.old_logprobs is not None
    log_ratio = tokens.logprobs - tokens.old_logprobs
    ratio = torch.exp(log_ratio.detach().clamp(max=LOG_RATIO_BOUND))
    lowest = None if settings.low is None else 1.0 - settings.low
    weight = ratio.clamp(min=lowest, max=1.0 + settings.high)
    losses = -weight * tokens.advantages * tokens.logprobs
    return ObjectiveOutput(losses=losses, log_ratio=log_ratio, clipped=weight != ratio)
