"""A causal convolution, each channel by itself, along a packed row: no tap reaches over the start of a segment.

    row        a b c | d e        taps w0 w1 w2, the last one on the token itself
    y          w2·a, w1·a + w2·b, w0·a + w1·b + w2·c | w2·d, w1·d + w2·e

y_t = bias + Σ_i w_i · x_{t-i}, i < 4 or so, where t-i is in the segment of t. In plain PyTorch, which a compiled layer
turns into one kernel with what is around it; sums are made in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.activations import ACT2FN

from padfree.batch import Segments


def positions_of(num_tokens: int, segments: Segments) -> Tensor:
    """[T] of each token in its segment."""
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
    """In the place of transformers' `causal_conv1d_fn`; forwards that take no `segments` pass a `seq_idx` on."""
    segments = seq_idx if segments is None else segments
    assert segments is not None
    rows = hidden_states.transpose(1, 2)  # [1, T, C]: so they lie in memory
    num_tokens, width = rows.shape[1], weight.shape[1]
    positions = positions_of(num_tokens, segments)
    dtype = torch.promote_types(rows.dtype, torch.float32)
    taps = weight.to(dtype)
    total = rows.to(dtype) * taps[:, width - 1]
    for back in range(1, width):
        earlier = functional.pad(rows, (0, 0, back, 0))[:, :num_tokens]
        earlier = earlier.masked_fill((positions < back)[:, None], 0)
        total = total + earlier.to(dtype) * taps[:, width - 1 - back]
    if bias is not None:
        total = total + bias.to(dtype)
    if activation is not None:
        total = ACT2FN[activation](total)
    return total.to(hidden_states.dtype).transpose(1, 2)
