"""Lightning attention: linear attention with a fixed decay for each head, as in MiniMax-Text-01.

    S_t = λ · S_{t-1} + k_t v_tᵀ        o_t = S_tᵀ q_t        S is [d, d] per head

transformers computes it in blocks, in plain PyTorch.
"""

from __future__ import annotations

from torch import nn

from padfree.model.mixers.mixer import MixerKind


def matches(module: nn.Module) -> bool:
    """Whether the module has a decay rate per head that is a buffer, not a parameter."""
    return "slope_rate" in module._buffers


def _heads(module: nn.Module) -> tuple[int, int]:
    return int(module.num_attention_heads), int(module.head_dim)  # type: ignore[arg-type]


def state_flops(module: nn.Module) -> int:
    """Per block of n tokens: scores and values inside the block, and the state before and after it."""
    heads, dim = _heads(module)
    return heads * (4 * int(module.block_size) * dim + 4 * dim * dim)  # type: ignore[arg-type]


def state_width(module: nn.Module) -> int:
    """q, k, v and the output, and each block's scores."""
    heads, dim = _heads(module)
    return 4 * heads * dim + 2 * heads * int(module.block_size)  # type: ignore[arg-type]


KIND = MixerKind(name="lightning", matches=matches, state_flops=state_flops, state_width=state_width)
