"""The model from which the training process samples: a new instance of the trained model's class.

Compilation, recompute, FSDP2 and adapters change the modules of the trained model, but not those of this instance.

The instance uses the trained model's tensors if they are unsharded and have the sampler's dtype and device. Otherwise,
it has an unsharded copy, which every weight sync updates.

Adapters are merged into the copy. With `rollout.exact`, the instance has adapters of its own, because merged weights
give other bits.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from padfree.config import LoraConfig
from padfree.model.export import empty_copy, separate_tensors, whole_tensors
from padfree.model.lora import add_adapters
from padfree.model.named_tensors import clean_name, named_tensors
from padfree.model.sharing import state_obstacle


class PolicyModel:
    """An HF model in evaluation mode. `update` sets its weights to those of the trained model."""

    def __init__(
        self, trained: PreTrainedModel, dtype: torch.dtype, device: torch.device, adapters: LoraConfig | None = None
    ) -> None:
        """`trained`: the trained model. `adapters`: the settings of its adapters, if the sampling model is to have the
        same adapters. None: adapters of the trained model are merged into the weights of the sampling model.
        """
        self.model = empty_copy(trained, dtype)
        self._keeps_adapters = adapters is not None
        if adapters is not None:
            add_adapters(self.model, adapters, dtype=dtype)  # the trainer also computes with adapters of `dtype`
        self.state_obstacle = state_obstacle(trained)  # None, or why decoding needs more state than keys and values
        self.device = torch.empty(0, device=device).device  # the device with its index: "cuda" becomes "cuda:0"
        # Computed buffers, such as the frequencies of RoPE, are taken from the trained model, because another device
        # may round them differently.
        buffers = {clean_name(name): buffer for name, buffer in trained.named_buffers(remove_duplicate=False)}
        for name, module in self.model.named_modules():
            for buffer_name in module._non_persistent_buffers_set:
                if module._buffers[buffer_name] is not None:
                    module._buffers[buffer_name] = buffers[clean_name(f"{name}.{buffer_name}")].to(self.device)
        self.model.train(False).requires_grad_(False)
        self.is_shared: bool | None = None  # None: it has no weights yet

    def update(self, trained: PreTrainedModel) -> bool:
        """Set the weights to those of the model `trained`: share its tensors if possible, else copy them. Collective.

        Return whether the memory address of any weight of the sampling model has changed.
        """
        before = self._addresses()
        self.is_shared = self._can_share(trained)
        if self.is_shared:
            theirs = named_tensors(trained)
            if before != [theirs[name].data_ptr() for name in named_tensors(self.model)]:
                names = {clean_name(name): tensor for name, tensor in trained.named_parameters(remove_duplicate=False)}
                self._assign({**names, **theirs})
        else:
            if any(tensor.is_meta for tensor in named_tensors(self.model).values()):
                self._allocate()
            copy_weights(trained, self.model, keep_adapters=self._keeps_adapters)
        return before != self._addresses()

    def _can_share(self, trained: PreTrainedModel) -> bool:
        # Inside `compute_copies`, `theirs` are the bfloat16 copies of float32 master weights.
        theirs, own = named_tensors(trained), named_tensors(self.model)
        return theirs.keys() == own.keys() and all(
            not isinstance(tensor, DTensor) and tensor.dtype == own[name].dtype and tensor.device == self.device
            for name, tensor in theirs.items()
        )

    def _addresses(self) -> list[int]:
        return [0 if tensor.is_meta else tensor.data_ptr() for tensor in named_tensors(self.model).values()]

    def _allocate(self) -> None:
        memory: dict[int, Tensor] = {}  # by id of the parameter, so that tied parameters share memory
        tensors: dict[str, Tensor] = {}
        for name, tensor in self._all_tensors().items():
            if id(tensor) not in memory:
                memory[id(tensor)] = torch.empty_like(tensor, device=self.device)
            tensors[name] = memory[id(tensor)]
        self._assign(tensors)

    def _assign(self, tensors: dict[str, Tensor]) -> None:
        """Replace the model's parameters and buffers with the tensors of the same name."""
        parameters: dict[int, nn.Parameter] = {}
        for module_name, module in self.model.named_modules():
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                tensor = tensors[clean_name(f"{module_name}.{name}")]
                if id(tensor) not in parameters:
                    parameters[id(tensor)] = nn.Parameter(tensor.detach(), requires_grad=False)
                module._parameters[name] = parameters[id(tensor)]
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    module._buffers[name] = tensors[clean_name(f"{module_name}.{name}")].detach()

    def _all_tensors(self) -> dict[str, Tensor]:
        """Return the persistent buffers and the parameters by name. A tied parameter is included under each name."""
        names = dict(self.model.named_parameters(remove_duplicate=False))
        return {**names, **named_tensors(self.model)}


@torch.no_grad()
def copy_weights(trained: PreTrainedModel, copy: PreTrainedModel, *, keep_adapters: bool = False) -> None:
    """Copy the weights of `trained`, which may be sharded or have adapters, to the whole model `copy`. Collective.

    With `keep_adapters`, `copy` has the same adapters as `trained`. Otherwise, adapters are merged into the weights.
    """
    targets = named_tensors(copy)
    for name, tensor in separate_tensors(trained) if keep_adapters else whole_tensors(trained):
        targets.pop(name).copy_(tensor)
    assert not targets, f"the sampling model has the tensor {min(targets)}, but the trained model does not"
