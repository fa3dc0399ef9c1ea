"""A short convolution between two gates: LFM2.

    y_t = C_t ∘ Σ_i w_i ∘ (B ∘ x)_{t-i}        i = 0, 1, 2

For token t, x_t is the input, B_t and C_t are the gates, and y_t is the output. w_i are the weights of the convolution,
and ∘ is the elementwise product.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from padfree.model.mixers.convolution import convolution
from padfree.model.mixers.mixer import (
    MixerKind,
    convolution_flops,
    convolution_width,
    decay_of,
    depthwise_convolutions,
)


def matches(module: nn.Module) -> bool:
    """Return whether a mixer is a short convolution: it has a convolution along the sequence and no recurrence."""
    return bool(depthwise_convolutions(module)) and decay_of(module) is None


def state_flops(module: nn.Module) -> int:
    return convolution_flops(module) + 2 * convolution_width(module)


def state_width(module: nn.Module) -> int:
    return 3 * convolution_width(module)


def functions(device: torch.device) -> dict[str, Callable[..., Any]] | str:
    return {"causal_conv1d_fn": convolution}


def dtypes(device: torch.device) -> tuple[torch.dtype, ...]:
    """Return the dtypes that short convolutions support. The first is the usual training dtype on this device: bfloat16
    on a GPU, float32 on a CPU.
    """
    first = torch.bfloat16 if device.type == "cuda" else torch.float32
    return first, torch.bfloat16, torch.float16, torch.float32, torch.float64


KIND = MixerKind(
    name="short_convolution",
    matches=matches,
    state_flops=state_flops,
    state_width=state_width,
    functions=functions,
    dtypes=dtypes,
)
