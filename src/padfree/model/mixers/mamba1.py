"""Mamba: Jamba, Zamba, Falcon-Mamba.

Each channel has a recurrent state S [N], where N is the state size:

    S_t = exp(dt_t · A) ∘ S_{t-1} + dt_t · x_t · B_t        y_t = S_tᵀ C_t + D · x_t

For token t, the scalars x_t, y_t and dt_t are the channel's input, output and step size. B_t and C_t [N] are computed
from the input, A [N] and the scalar D are weights of the channel, and ∘ is the elementwise product. A short convolution
on x comes before the recurrence.
"""

from __future__ import annotations

from torch import nn

from padfree.model.mixers.mixer import MixerKind, convolution_flops, convolution_width, decay_of


def matches(module: nn.Module) -> bool:
    """Return whether a mixer (a module that mixes tokens without attention) is Mamba.

    Mamba is recognised by its parameters: a decay for each element of the state, and a skip connection `D`.
    """
    decay = decay_of(module)
    return decay is not None and decay.ndim >= 2 and hasattr(module, "D")


def state_flops(module: nn.Module) -> int:
    decay = decay_of(module)
    assert decay is not None
    return 7 * decay.numel() + convolution_flops(module)


def state_width(module: nn.Module) -> int:
    """Return the number of values per token that a Mamba layer saves for backward.

    This includes the recurrent state after every token, which plain PyTorch code saves.
    """
    decay = decay_of(module)
    assert decay is not None
    return 2 * decay.numel() + 2 * convolution_width(module)


KIND = MixerKind(name="mamba1", matches=matches, state_flops=state_flops, state_width=state_width)
