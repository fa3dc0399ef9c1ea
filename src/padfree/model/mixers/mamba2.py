"""Mamba-2: Granite 4, Bamba, Nemotron-H, Falcon-H1, Zamba2.

    S_t = exp(dt_t · A) · S_{t-1} + dt_t · B_t x_tᵀ        y_t = S_tᵀ C_t + D · x_t

For token t, x_t [P] is the input of a head, y_t its output and dt_t its step size; B_t and C_t [N] are computed from
the layer's input. Each head has a state S [N, P], a scalar A and a skip weight D. N is the state size and P the head
size. A short convolution on x, B and C comes before the recurrence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from padfree.model.mixers import fla_kernels
from padfree.model.mixers.convolution import convolution
from padfree.model.mixers.mixer import (
    MixerKind,
    convolution_flops,
    convolution_width,
    decay_of,
    depthwise_convolutions,
)


def matches(module: nn.Module) -> bool:
    """Return whether a mixer is Mamba-2: it has one decay per head, a skip connection `D` and a convolution."""
    decay = decay_of(module)
    return decay is not None and decay.ndim == 1 and hasattr(module, "D") and bool(depthwise_convolutions(module))


def _sizes(module: nn.Module) -> tuple[int, int]:
    """Return the number of channels of the input x of Mamba-2, and the state size N per channel."""
    channels = int(getattr(module, "intermediate_size", 0)) or convolution_width(module)
    return channels, int(getattr(module, "ssm_state_size", 1))


def state_flops(module: nn.Module) -> int:
    """Return the FLOPs per token of the recurrence: decaying, writing and reading a state of N numbers per channel."""
    channels, state = _sizes(module)
    return 6 * channels * state + convolution_flops(module)


def state_width(module: nn.Module) -> int:
    channels, _ = _sizes(module)
    return 2 * convolution_width(module) + 2 * channels


def functions(device: torch.device) -> dict[str, Callable[..., Any]] | str:
    return fla_kernels.unavailable(device.type) or {
        "causal_conv1d_fn": convolution,
        "mamba2_chunk_scan": fla_kernels.mamba2_scan,
        "mamba2_split_conv1d_scan_combined": fla_kernels.no_fused_layer,
    }


KIND = MixerKind(
    name="mamba2",
    matches=matches,
    state_flops=state_flops,
    state_width=state_width,
    functions=functions,
    dtypes=lambda device: fla_kernels.DTYPES,
)
