"""The loss of a value model.

For a token with the value v, the value v_old before the update and the return R, the loss is

    ½ max((v - R)², (v_old + clamp(v - v_old, ±clip) - R)²)

`clip` limits how far a value moves in one update. Without `clip`, the loss is ½ (v - R)².
"""

from __future__ import annotations

import torch

from padfree.config.loss_settings import ValueSettings
from padfree.losses.types import LossInputs, LossOutput, weighted_loss


def value_loss(inputs: LossInputs, settings: ValueSettings) -> LossOutput:
    """Return the weighted sum of the value losses of the tokens in `inputs`."""
    values = inputs.need("values", "the value loss")
    returns = inputs.need("returns", "the value loss")
    errors = (values - returns).square()
    statistics = {"value": values, "return": returns, "value_error": errors}
    if settings.clip is not None:
        old = inputs.need("old_values", "value clip")
        held = (old + (values - old).clamp(min=-settings.clip, max=settings.clip) - returns).square()
        statistics["value_clip_fraction"] = (held > errors).to(values.dtype)
        errors = torch.maximum(errors, held)
    return weighted_loss(inputs, 0.5 * errors, statistics)
