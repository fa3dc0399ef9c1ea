"""Whether the samples of a row may share what they begin with in this model.

A shared token is computed once, with what came before it. That is right wherever tokens meet in attention alone, which
the probe has seen of every attached model. It is wrong for layers that carry a state along the sequence, which would
have to fork at the branch, and for dropout, where each sample needs a noise of its own.
"""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from padfree.model.interface import counts_positions
from padfree.model.mixers import installed

ATTENTION = ("full_attention", "sliding_attention", "attention", "mlp", "moe")
"""Layer types in which a query sees what is before it, or tokens do not meet at all."""

DROPOUTS = ("pdrop", "dropout", "dropout_prob")
"""How the names of dropout in configs end."""

OF_OTHER_HEADS = ("classifier", "summary")
"""How those begin that a language model does not have."""


def state_obstacle(model: PreTrainedModel) -> str | None:
    """What makes a token of this model depend on more than the keys and values of those before it, or None."""
    for name, module in model.named_modules():
        if installed(module) is not None:
            return f"{name} carries a state along the sequence"
        if counts_positions(module):
            return f"{name} counts positions through the row"
    for kind in getattr(model.config, "layer_types", None) or ():
        if kind not in ATTENTION:
            return f"layers of type {kind!r} do not see what is before as others do"
    return None


def sharing_obstacle(model: PreTrainedModel) -> str | None:
    """Why prefixes cannot be shared exactly, or None."""
    state = state_obstacle(model)
    if state is not None:
        return f"{state}, which does not fork where samples branch"
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            return f"dropout {module.p:g} of {name} needs a noise of its own in every sample"
    for name, value in model.config.to_dict().items():
        of_layers = name.endswith(DROPOUTS) and not name.startswith(OF_OTHER_HEADS)
        if of_layers and isinstance(value, float) and value > 0:
            return f"{name} {value:g} needs a noise of its own in every sample"
    return None
