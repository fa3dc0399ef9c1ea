"""Objectives as a user would write them; tests and the runs they start refer to them by import path."""

from __future__ import annotations

import torch
from torch import Tensor

from padfree.losses import ObjectiveInputs, ObjectiveOutput, objective

HERE = __name__


@objective(elementwise=True)
def clip(tokens: ObjectiveInputs) -> ObjectiveOutput:
    """The built-in `clip` with its default bounds, written again."""
    assert tokens.old_logprobs is not None
    log_ratio = tokens.logprobs - tokens.old_logprobs
    ratio = torch.exp(log_ratio.clamp(min=-20.0, max=20.0))
    free = -ratio * tokens.advantages
    held = -ratio.clamp(min=0.8, max=1.2) * tokens.advantages
    return ObjectiveOutput(losses=torch.maximum(free, held), log_ratio=log_ratio, clipped=held > free)


def undecorated_clip(tokens: ObjectiveInputs) -> ObjectiveOutput:
    """The same on whole packs."""
    assert tokens.pack is not None
    return clip(tokens)


def gspo(tokens: ObjectiveInputs) -> ObjectiveOutput:
    """The built-in `gspo` with its default bounds, written again."""
    assert tokens.old_logprobs is not None
    current = tokens.logprobs.detach()
    log_ratio = tokens.sequence_mean(current - tokens.old_logprobs) + (tokens.logprobs - current)
    ratio = torch.exp(log_ratio.clamp(min=-20.0, max=20.0))
    free = -ratio * tokens.advantages
    held = -ratio.clamp(min=1.0 - 3e-4, max=1.0 + 4e-4) * tokens.advantages
    return ObjectiveOutput(losses=torch.maximum(free, held), log_ratio=log_ratio, clipped=held > free)


@objective(elementwise=True, needs_no_old_logprobs=True)
def reinforce(tokens: ObjectiveInputs) -> Tensor:
    return -tokens.advantages * tokens.logprobs


@objective(elementwise=True)
def offered(tokens: ObjectiveInputs) -> ObjectiveOutput:
    """Reads every optional field."""
    assert tokens.rollout_logprobs is not None
    assert tokens.ref_logprobs is not None
    moved = tokens.logprobs - tokens.rollout_logprobs
    return ObjectiveOutput(
        losses=tokens.advantages * moved.square() + 0.0 * tokens.ref_logprobs,
        statistics={"moved": moved.detach(), "far": moved.detach().abs() > 0.3},
    )
