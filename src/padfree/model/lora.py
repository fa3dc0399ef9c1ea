"""Low-rank adapters (LoRA, from PEFT) that are trained instead of the model's weights.

    y = W x + scale * B (A x)      W [out, in] frozen, A [rank, in], B [out, rank] trained, scale = alpha / rank

    q_proj.weight   ->   q_proj.base_layer.weight, q_proj.lora_A.default.weight, q_proj.lora_B.default.weight

`add_adapters` inserts PEFT's layers into the model in place. The model stays a transformers model, so that attention,
recomputation, compilation, FSDP2 and the head work as before. `named_tensors.clean_name` removes `base_layer` from
names, which gives the names in HF files. Call `attach` first, because it tests the plain architecture.

The initial values of A depend only on the seed and on the name of A, not on ranks, on the order of layers or on the
other targets. B is 0, so that the model initially equals the one without adapters.

Adapters are for linear layers below the head. The following layers stay frozen with "all-linear", and raise an error if
they are named as targets:

- embeddings and the head, because the losses read the head's weight directly, without the adapter;
- linear layers of a mixer whose forward reads their weight directly (Mamba's time step);
- routers that are more than a linear layer (Llama 4);
- experts that transformers keeps in one tensor.

A scalar head (`padfree.model.scalar_head`) has no adapter: it is new, and its own weight is trained.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import math
import re
import textwrap
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from padfree.config import LoraConfig
from padfree.errors import UserError
from padfree.model.mixers import kind_of
from padfree.model.mixers.own_forward import code_of
from padfree.model.scalar_head import HEAD as SCALAR_HEAD
from padfree.model.scalar_head import WEIGHT as SCALAR_WEIGHT

ADAPTER = "default"
"""The name that PEFT gives an adapter by default."""

ALL_LINEAR = "all-linear"

_ADAPTER_NAME = re.compile(rf"\.lora_[AB]\.{ADAPTER}\.weight$")


def is_adapter(name: str) -> bool:
    """Whether `name` is the name of a parameter of an adapter."""
    return _ADAPTER_NAME.search(name) is not None


def is_trained_with_adapters(name: str) -> bool:
    """Whether a parameter of this name is trained in a model with adapters: it belongs to an adapter or to the scalar
    head.
    """
    return is_adapter(name) or name == SCALAR_WEIGHT


def add_adapters(model: PreTrainedModel, settings: LoraConfig, *, seed: int = 0) -> None:
    """Freeze the model and insert adapters.

    If the model is on the meta device, `load_model` initialises the adapters later.
    """
    if importlib.util.find_spec("peft") is None:
        raise UserError(
            "lora.rank", f"is {settings.rank}, but peft is not installed", "install it with pip install 'padfree[lora]'"
        )
    from peft import LoraConfig as PeftConfig
    from peft import inject_adapter_in_model

    config = PeftConfig(
        task_type="CAUSAL_LM",
        r=settings.rank,
        lora_alpha=settings.rank if settings.alpha is None else settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=(targets := _targets(model, list(settings.targets))),
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the error below replaces it
        inject_adapter_in_model(config, model, adapter_name=ADAPTER, low_cpu_mem_usage=True)
    if set(config.target_modules) != set(targets):
        raise UserError(
            "lora.targets",
            f"PEFT treats {min(set(targets) - set(config.target_modules))!r} of {type(model).__name__} as experts, "
            "which cannot have adapters",
            "remove it, and name the other targets",
        )
    if isinstance(head := getattr(model, SCALAR_HEAD, None), nn.Linear):
        head.requires_grad_(True)
    for module_name, layer in model.named_modules():
        if not is_adapted(layer):
            continue
        device = layer.base_layer.weight.device
        if device.type == "meta":
            continue
        for side in (layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]):
            side.to_empty(device=device)
        for name, parameter in layer.named_parameters(prefix=module_name):
            if is_adapter(name):
                parameter.data.copy_(initial_values(name, parameter.shape, seed))


def is_adapted(module: nn.Module) -> bool:
    return hasattr(module, "lora_A") and hasattr(module, "base_layer")


def adapted_modules(model: nn.Module) -> list[str]:
    """The last parts of the names of all modules with adapters, for example q_proj and v_proj."""
    return sorted({name.rpartition(".")[2] for name, module in model.named_modules() if is_adapted(module)})


def initial_values(name: str, shape: torch.Size, seed: int) -> Tensor:
    """The initial values of an adapter's tensor, on the CPU. `name` is the name of the tensor without wrappers."""
    if ".lora_B." in name:
        return torch.zeros(shape)
    number = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:7], "big")
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(shape).uniform_(-bound, bound, generator=torch.Generator().manual_seed(number))


def added_weight(layer: Any, a: Tensor, b: Tensor) -> Tensor:
    """The adapter's contribution to the weight of its layer, in float32.

    `a` [rank, in] and `b` [out, rank] are unsharded.
    """
    product = (b.float() @ a.float()) * float(layer.scaling[ADAPTER])
    return product.T if layer.fan_in_fan_out else product  # GPT-2 stores weights as [in, out]


def _targets(model: PreTrainedModel, targets: list[str]) -> list[str]:
    """The names of the target layers in the form that PEFT needs.

    These are the last parts of names (`q_proj`) if they select the right layers, otherwise full names.
    """
    heads = (model.get_output_embeddings(), getattr(model, SCALAR_HEAD, None))  # type: ignore[no-untyped-call]
    ends = (model.get_input_embeddings(), *heads)
    modules = {name: module for name, module in model.named_modules() if name}
    linear = {name for name, module in modules.items() if type(module).forward in (nn.Linear.forward, Conv1D.forward)}
    passed_by = {f"{name}.{part}" for name, module in modules.items() for part in _weights_read_by(module)} & linear
    fit = {name for name in linear - passed_by if modules[name] not in ends}
    last = sorted({name.rpartition(".")[2] for name in fit})
    if ALL_LINEAR in targets:
        if len(targets) > 1:
            raise UserError(
                "lora.targets",
                f"{targets} mixes {ALL_LINEAR!r} with names of modules",
                f"give either {ALL_LINEAR!r} or names of modules",
            )
        unfit = {name.rpartition(".")[2] for name in modules.keys() - fit}
        return sorted(fit) if unfit & set(last) else last
    for target in targets:
        found = [name for name in modules if f".{name}".endswith(f".{target}")]
        if not found:
            raise UserError("lora.targets", f"the model has no module {target!r}", f"choose from {', '.join(last)}")
        for name in found:
            if name in passed_by:
                raise UserError(
                    "lora.targets",
                    f"{name} cannot have an adapter, because its mixer reads the weight without calling the layer",
                    f"choose from {', '.join(last)}",
                )
            if name not in fit:
                raise UserError(
                    "lora.targets",
                    f"{name} ({type(modules[name]).__name__}) is not a linear layer below the head",
                    f"choose from {', '.join(last)}",
                )
    return targets


def _weights_read_by(module: nn.Module) -> set[str]:
    """The names of the submodules of a mixer whose `weight` the mixer's forward reads directly (`self.part.weight`)."""
    if kind_of(module).name == "other":
        return set()
    return {
        node.value.attr
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(code_of(type(module))))))
        if isinstance(node, ast.Attribute)
        and node.attr == "weight"
        and isinstance(node.value, ast.Attribute)
        and isinstance(node.value.value, ast.Name)
        and node.value.value.id == "self"
    }
