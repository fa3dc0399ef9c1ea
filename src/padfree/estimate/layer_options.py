"""For each layer of a model and each checkpointing level: the bytes kept for the backward pass, and the cost.

The cost is the work that the backward pass repeats, in FLOPs per token. Kernels between matmuls, such as norms, are
limited by memory bandwidth. Their cost is the FLOPs that matmuls would compute in the same time.

Costs are computed and not measured. So every run with the same settings chooses the same levels
(`padfree.estimate.levels`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from torch import nn
from transformers import PreTrainedModel

from padfree.choices import LayerLevel
from padfree.estimate.activations import attention_of, host_layer_bytes, level_bytes, outside_bytes
from padfree.estimate.levels import Limits, Option
from padfree.estimate.memory import MemoryEstimate, backward_bytes
from padfree.layers.offload import LAYERS_PER_COPY
from padfree.model.structure import layers_of
from padfree.sizes import ModelSizes

FLOPS_PER_COPIED_BYTE = 11_500
"""The FLOPs that the forward pass computes while one byte is copied to host memory.

The value is for an H200: 570 TFLOP/s in compiled layers with bfloat16, and 50 GB/s.
"""

FLOPS_PER_BYTE = 140
"""The FLOPs that matmuls compute while one byte of recomputed activations is written.

The value is for an H200: 570 TFLOP/s and 4 TB/s.
"""

ATTENDED_KEYS = 1024
"""The mean number of keys per query that is assumed for the cost of attention."""

COMPILED: tuple[LayerLevel, ...] = ("host", "full", "selective", "attention", "none")
"""The checkpointing levels of compiled layers.

If two layers could exchange their levels at the same cost, the earlier layer gets the level that comes first here.
"""

PLAIN: tuple[LayerLevel, ...] = ("full", "selective", "none")
"""The checkpointing levels of layers that are not compiled."""


def layer_options(
    model: PreTrainedModel, memory: MemoryEstimate, size: int, levels: tuple[LayerLevel, ...]
) -> list[list[Option]]:
    """Return the options of each layer: the bytes and the cost of the layer at each checkpointing level in `levels`.

    The bytes are those of a micro-batch of `memory.tokens` tokens. `size` is the number of bytes per element.
    """
    offloaded = memory.tokens * host_layer_bytes(ModelSizes.of(model.config), size)
    return [
        [
            Option(
                level=level,
                kept=memory.tokens * level_bytes(model, layer, level, size, memory.compiled),
                working=backward_bytes(level, memory.working_parts, offloaded),
                offloaded=offloaded if level == "host" else 0,
                cost=level_flops(model, layer, level, size, memory.compiled),
            )
            for level in levels
        ]
        for layer in layers_of(model)
    ]


def limits(model: PreTrainedModel, memory: MemoryEstimate, size: int, *, device: float, host: float) -> Limits:
    """Return how many bytes the activations of the layers may take on the device and in host memory.

    `device` and `host`: the bytes that the whole run may use, including weights and optimizer state.
    """
    outside = memory.tokens * outside_bytes(model, size)
    others = memory.device - memory.activations - memory.working + outside
    copied = memory.tokens * host_layer_bytes(ModelSizes.of(model.config), size)
    flops = accumulate(forward_flops(model, layer) for layer in layers_of(model))
    return Limits(
        device=int(device) - others,
        at_end=memory.working_parts.head,
        host=int(host) - memory.host,
        copied=tuple(
            min(memory.tokens * total // FLOPS_PER_COPIED_BYTE, int(copied * number / LAYERS_PER_COPY))
            for number, total in enumerate(flops, 1)
        ),
    )


def repeated_share(model: PreTrainedModel, memory: MemoryEstimate, size: int, levels: Sequence[LayerLevel]) -> float:
    """Return the fraction by which recomputation increases the FLOPs of the layers.

    `levels`: the checkpointing level of each layer.
    """
    layers = layers_of(model)
    repeated = sum(
        level_flops(model, layer, level, size, memory.compiled) for layer, level in zip(layers, levels, strict=True)
    )
    return repeated / (3 * sum(forward_flops(model, layer) for layer in layers))


def level_flops(model: PreTrainedModel, layer: nn.Module, level: LayerLevel, size: int, compiled: bool) -> int:
    """Return the cost of what the backward pass of `layer` recomputes at the checkpointing level `level`.

    The unit is FLOPs per token. A kernel that is limited by memory bandwidth costs the FLOPs that matmuls would compute
    in the same time.
    """
    if level == "none":
        return 0
    sizes = ModelSizes.of(model.config)
    heads = attention_of(sizes, layer)
    matmuls, attention = matmul_flops(model, layer), 4 * heads.output * ATTENDED_KEYS
    if compiled:
        last = 0 if _has_experts(layer) else 2 * sizes.hidden * sizes.mlp  # backward does not repeat the last matmul
        around = 2 * sizes.hidden * (heads.query + heads.key + heads.value + heads.gate + heads.output)
        repeated = {
            "full": matmuls - last + attention,
            "selective": matmuls - last,
            "host": matmuls - last - around,
            "attention": matmuls - last - around,
        }[level]
    else:
        repeated = {"full": matmuls + attention, "selective": attention}[level]
    saved = host_layer_bytes(sizes, size) if level == "host" else level_bytes(model, layer, level, size, compiled)
    between = FLOPS_PER_BYTE * max(0, level_bytes(model, layer, "none", size, compiled) - saved)
    return max(0, repeated) + between


def forward_flops(model: PreTrainedModel, layer: nn.Module) -> int:
    """Return the FLOPs per token of the forward pass of `layer`."""
    sizes = ModelSizes.of(model.config)
    return matmul_flops(model, layer) + 4 * attention_of(sizes, layer).output * ATTENDED_KEYS


def matmul_flops(model: PreTrainedModel, layer: nn.Module) -> int:
    """Return the FLOPs per token of the matmuls of `layer`. Of its experts, only the active ones are included."""
    sizes, found = ModelSizes.of(model.config), 0
    for name, parameter in layer.named_parameters():
        if parameter.ndim == 2 and ".experts." not in f".{name}":
            found += 2 * parameter.numel()
    if _has_experts(layer):
        found += 2 * sizes.experts_per_token * 3 * sizes.hidden * sizes.expert_mlp
    return found


def _has_experts(layer: nn.Module) -> bool:
    return any("experts" in name for name, _ in layer.named_modules())
