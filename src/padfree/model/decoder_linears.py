"""Find the linear layers inside a model's decoder layers, such as q_proj and down_proj.

Routers, experts and adapters are left out. So are linear layers whose weight a mixer (a recurrence or convolution)
reads without calling the layer. For a linear layer that has a PEFT adapter, the frozen `base_layer` is included.
"""

from __future__ import annotations

from typing import cast

from torch import nn
from transformers import PreTrainedModel

from padfree.model.lora import is_adapter, weights_read_by
from padfree.model.roles import roles_of
from padfree.model.structure import layers_of


def decoder_linears(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """Return the linear layers inside the model's decoder layers as a dict by name, in the order of the model's
    modules.

    Layers such as routers and experts are left out (see the module docstring). The model may be on the meta device.
    """
    roles = roles_of(model)
    modules = dict(model.named_modules())
    inner = set(layers_of(model).modules())
    read = {f"{name}.{part}" for name, module in modules.items() for part in weights_read_by(module)}
    return {
        name: module
        for name, module in modules.items()
        if isinstance(module, nn.Linear)
        and module in inner
        and name not in read
        and not is_adapter(f".{name}.weight")
        and roles[cast(nn.Parameter, module.weight)] == "hidden"
    }
