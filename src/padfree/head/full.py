"""The definition of right: all logits at once, plain torch, differentiated by autograd.

    hidden [M, D], weight [V, D] -> logits [M, V] -> log-probability of the label [M], entropy [M]

Everything else in this folder computes the same numbers without the [M, V].
"""

from __future__ import annotations

import torch
from torch import Tensor


def full_scores(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    inverse_temperature: Tensor,
    *,
    bias: Tensor | None,
    softcap: float | None,
    logit_scale: float,
    entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities [M] and entropies [M] of rows that all have a label; float32, or float64 for float64."""
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    logits = hidden.to(dtype) @ weight.to(dtype).T
    if bias is not None:
        logits = logits + bias.to(dtype)
    logits = logits * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits * inverse_temperature[:, None]
    log_p = logits.log_softmax(1)
    logprobs = log_p.gather(1, labels[:, None])[:, 0]
    if not entropy:
        return logprobs, None
    # xlogy-like: an entry that does not exist (bias -inf) adds 0, not NaN
    return logprobs, -(log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0.0)).sum(1)
