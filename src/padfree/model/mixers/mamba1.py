"""Mamba: Jamba, Zamba, Falcon-Mamba.

    S_t = exp(dt_t · A) ∘ S_{t-1} + dt_t · B_t x_tᵀ        y_t = S_tᵀ C_t + D · x_t         A and S are [channels, N]

with a short convolution on x before it. Its kernels know nothing of segments: there is no fast way.
"""

from __future__ import annotations

from torch import Tensor, nn

from padfree.model.mixers.mixer import MixerKind, convolution_flops, convolution_width


def matches(module: nn.Module) -> bool:
    """A decay for each number of the state, and a skip connection `D`."""
    decay = getattr(module, "A_log", None)
    return isinstance(decay, Tensor) and decay.ndim >= 2 and hasattr(module, "D")


def state_flops(module: nn.Module) -> int:
    decay = module.A_log
    assert isinstance(decay, Tensor)
    return 7 * decay.numel() + convolution_flops(module)


def state_width(module: nn.Module) -> int:
    """Without kernels the whole state of every token is kept."""
    decay = module.A_log
    assert isinstance(decay, Tensor)
    return 2 * decay.numel() + 2 * convolution_width(module)


KIND = MixerKind(name="mamba1", matches=matches, state_flops=state_flops, state_width=state_width)
