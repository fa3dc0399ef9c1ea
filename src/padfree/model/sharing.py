"""Determine for a model whether samples of a pack that begin with the same tokens can share these tokens.

The shared tokens (the prefix) are computed once for all of these samples. The results are right if tokens interact
only through attention. They are wrong with a recurrent state, which would have to be copied for each sample at the end
of the prefix. They are also wrong with dropout, because each sample needs its own random mask.
"""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from padfree.model.interface import counts_positions
from padfree.model.mixers import installed
from padfree.model.vision.families import language_part

ATTENTION = ("full_attention", "sliding_attention", "attention", "mlp", "moe")
"""The layer types in which tokens interact only through attention, or not at all."""

DROPOUTS = ("pdrop", "dropout", "dropout_prob")
"""Suffixes of the names of dropout fields in configs."""

OF_OTHER_HEADS = ("classifier", "summary")
"""Prefixes of the names of config fields for the dropout of a classification head, such as `classifier_dropout`.
Language models do not have this head.
"""


def state_obstacle(model: PreTrainedModel) -> str | None:
    """Return why a token in this model depends on more than the keys and values of earlier tokens of its sample.

    Returns None if keys and values are all that a token depends on.
    """
    for name, module in model.named_modules():
        if installed(module) is not None:
            return f"{name} has a recurrent state"
        if counts_positions(module):
            return f"{name} counts positions along the whole pack"
    for kind in getattr(language_part(model).config, "layer_types", None) or ():
        if kind not in ATTENTION:
            return f"layers of type {kind!r} do not attend to all earlier tokens"
    return None


def sharing_obstacle(model: PreTrainedModel) -> str | None:
    """Return the reason why samples cannot share prefixes in this model, or None if they can.

    A prefix that samples share is computed once, which must give the same results as separate samples.
    """
    state = state_obstacle(model)
    if state is not None:
        return f"{state}, so that samples cannot branch from a shared prefix"
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            return f"dropout {module.p:g} of {name} needs a separate random mask for every sample"
    for name, value in language_part(model).config.to_dict().items():
        of_layers = name.endswith(DROPOUTS) and not name.startswith(OF_OTHER_HEADS)
        if of_layers and isinstance(value, float) and value > 0:
            return f"{name} {value:g} needs a separate random mask for every sample"
    return None
