"""The reference for scores: all logits at once, in plain torch, differentiated by autograd.

    hidden [M, D], weight [V, D] -> logits [M, V] -> log-probability of the label [M], entropy [M]
    hidden and weight of two models               -> divergence [M] between their distributions

There are M labelled tokens, the hidden size is D and the vocabulary has V entries. The other files of this folder
compute the same numbers without storing [M, V].
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from padfree.batch import LmHead
from padfree.head.divergence import Divergence
from padfree.head.kept_rows import KeptRows


def full_scores(
    hidden: Tensor,
    head: LmHead,
    labels: Tensor,
    inverse_temperature: Tensor,
    *,
    entropy: bool,
    kept: KeptRows | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the log-probability of the label and the entropy of each labelled token, [M] each.

    The entropy is None unless `entropy` is True. `kept`: the vocabulary ids that the softmax of each token covers; None
    stands for the whole vocabulary.
    """
    logits = full_logits(hidden, head, inverse_temperature)
    if kept is not None:
        logits = logits.masked_fill(~kept.tile(0, logits.shape[1]), -torch.inf)
    log_p = logits.log_softmax(1)
    logprobs = log_p.gather(1, labels[:, None])[:, 0]
    if not entropy:
        return logprobs, None
    # As in xlogy, a vocabulary entry with probability 0 (bias -inf) adds 0 and not NaN.
    return logprobs, -(log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0.0)).sum(1)


def full_log_softmax(hidden: Tensor, head: LmHead, inverse_temperature: Tensor) -> Tensor:
    """Return the log-probabilities [M, V] of all vocabulary entries for M tokens."""
    return full_logits(hidden, head, inverse_temperature).log_softmax(1)


def full_logits(hidden: Tensor, head: LmHead, inverse_temperature: Tensor) -> Tensor:
    """Return the logits [M, V] for the hidden states [M, D], divided by the temperature."""
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    logits = hidden.to(dtype) @ head.weight.to(dtype).T
    if head.bias is not None:
        logits = logits + head.bias.to(dtype)
    logits = logits * head.logit_scale
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    return logits * inverse_temperature[:, None]


def full_divergence(student: Tensor, teacher: Tensor, settings: Divergence) -> Tensor:
    """Return the divergence [M] of each token, from the log-probabilities [M, V] of student and teacher."""
    if settings.top_k is not None and settings.top_k < student.shape[1]:
        least = teacher.topk(settings.top_k, dim=1).values[:, -1:]
        student, teacher = (_with_rest(log_p, teacher < least) for log_p in (student, teacher))
    if settings.kind == "forward-kl":
        return _kl(teacher, student)
    if settings.kind == "reverse-kl":
        return _kl(student, teacher)
    beta = settings.beta
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    return beta * _kl(teacher, mixture) + (1 - beta) * _kl(student, mixture)


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return KL(p | q) = Σ p (log p − log q) of each token, [M]. Vocabulary entries with p = 0 contribute 0."""
    there = log_p > -torch.inf
    return (log_p.exp() * (log_p.masked_fill(~there, 0.0) - log_q.masked_fill(~there, 0.0))).sum(1)


def _with_rest(log_p: Tensor, is_rest: Tensor) -> Tensor:
    """Merge the entries that `is_rest` marks into one new last entry of each distribution: [M, V] -> [M, V + 1].

    The new entry gets the total probability of the marked entries, and the marked entries get probability 0.
    """
    rest = log_p.masked_fill(~is_rest, -torch.inf).logsumexp(1, keepdim=True)
    return torch.cat([log_p.masked_fill(is_rest, -torch.inf), rest], dim=1)
