"""Truncated sampling: a token is sampled only from its kept set, the ids that top-k, top-p and min-p keep.

In this example, the three rules are applied one after the other to the probabilities of six ids:

    probabilities    .40  .25  .15  .10  .06  .04
    top_k=5          .42  .26  .16  .10  .06             the 5 largest, rescaled to a sum of 1
    top_p=0.8        .42  .26  .16                       the most probable ids, until their sum reaches 0.8
    min_p=0.5        .42  .26                            at least 0.5 of the largest probability

The logits are divided by the temperature before the rules are applied. A kept set is never empty.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from padfree.config.rollout import TRUNCATION, RolloutConfig
from padfree.kept_sets import KeptSets
from padfree.rollout.sampling_rng import GREEDY


@dataclass(frozen=True, kw_only=True, slots=True)
class Truncation:
    """How a sampler truncates the softmax. The defaults truncate nothing."""

    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    min_new_tokens: int = 0  # a response with fewer tokens does not end

    @property
    def is_active(self) -> bool:
        return self != WHOLE

    @property
    def depends_on_logits(self) -> bool:
        """Whether the ids from which a token is sampled depend on its logits, i.e. top-k, top-p or min-p is set.

        If only `min_new_tokens` is set, these ids depend only on the position of the token in its response.
        """
        return self != Truncation(min_new_tokens=self.min_new_tokens)


def truncation_of(settings: RolloutConfig) -> Truncation:
    return Truncation(**{name: getattr(settings, name) for name in TRUNCATION})


WHOLE = Truncation()
"""The truncation that keeps the whole vocabulary."""


def kept_mask(
    logits: Tensor, truncation: Truncation, keys: Tensor, positions: int | Tensor = 0, stops: Tensor | None = None
) -> Tensor:
    """Return a mask [R, V]: the ids from which the next token of each of R responses may be sampled.

    `logits` [R, V] are already divided by the temperature. `keys` [R]: random keys; the greedy key turns off top-k,
    top-p and min-p. `positions`, int or [R]: how many tokens each response already has.
    """
    allowed = torch.ones_like(logits, dtype=torch.bool)
    if truncation.min_new_tokens:
        assert stops is not None
        may_end = torch.as_tensor(positions, device=logits.device) >= truncation.min_new_tokens
        allowed[:, stops] = may_end[..., None].expand(len(logits), len(stops))
        logits = logits.masked_fill(~allowed, -torch.inf)
    return allowed & (_rules(logits, truncation) | (keys == GREEDY)[:, None])


def _rules(logits: Tensor, truncation: Truncation) -> Tensor:
    """Return a mask [R, V] that is True for the ids that top-k, top-p and min-p keep."""
    vocabulary = logits.shape[1]
    peak = logits.amax(1, keepdim=True)
    threshold = torch.full_like(peak, -torch.inf)
    largest: Tensor | None = None  # the largest logits in descending order, if they are known
    if truncation.top_k is not None and truncation.top_k < vocabulary:
        largest = logits.topk(truncation.top_k, dim=1).values
        threshold = largest[:, -1:]
    if truncation.top_p < 1.0:
        if largest is None and logits.device.type == "cpu":
            largest = logits.sort(dim=1, descending=True).values
        weights = torch.exp(logits - peak).masked_fill(logits < threshold, 0.0)
        needed = truncation.top_p * weights.sum(1, keepdim=True, dtype=torch.float64)
        if largest is None:
            threshold = _searched_threshold(logits, weights, needed)
        else:
            sums = torch.exp(largest - peak).cumsum(1, dtype=torch.float64)
            count = (sums < needed).sum(1, keepdim=True).clamp(max=largest.shape[1] - 1)
            threshold = largest.gather(1, count)
    if truncation.min_p > 0.0:
        threshold = torch.maximum(threshold, peak + math.log(truncation.min_p))
    return logits >= threshold


def truncated_logits(
    logits: Tensor, truncation: Truncation, keys: Tensor, positions: int | Tensor, stops: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the logits [R, V] with -inf for excluded ids, and a mask [R, V] that is True for the ids that are kept.

    Arguments: see `kept_mask`.
    """
    mask = kept_mask(logits, truncation, keys, positions, stops)
    return logits.masked_fill(~mask, -torch.inf), mask


def _searched_threshold(logits: Tensor, weights: Tensor, needed: Tensor) -> Tensor:
    """Return the largest thresholds [R, 1] at which the kept ids have a total weight of at least `needed` [R, 1].

    An id is kept if its logit is not below the threshold of its row. `logits`, `weights` [R, V]: one value per id.
    """
    # Bisection over int32 numbers that have the same order as the float32 logits.
    order = _ordered(logits)
    low, high = order.amin(1, keepdim=True).long(), order.amax(1, keepdim=True).long() + 1
    for _ in range(32):
        middle = (low + high) >> 1
        enough = weights.masked_fill(order < middle, 0.0).sum(1, keepdim=True, dtype=torch.float64) >= needed
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    return _float_of(low)


def _ordered(values: Tensor) -> Tensor:
    """Map float32 values to int32 numbers that have the same order. Equal values, also -0 and 0, get equal numbers."""
    bits = (values + 0.0).contiguous().view(torch.int32)
    return torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


def _float_of(order: Tensor) -> Tensor:
    bits = order.to(torch.int32)
    return torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).view(torch.float32)


def sets_of(mask: Tensor) -> KeptSets:
    """Return the kept sets of R tokens (the ids from which each token may be sampled), on the host.

    `mask` [R, V] is True for the ids in the kept set of each token. The host synchronises with the device.
    """
    is_large = mask.sum(1) * 2 > mask.shape[1]
    rows, ids = (mask != is_large[:, None]).nonzero(as_tuple=True)
    ids = torch.where(is_large[rows], -1 - ids, ids).to(torch.int32)
    counts = torch.bincount(rows, minlength=len(mask)).to(torch.int32)
    return KeptSets(counts.cpu().numpy(), ids.cpu().numpy())
