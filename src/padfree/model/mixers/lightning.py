"""Lightning attention: linear attention with a fixed decay for each head, as in MiniMax-Text-01.

    S_t = λ · S_{t-1} + k_t v_tᵀ        o_t = S_tᵀ q_t        S is [d, d] per head

For token t, S_t is the recurrent state, q_t, k_t and v_t are query, key and value, and o_t is the output; λ is the
decay. transformers computes the recurrence in blocks of tokens, in plain PyTorch.
"""

from __future__ import annotations

from torch import nn

from padfree.model.mixers.mixer import MixerKind


def matches(module: nn.Module) -> bool:
    """Return whether a mixer is lightning attention: its decay rates, one per head, are a buffer, not a parameter."""
    return "slope_rate" in module._buffers


def _heads(module: nn.Module) -> tuple[int, int]:
    return int(module.num_attention_heads), int(module.head_dim)  # type: ignore[arg-type]


def state_flops(module: nn.Module) -> int:
    """Return the FLOPs per token of the recurrence, which is computed in blocks of tokens.

    The FLOPs include the products with keys and values inside a block, reading the state at the beginning of the block,
    and updating the state at its end.
    """
    heads, dim = _heads(module)
    return heads * (4 * int(module.block_size) * dim + 4 * dim * dim)  # type: ignore[arg-type]


def state_width(module: nn.Module) -> int:
    """Return the number of values per token saved for backward: q, k, v, the output, and the attention scores inside
    each block of tokens.
    """
    heads, dim = _heads(module)
    return 4 * heads * dim + 2 * heads * int(module.block_size)  # type: ignore[arg-type]


KIND = MixerKind(name="lightning", matches=matches, state_flops=state_flops, state_width=state_width)
