"""The definition of right: all logits at once, plain torch, differentiated by autograd.

    hidden [M, D], weight [V, D] -> logits [M, V] -> log-probability of the label [M], entropy [M]

Everything else in this folder computes the same numbers without the [M, V].
"""

from __future__ import annotations

import torch
from torch import Tensor

from padfree.batch import LmHead


def full_scores(
    hidden: Tensor, head: LmHead, labels: Tensor, inverse_temperature: Tensor, *, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities [M] and entropies [M] of rows that all have a label; float32, or float64 for float64."""
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    logits = hidden.to(dtype) @ head.weight.to(dtype).T
    if head.bias is not None:
        logits = logits + head.bias.to(dtype)
    logits = logits * head.logit_scale
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    logits = logits * inverse_temperature[:, None]
    log_p = logits.log_softmax(1)
    logprobs = log_p.gather(1, labels[:, None])[:, 0]
    if not entropy:
        return logprobs, None
    # xlogy-like: an entry that does not exist (bias -inf) adds 0, not NaN
    return logprobs, -(log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0.0)).sum(1)
