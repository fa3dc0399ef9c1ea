"""A short convolution between two gates: LFM2.

y_t = C_t ∘ Σ_i w_i ∘ (B ∘ x)_{t-i}        i < 3
"""

from __future__ import annotations

from torch import nn

from padfree.model.mixers.mixer import (
    MixerKind,
    convolution_flops,
    convolution_width,
    decay_of,
    depthwise_convolutions,
)


def matches(module: nn.Module) -> bool:
    """A convolution along the sequence and no recurrence."""
    return bool(depthwise_convolutions(module)) and decay_of(module) is None


def state_flops(module: nn.Module) -> int:
    return convolution_flops(module) + 2 * convolution_width(module)


def state_width(module: nn.Module) -> int:
    return 3 * convolution_width(module)


KIND = MixerKind(
    name="short_convolution",
    matches=matches,
    state_flops=state_flops,
    state_width=state_width,
)
