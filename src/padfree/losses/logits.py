"""Compute log-probabilities and entropy from existing logits.

    logits [..., V]  +  labels [...]   ->   logprobs [...], entropy [...]

This module is for code that already has all logits; `padfree.head` never stores them. Only one chunk of tokens at a
time is converted to float32. V is the vocabulary size, z = logits / temperature and p = softmax(z):

    logprob = z[label] - lse(z)       gradient w.r.t. z: onehot - p
    entropy = -Σ p log p              gradient w.r.t. z: -p (log p + entropy)
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from padfree.arrays import need_number
from padfree.errors import UserError
from padfree.losses import checks

CHUNK_ELEMENTS = 1 << 24
"""The number of logits that are converted to float32 at a time. They take 64 MiB."""


def score_logits(
    logits: Tensor, labels: Tensor, *, temperature: float = 1.0, entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return the log-probability of each label, and, if `entropy` is True, the entropy at each position (else None).

    `logits` [..., V] and `labels` [...] give results [...] in float32, or in float64 for float64 logits. Differentiable
    in the logits.
    """
    checks.quantity("logits", logits)
    labels = checks.index("labels", labels, logits.shape[-1] if logits.dim() else 0)
    if labels.shape != logits.shape[:-1]:
        raise UserError(
            "labels",
            f"has shape {tuple(labels.shape)}, but logits has shape {tuple(logits.shape)}",
            "give one label per token",
        )
    need_number("temperature", temperature, sys.float_info.min, sys.float_info.max, "give a positive number")
    logprobs, entropies = _ScoreLogits.apply(logits, labels, 1.0 / temperature, entropy)  # type: ignore[no-untyped-call]
    return logprobs, entropies if entropy else None


class _ScoreLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, scale: float, with_entropy: bool) -> tuple[Tensor, Tensor]:
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        logprobs, lse, entropy = (torch.empty(labels.shape, dtype=dtype, device=logits.device) for _ in range(3))
        for chunk, chosen, *out in _chunks(logits, labels, logprobs, lse, entropy):
            scaled = chunk.to(dtype) * scale
            chunk_logprobs, chunk_lse, chunk_entropy = out
            chunk_lse.copy_(torch.logsumexp(scaled, dim=-1))
            chunk_logprobs.copy_(scaled.gather(-1, chosen[:, None].long()).squeeze(-1) - chunk_lse)
            if with_entropy:
                logs = scaled - chunk_lse[:, None]
                chunk_entropy.copy_(-_weighted(logs.exp(), logs).sum(-1))
        ctx.save_for_backward(logits, labels, lse, entropy if with_entropy else lse)
        ctx.scale, ctx.with_entropy = scale, with_entropy
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor, None, None, None]:
        logits, labels, lse, entropy = ctx.saved_tensors
        grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
        for chunk, chosen, chunk_lse, chunk_entropy, upstream, upstream_entropy, out in _chunks(
            logits, labels, lse, entropy, grad_logprobs, grad_entropy, grad
        ):
            logprobs = chunk.to(lse.dtype) * ctx.scale - chunk_lse[:, None]
            weights = torch.exp(logprobs)
            slopes = -upstream[:, None] * weights
            if ctx.with_entropy:
                slopes -= upstream_entropy[:, None] * _weighted(weights, logprobs + chunk_entropy[:, None])
            slopes.scatter_add_(-1, chosen[:, None].long(), upstream[:, None])
            out.copy_(slopes.mul_(ctx.scale))
        return grad, None, None, None


def _weighted(weights: Tensor, values: Tensor) -> Tensor:
    """Return weights · values, but 0 where the weight is 0, because 0 · -inf is NaN."""
    return torch.where(weights > 0, weights * values, 0.0)


def _chunks(logits: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield chunks of c tokens, as views: the logits [c, V], and the entries [c] of each tensor in `others`."""
    if logits.dim() == 1:
        yield (logits[None], *(other[None] for other in others))
    elif logits.dim() == 2:
        step = max(1, CHUNK_ELEMENTS // max(1, logits.shape[-1]))
        for start in range(0, len(logits), step):
            yield tuple(tensor[start : start + step] for tensor in (logits, *others))
    else:
        for block in zip(logits, *others, strict=True):
            yield from _chunks(*block)
