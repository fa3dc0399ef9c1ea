"""Low-rank adapters (LoRA, from PEFT), which are trained instead of the model's weights.

    y = W x + scale * B (A x)      W [out, in] frozen, A [rank, in], B [out, rank] trained, scale = alpha / rank

`add_adapters` inserts PEFT's layers into the model in place. Call `padfree.attach` first, because it tests the
architecture without adapters.

The target "all-linear" selects the linear layers of the language model, except the head. Stacked experts, and routers
that are not an `nn.Linear`, get adapters only if they are named:

    lora.targets = ["all-linear", "experts", "mlp.gate"]
"""

from __future__ import annotations

import ast
import copy
import hashlib
import importlib.util
import inspect
import math
import re
import textwrap
import warnings
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from padfree.config import LoraConfig
from padfree.errors import UserError
from padfree.model.expert_adapters import adapt_experts, adapt_router, has_expert_adapters, stacked_weights
from padfree.model.mixers import kind_of
from padfree.model.mixers.own_forward import code_of
from padfree.model.parts import parts_of
from padfree.model.routers import routers_of
from padfree.model.scalar_head import HEAD as SCALAR_HEAD
from padfree.model.scalar_head import WEIGHT as SCALAR_WEIGHT

ADAPTER = "default"
"""The name that PEFT gives an adapter by default."""

ALL_LINEAR = "all-linear"

_ADAPTER_NAME = re.compile(rf"\.lora_[AB]\.({ADAPTER}\.weight|\w+_proj)$")


def is_adapter(name: str) -> bool:
    """Return whether `name` is the name of a parameter of an adapter."""
    return _ADAPTER_NAME.search(name) is not None


def is_trained_with_adapters(name: str) -> bool:
    """Return whether a parameter of this name is trained in a model with adapters: it belongs to an adapter or to the
    scalar head.
    """
    return is_adapter(name) or name == SCALAR_WEIGHT


def add_adapters(
    model: PreTrainedModel, settings: LoraConfig, *, seed: int = 0, dtype: torch.dtype | None = None
) -> None:
    """Freeze the model and insert adapters. `dtype`: the dtype of the adapters (None: float32).

    If the model is on the meta device, `load_model` initialises the adapters later.
    """
    if importlib.util.find_spec("peft") is None:
        raise UserError(
            "lora.rank", f"is {settings.rank}, but peft is not installed", "install it with pip install 'padfree[lora]'"
        )
    from peft import LoraConfig as PeftConfig
    from peft import inject_adapter_in_model

    layers, weights = _targets(model, settings.targets)
    config = PeftConfig(
        task_type="CAUSAL_LM",
        r=settings.rank,
        lora_alpha=settings.rank if settings.alpha is None else settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=_endings(layers, (name for name, _ in model.named_modules())),
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
    )
    parameters = [name for name, _ in model.named_parameters()]
    written = copy.deepcopy(config)
    literal = [*weights]
    if _takes_for_experts(written, model):  # PEFT does not reinterpret the names in `target_parameters`
        written.target_modules = []
        literal += [f"{name}.weight" for name in layers]
    if literal:
        written.target_parameters = _endings(literal, parameters, least=3)
        written.lora_dropout = 0.0  # PEFT refuses dropout for parameters; loading for inference does not need it
    model.requires_grad_(False)
    if layers:
        config.target_modules = ["given by the names in state_dict"]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # the names match no target module
            inject_adapter_in_model(
                config,
                model,
                adapter_name=ADAPTER,
                low_cpu_mem_usage=True,
                state_dict={f"{name}.lora_A.weight": torch.empty(0) for name in layers},
            )
    scale = config.lora_alpha / config.r
    for name, module in list(model.named_modules()):
        names = tuple(part for part in stacked_weights(module) if f"{name}.{part}" in weights)
        if names:
            adapt_experts(module, names, rank=config.r, scale=scale, dropout=settings.dropout)
        elif f"{name}.weight" in weights:
            adapt_router(module, adapter=ADAPTER, rank=config.r, scale=scale)
    model.peft_config = {ADAPTER: written}
    if isinstance(head := getattr(model, SCALAR_HEAD, None), nn.Linear):
        head.requires_grad_(True)
    for module_name, layer in model.named_modules():
        if not is_adapted(layer) and not has_expert_adapters(layer):
            continue
        device = next(parameter for name, parameter in layer.named_parameters() if not is_adapter(f".{name}")).device
        for side in (layer.lora_A, layer.lora_B):
            side.to(dtype)
            if device.type != "meta":
                side.to_empty(device=device)
        if device.type == "meta":
            continue
        for name, parameter in layer.named_parameters(prefix=module_name):
            if is_adapter(name):
                parameter.data.copy_(initial_values(name, parameter.shape, seed))


