"""The clipped objective of PPO and GRPO. The loss of a token is

    max(-r A, -clamp(r, 1 - low, 1 + high) A)          high > low is DAPO's clip-higher
    if `dual` is set to c and A < 0: at most -c A      dual clip: bounds the loss of a bad token that became likely

where r = π / π_old is the probability ratio of the token and A its advantage.
"""

from __future__ import annotations

import torch
from torch import Tensor

from padfree.config.policy_settings import ClipSettings
from padfree.losses import checks
from padfree.losses.kl import LOG_RATIO_BOUND
from padfree.losses.objectives.contract import ObjectiveInputs, ObjectiveOutput, objective


@objective(elementwise=True, zero_without_advantage=True)
def clip(tokens: ObjectiveInputs, settings: ClipSettings) -> ObjectiveOutput:
    assert tokens.old_logprobs is not None
    log_ratio = tokens.logprobs - tokens.old_logprobs
    losses, clipped = clipped_ratio(
        log_ratio, tokens.advantages, low=settings.low, high=settings.high, dual=settings.dual
    )
    return ObjectiveOutput(losses=losses, log_ratio=log_ratio, clipped=clipped)


def clipped_ratio(
    log_ratio: Tensor, advantages: Tensor, *, low: float, high: float, dual: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return the losses [T] of the clipped objective, and bools [T]: whether clipping the ratio to [1 - low, 1 + high]
    changes a token's loss.
    """
    ClipSettings(low=low, high=high, dual=dual)  # checks the bounds
    log_ratio, advantages = checks.loss_input("log_ratio", log_ratio), checks.loss_input("advantages", advantages)
    ratio = torch.exp(log_ratio.clamp(min=-LOG_RATIO_BOUND, max=LOG_RATIO_BOUND))
    free = -ratio * advantages
    held = -ratio.clamp(min=1.0 - low, max=1.0 + high) * advantages
    losses = torch.maximum(free, held)
    if dual is not None:
        losses = torch.where(advantages < 0, torch.minimum(losses, -dual * advantages), losses)
    return losses, held > free
