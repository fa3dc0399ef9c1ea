"""A causal depthwise convolution along a pack; no tap reaches across the start of a segment.

    pack       a b c | d e        taps w0 w1 w2; w2 is applied to the token itself
    y          w2·a, w1·a + w2·b, w0·a + w1·b + w2·c | w2·d, w1·d + w2·e

Each output y_t is the bias plus the sum of tap weights times the inputs x of token t and of the few tokens before it in
the same segment. The code is plain PyTorch, which the compiler fuses with the surrounding operations. Sums are in
float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.activations import ACT2FN

from padfree.segments import Segments


def positions_of(num_tokens: int, segments: Segments) -> Tensor:
    """Return the position of each of T tokens in its segment, [T]."""
    starts = segments.cu_seqlens
    tokens = torch.arange(num_tokens, device=starts.device, dtype=starts.dtype)
    return tokens - starts[torch.searchsorted(starts, tokens, right=True) - 1]


def convolution(
    hidden_states: Tensor,  # [1, C, T]
    weight: Tensor,  # [C, W]
    bias: Tensor | None = None,  # [C]
    activation: str | None = None,
    *,
    segments: Segments | None = None,
    seq_idx: Segments | None = None,
    **_: Any,
) -> Tensor:
    """Apply a causal depthwise convolution along a pack, in place of transformers' `causal_conv1d_fn`.

    There are C channels, T tokens and W taps. Returns [1, C, T]. Some callers pass the segments as `seq_idx`.
    """
    segments = seq_idx if segments is None else segments
    assert segments is not None
    states = hidden_states.transpose(1, 2)  # [1, T, C], the order in memory
    num_tokens, width = states.shape[1], weight.shape[1]
    positions = positions_of(num_tokens, segments)
    dtype = torch.promote_types(states.dtype, torch.float32)
    taps = weight.to(dtype)
    total = states.to(dtype) * taps[:, width - 1]
    for back in range(1, width):
        earlier = functional.pad(states, (0, 0, back, 0))[:, :num_tokens]
        earlier = earlier.masked_fill((positions < back)[:, None], 0)
        total = total + earlier.to(dtype) * taps[:, width - 1 - back]
    if bias is not None:
        total = total + bias.to(dtype)
    if activation is not None:
        total = ACT2FN[activation](total)
    return total.to(hidden_states.dtype).transpose(1, 2)