def is_adapted(module: nn.Module) -> bool:
    """Return whether a module has an adapter: it is a linear layer or a router that `add_adapters` changed."""
    return hasattr(module, "lora_A") and not has_expert_adapters(module)


def needs_merging(model: nn.Module) -> bool:
    """Return whether sampling servers must get merged weights instead of adapters.

    Servers do not reliably load adapters that PEFT lists as `target_parameters` (of stacked experts and routers, for
    example).
    """
    return any(config.target_parameters for config in getattr(model, "peft_config", {}).values())


def adapted_modules(model: nn.Module) -> list[str]:
    """Return the last parts of the names of all modules with adapters, for example q_proj and v_proj."""
    return sorted({name.rpartition(".")[2] for name, module in model.named_modules() if is_adapted(module)})


def initial_values(name: str, shape: torch.Size, seed: int) -> Tensor:
    """Return the initial values of an adapter's tensor, on the CPU.

    `name` is the tensor's name without the parts that activation checkpointing and compilation add to it.
    """
    if ".lora_B." in name:
        return torch.zeros(shape)
    number = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:7], "big")
    bound = 1 / math.sqrt(shape[-1])
    return torch.empty(shape).uniform_(-bound, bound, generator=torch.Generator().manual_seed(number))


def added_weight(layer: Any, a: Tensor, b: Tensor) -> Tensor:
    """Return the adapter's contribution to the weight of its layer, in float32.

    `a` [rank, in] and `b` [out, rank] are unsharded.
    """
    product = (b.float() @ a.float()) * float(layer.scaling[ADAPTER])
    return product.T if layer.fan_in_fan_out else product  # GPT-2 stores weights as [in, out]


def adapts_experts(model: PreTrainedModel, targets: Sequence[str]) -> bool:
    """Return whether `targets` select stacked weights of experts."""
    modules = (name.rpartition(".")[0] for name in _targets(model, targets)[1])
    return any(stacked_weights(model.get_submodule(name)) for name in modules)


def _outside_language_model(model: PreTrainedModel) -> set[str]:
    """Return the names of the modules that belong to the tower or the projector of a vision-language model."""
    found: dict[bool, set[str]] = {True: set(), False: set()}
    for name, part in parts_of(model).items():
        pieces = name.split(".")
        found[part == "language_model"].update(".".join(pieces[:count]) for count in range(1, len(pieces)))
    return found[False] - found[True]


