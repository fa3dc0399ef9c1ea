"""Compute the bytes of activations that the forward pass keeps for the backward pass, from the sizes of the model.

A layer keeps the inputs of its matmuls and norms, and the queries, keys, values and output of its attention. A compiled
layer keeps fewer tensors, because its backward pass recomputes cheap operations such as norms. A vision tower keeps the
inputs and results of its matmuls.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, cast

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from padfree.choices import LayerLevel
from padfree.config.checkpointing import is_by_layer, levels_of
from padfree.layers.compile import HOST_INPUT_ONLY_FRACTION
from padfree.layers.offload import OFFLOADED_FRACTION
from padfree.model.expert_adapters import ExpertMatrices
from padfree.model.mixers import kind_of
from padfree.model.parts import parts_of
from padfree.model.structure import layers_of, tower_blocks
from padfree.model.vision.families import family_of
from padfree.model.vision.tower_cost import patches_per_feature
from padfree.sizes import AttentionSizes, ModelSizes, attends, mixers_of

FLOAT32 = 4


def token_bytes(model: PreTrainedModel, size: int, checkpointing: str, *, compiled: bool = False) -> int:
    """Return the bytes of activations per token that the forward pass keeps on the device for the backward pass.

    Activations in host memory are not counted. `size`: the bytes per element. `checkpointing`: the setting
    `parallel.checkpointing`.
    """
    return outside_bytes(model, size) + sum(layer_token_bytes(model, size, checkpointing, compiled=compiled))


def feature_bytes(model: PreTrainedModel, size: int, checkpointing: str) -> int:
    """Return the bytes per image feature that the vision tower and the projector keep for the backward pass.

    The result is 0 for a model without images, or if tower and projector are both frozen.
    """
    family = family_of(model)
    if family is None:
        return 0
    parts = parts_of(model).values()
    trained = {part for part, each in zip(parts, model.parameters(), strict=True) if each.requires_grad}
    blocks = tower_blocks(model)
    kept = 0.0
    if "tower" in trained:
        block_bytes = _block_input_bytes if checkpointing == "full" else _block_bytes
        kept += sum(block_bytes(block, size) for block in blocks) * patches_per_feature(model.config)
    if trained & {"tower", "projector"}:
        in_blocks = {id(module) for block in blocks for module in block.modules()}
        found = (model.base_model.get_submodule(name) for name in family.projector if _is_module(model, name))
        modules = {id(module): module for projector in found for module in projector.modules()}
        kept += sum(_linear_bytes(module, size) for key, module in modules.items() if key not in in_blocks)
    return round(kept)


def _is_module(model: PreTrainedModel, name: str) -> bool:
    """Return True if `name` is the path of a module in the base model, and False if it is that of a parameter."""
    return any(own == name for own, _ in model.base_model.named_modules())


def _block_bytes(block: nn.Module, size: int) -> int:
    """Return the bytes per image patch that a block of a vision tower keeps for the backward pass.

    The block keeps the inputs and results of its matmuls and norms. A gate in its MLP adds one tensor.
    """
    modules = dict(block.named_modules())
    linears = ((name, module) for name, module in modules.items() if isinstance(module, nn.Linear))
    gates = (module.out_features for name, module in linears if "gate" in name)
    return sum(_linear_bytes(module, size) for module in modules.values()) + size * sum(gates)


def _block_input_bytes(block: nn.Module, size: int) -> int:
    norms: Iterator[Any] = (module for module in block.modules() if type(module).__name__.endswith("Norm"))
    return size * max((int(module.weight.shape[-1]) for module in norms), default=0)


def _linear_bytes(module: Any, size: int) -> int:
    """Return the bytes that a matmul or a norm keeps for the backward pass of one token or patch: input and result."""
    if isinstance(module, nn.Linear):
        return size * (module.in_features + module.out_features)
    if isinstance(module, nn.LayerNorm):
        return size * module.normalized_shape[-1]
    if type(module).__name__.endswith("Norm"):
        return _norm_bytes(int(module.weight.shape[-1]), size)
    return 0


def outside_bytes(model: PreTrainedModel, size: int) -> int:
    """Return the bytes per token of the kept activations that belong to no decoder layer.

    These are the activations of the last norm, and the cosines and sines of RoPE.
    """
    sizes = ModelSizes.of(model.config)
    return _norm_bytes(sizes.hidden, size) + 2 * sizes.head * size


def layer_token_bytes(model: PreTrainedModel, size: int, checkpointing: str, *, compiled: bool = False) -> list[int]:
    """Return the bytes per token that each layer keeps on the device for the backward pass."""
    layers = layers_of(model)
    levels = levels_by_layer(checkpointing, len(layers))
    return [level_bytes(model, layer, level, size, compiled) for layer, level in zip(layers, levels, strict=True)]


def levels_by_layer(checkpointing: str, num_layers: int) -> tuple[LayerLevel, ...]:
    """Return the checkpointing level of each layer.

    If `checkpointing` is "host", only the first layers (the fraction `OFFLOADED_FRACTION`) get the level "host". The
    other layers get "attention": they keep the same tensors, but on the device.
    """
    if is_by_layer(checkpointing):
        return levels_of(checkpointing, num_layers)
    levels: list[LayerLevel] = [cast(LayerLevel, checkpointing)] * num_layers
    if checkpointing == "host":
        for number in range(math.ceil(OFFLOADED_FRACTION * num_layers), num_layers):
            levels[number] = "attention"
    return tuple(levels)


def level_bytes(model: PreTrainedModel, layer: nn.Module, level: LayerLevel, size: int, compiled: bool) -> int:
    """Return the bytes per token that `layer` keeps on the device at the checkpointing level `level`.

    "selective" keeps the results of matmuls. In a compiled layer, "selective" keeps the output and the log-sum-exp of
    attention instead.
    """
    sizes = ModelSizes.of(model.config)
    if level == "none":
        return (compiled_layer_bytes if compiled else layer_bytes)(model.config, layer, size)
    if level == "host":
        return 0
    if level == "attention":
        return host_layer_bytes(sizes, size)
    kept = 0
    if level == "selective":
        kept = sizes.output * size + FLOAT32 * sizes.heads if compiled else _matmul_width(layer) * size
    return sizes.hidden * size + kept


def offloaded_bytes(model: PreTrainedModel, size: int, checkpointing: str = "host") -> int:
    """Return the bytes of activations per token that are kept in host memory. `size` is the number of bytes per
    element.
    """
    num_layers, sizes = len(layers_of(model)), ModelSizes.of(model.config)
    offloaded = levels_by_layer(checkpointing, num_layers).count("host")
    input_only = math.ceil(HOST_INPUT_ONLY_FRACTION * num_layers) if checkpointing == "host" else 0
    return input_only * size * sizes.hidden + (offloaded - input_only) * host_layer_bytes(sizes, size)


def host_layer_bytes(sizes: ModelSizes, size: int) -> int:
    """Return the bytes per token that a layer keeps for backward at the checkpointing levels "host" and "attention".

    A layer keeps its input, the results of the matmuls around attention, and attention's output. With "host" they are
    in host memory, with "attention" on the device.
    """
    matmuls = sizes.query + sizes.key + sizes.value + sizes.hidden
    return size * (sizes.hidden + matmuls + sizes.output) + FLOAT32 * sizes.heads


def layer_bytes(config: PreTrainedConfig, layer: nn.Module, size: int) -> int:
    """Return the bytes per token that one layer keeps without activation checkpointing.

    `size` is the number of bytes per element.
    """
    sizes, text = ModelSizes.of(config), config.get_text_config()
    heads = attention_of(sizes, layer)
    modules = dict(layer.named_modules())
    norms = sum(
        size * width if isinstance(module, nn.LayerNorm) else _norm_bytes(width, size)
        for name, module in modules.items()
        if type(module).__name__.endswith("Norm")
        for weight in [getattr(module, "weight", None)]
        for width in [_norm_width(heads, name, heads.head if weight is None else weight.shape[-1])]
    )
    attention = _sequence_bytes(sizes, layer, size)
    if any("experts" in name for name in modules):
        ranks = sum(
            matrix.shape[1]
            for name, module in modules.items()
            if isinstance(module, ExpertMatrices) and name.endswith("lora_A")
            for matrix in module.parameters()
        )
        # of each active expert: input, output, four tensors of the MLP (as below), and adapters
        routed = sizes.experts_per_token * (2 * sizes.hidden + 4 * sizes.expert_mlp + ranks)
        return norms + attention + size * (2 * sizes.hidden + routed + 4 * sizes.shared_mlp)
    copies = 4 if any("gate" in name for name in modules) else 2  # MLP: gate, activation, up and product
    if "gelu_new" in (getattr(text, "hidden_act", None), getattr(text, "activation_function", None)):
        copies += 3  # the activation function consists of elementary operations, each of which keeps its input
    return norms + attention + size * (2 * sizes.hidden + copies * sizes.mlp)


def compiled_layer_bytes(config: PreTrainedConfig, layer: nn.Module, size: int) -> int:
    """Return the bytes per token that a compiled layer keeps without activation checkpointing.

    Such a layer keeps mainly the inputs of matmuls and attention, and its backward pass recomputes cheap operations.
    """
    sizes = ModelSizes.of(config)
    written_out = layer_bytes(config, layer, size)
    if any("experts" in name for name, _ in layer.named_modules()) or mixers_of(layer):
        return written_out  # a layer with experts or a mixer is counted as if it were not compiled
    heads = attention_of(sizes, layer)
    attention = 2 * (heads.query + heads.key + heads.gate) + heads.value + heads.output
    kept = size * (4 * sizes.hidden + attention + 3 * sizes.mlp) + FLOAT32 * sizes.heads
    return min(kept, written_out)


def attention_of(sizes: ModelSizes, layer: nn.Module) -> AttentionSizes:
    """Return the attention sizes of `layer`, which differ between layers with and without a sliding window."""
    numbers = (getattr(module, "layer_idx", None) for module in layer.modules())
    number = next((each for each in numbers if isinstance(each, int)), None)
    if number is not None and sizes.layer_types and sizes.layer_types[number] == "sliding_attention":
        return sizes.windowed_attention
    return sizes.attention


def _sequence_bytes(sizes: ModelSizes, layer: nn.Module, size: int) -> int:
    """Return the bytes per token that the attention and the mixers (such as Mamba) of `layer` keep for the backward
    pass.

    A layer may have attention, mixers, both or neither.
    """
    kept = sum(size * kind_of(mixer).state_width(mixer) for mixer in mixers_of(layer))
    if attends(layer):
        heads = attention_of(sizes, layer)
        gated = heads.gate + heads.output if heads.gate else 0
        # the last term is the log-sum-exp in float32
        kept += size * (heads.query + heads.key + heads.value + heads.output + gated) + FLOAT32 * sizes.heads
    return kept


def cache_bytes(model: PreTrainedModel, size: int) -> int:
    """Return the bytes of the KV cache per token: the keys and values of one token in all layers."""
    sizes = ModelSizes.of(model.config)
    full, windowed = sizes.attention, sizes.windowed_attention
    widths = sizes.full_layers * (full.key + full.value) + sizes.windowed_layers * (windowed.key + windowed.value)
    return widths * size


def _norm_width(heads: AttentionSizes, name: str, width: int) -> int:
    """Return the number of elements per token that the norm `name` normalises. The norm's weight has `width` elements.

    A norm of q or k with a weight of one head's size is applied to all heads, so its input is wider.
    """
    last = name.rpartition(".")[2]
    if width == heads.head and last.startswith("q"):
        return heads.query
    if width == heads.head and last.startswith("k"):
        return heads.key
    return width


def _norm_bytes(width: int, size: int) -> int:
    return (FLOAT32 + size) * width  # the input in float32, and the scaled result


def _matmul_width(layer: nn.Module) -> int:
    """Return the number of elements per token in the outputs of a layer's matmuls, except those of experts.

    Selective checkpointing keeps these outputs.
    """
    return sum(
        module.out_features if isinstance(module, nn.Linear) else int(module.nf)
        for name, module in layer.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and "experts" not in name
    )
