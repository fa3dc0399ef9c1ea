"""The linear layers in a model's decoder layers through which every token passes.

    {"model.layers.0.self_attn.q_proj": Linear, ...}

The following modules are left out: embeddings, the head, routers, experts, adapters, and linear layers whose weight a
mixer (a recurrence or convolution) reads without calling the layer. A linear layer that has an adapter is included; its
frozen weight is in its submodule `base_layer`.
"""

from __future__ import annotations

from typing import cast

from torch import nn
from transformers import PreTrainedModel

from padfree.model.lora import is_adapter, weights_read_by
from padfree.model.roles import roles_of
from padfree.model.structure import layers_of


def decoder_linears(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """Return the linear layers in the model's decoder layers through which every token passes, as a dict by name.

    The module docstring lists the linear layers that are left out, such as routers and experts. The dict is in the
    order of the model's modules. The model may be on the meta device.
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