def _targets(model: PreTrainedModel, targets: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the full names of the linear layers, and of the weights of experts and routers, that `targets` select."""
    heads = (model.get_output_embeddings(), getattr(model, SCALAR_HEAD, None))  # type: ignore[no-untyped-call]
    ends = (model.get_input_embeddings(), *heads)  # losses read the head's weight directly, without an adapter
    elsewhere = _outside_language_model(model)
    modules = {name: module for name, module in model.named_modules() if name and name not in elsewhere}
    linear = {name for name, module in modules.items() if type(module).forward in (nn.Linear.forward, Conv1D.forward)}
    # Mixers read the weights of some linear layers without calling the layers (Mamba's time step, for example).
    passed_by = {f"{name}.{part}" for name, module in modules.items() for part in weights_read_by(module)} & linear
    fit = {name for name in linear - passed_by if modules[name] not in ends}
    routers = {router.module for router in routers_of(model)}
    experts = {name: names for name, module in modules.items() if (names := stacked_weights(module))}
    named = {name: ("weight",) for name, module in modules.items() if module in routers and name not in fit} | experts
    last = sorted({name.rpartition(".")[2] for name in [*fit, *named]})
    layers, weights = set[str](), set[str]()
    for target in targets:
        if target == ALL_LINEAR:
            layers.update(fit)
            continue
        found = [name for name in modules if _ends_with(name, target)]
        parts = [f"{name}.{part}" for name, names in experts.items() for part in names]
        chosen = [part for part in parts if _ends_with(part, target) and "." in target]
        chosen += [f"{name}.{part}" for name in found if name in named for part in named[name]]
        weights.update(chosen)
        if not found and not chosen:
            raise UserError("lora.targets", f"the model has no module {target!r}", f"choose from {', '.join(last)}")
        for name in found:
            if name in passed_by:
                raise UserError(
                    "lora.targets",
                    f"{name} cannot have an adapter, because the model reads the weight without calling the layer",
                    f"choose from {', '.join(last)}",
                )
            if name not in named and hasattr(modules[name], "num_experts"):
                raise UserError(
                    "lora.targets",
                    f"the experts of {name} ({type(modules[name]).__name__}) cannot have adapters, because the class "
                    "does not use transformers' experts interface",
                    f"choose from {', '.join(last)}",
                )
            if name not in fit and name not in named:
                raise UserError(
                    "lora.targets",
                    f"{name} ({type(modules[name]).__name__}) cannot have an adapter, because it is the output head or "
                    "not a linear layer",
                    f"choose from {', '.join(last)}",
                )
        if ALL_LINEAR in targets and not chosen:
            raise UserError(
                "lora.targets",
                f"{list(targets)} names both {ALL_LINEAR!r} and single linear layers, which {ALL_LINEAR!r} includes",
                f"remove either the single layers or {ALL_LINEAR!r} (only experts and routers can be added to it)",
            )
        layers.update(name for name in found if name in fit)
    return sorted(layers), sorted(weights)


def _ends_with(name: str, ending: str) -> bool:
    return f".{name}".endswith(f".{ending}")


def _endings(names: Collection[str], everything: Iterable[str], *, least: int = 1) -> list[str]:
    """Return the shortest endings of names, such as `q_proj`, that select exactly `names` out of `everything`.

    An ending has at least `least` parts, which are separated by dots.
    """
    chosen, counts = dict[str, int](), dict[str, int]()
    for found, every in ((chosen, names), (counts, everything)):
        for name in every:
            parts = name.split(".")
            for begin in range(len(parts)):
                ending = ".".join(parts[begin:])
                found[ending] = found.get(ending, 0) + 1
    shortest = set()
    for name in names:
        parts = name.split(".")
        ends = (".".join(parts[begin:]) for begin in reversed(range(len(parts) - least + 1)))
        shortest.add(next((end for end in ends if chosen[end] == counts[end]), name))
    return sorted(shortest)


def _takes_for_experts(config: Any, model: PreTrainedModel) -> bool:
    """Return whether PEFT would take some of the targeted linear layers for experts.

    PEFT decides by name: some linear layers have the names that the experts' projections have in old checkpoints.
    """
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    trial = copy.deepcopy(config)
    try:
        convert_peft_config_for_transformers(trial, model=model, conversions=None)
    except ValueError:  # only some of the projections that are fused in experts are targets
        return True
    return set(trial.target_modules) != set(config.target_modules)


def weights_read_by(module: nn.Module) -> set[str]:
    """Return the names of the submodules whose weight a mixer (a recurrence or convolution) reads directly.

    The mixer's forward reads `self.name.weight` of such a submodule instead of calling the submodule.
    """
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
