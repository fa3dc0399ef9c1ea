"""Sums, means and scans over the samples of a pack, without a loop over samples.

    sample_index   [T]   0   0   0 | 1   1 | 2   2        the pad has index 2 = num_samples
    values         [T]  .5  .3  .2 |.8  .1 | 9   9
    segment_sum    [B]         1.0       .9               the pad is dropped
    spread         [T] 1.0 1.0 1.0 |.9  .9 | 0   0        the pad gets 0

There are T tokens and B samples. `sample_index` need not be sorted, and the tokens of a sample need not be complete:
under context parallelism each rank sums the tokens it holds, and `reduce` sums the [B] results over the ranks that
share a pack. Sums are computed in float64. The order of additions differs between layouts, and on a GPU between runs;
in float64 this does not affect the float32 results.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from padfree.arrays import need_whole
from padfree.batch import need_tensor
from padfree.losses import checks

Reduce = Callable[[Tensor], Tensor]
"""A function that sums a tensor over ranks, for example over the ranks that share a pack. It need not be
differentiable."""


def no_reduce(values: Tensor) -> Tensor:
    """Return the values unchanged: the reduction for a process that does not share its pack with other processes."""
    return values


def segment_sum(values: Tensor, sample_index: Tensor, num_samples: int) -> Tensor:
    """The sum of the values [T, ...] over each sample, [B, ...] in float64.

    Elements whose index is `num_samples` (the pad) are dropped.
    """
    need_whole("num_samples", num_samples, 0, "give the number of samples")
    values = checks.wide("values", values)
    sums = values.new_zeros((num_samples + 1, *values.shape[1:]))
    return sums.index_add(0, checks.index("sample_index", sample_index, num_samples + 1), values)[:num_samples]


def spread(values: Tensor, sample_index: Tensor) -> Tensor:
    """Return [T]: each of T tokens gets the value [B] of its sample, and the pad gets 0. The dtype is kept."""
    need_tensor("values", values)
    return torch.cat([values, values.new_zeros(1)])[checks.index("sample_index", sample_index, len(values) + 1)]


def segment_mean(
    values: Tensor, mask: Tensor, sample_index: Tensor, num_samples: int, reduce: Reduce = no_reduce
) -> Tensor:
    """For each of B samples, the mean of the values [T] that `mask` selects, [B] in float64.

    The mean is 0 if the mask selects no token of the sample. `reduce` sums over the ranks that hold parts of the
    samples.
    """
    values, mask = checks.wide("values", values), checks.mask("mask", mask)
    sums = torch.stack([torch.where(mask, values, 0.0), mask.double()], dim=1)
    totals, counts = reduce(segment_sum(sums, sample_index, num_samples)).unbind(1)
    return totals / counts.clamp(min=1.0)


def scan_back(values: Tensor, factors: Tensor, length: int | None = None) -> Tensor:
    """Solve `out[t] = values[t] + factors[t] * out[t + 1]` for `out` [T]. The value after the end is 0.

    Two neighbouring steps of the recurrence combine into one step over twice as many tokens. Therefore log2(T) passes
    over the whole pack replace a loop over T tokens. A factor of 0 ends the recurrence. If every run of `length`
    consecutive factors contains a 0, log2(length) passes suffice.
    """
    out, factors = values.double(), factors.double()
    num_tokens = len(values)
    reach, limit = 1, num_tokens if length is None else min(length, num_tokens)
    while reach < limit:
        behind = torch.nn.functional.pad(out[reach:], (0, reach))
        out = out + factors * behind
        factors = factors * torch.nn.functional.pad(factors[reach:], (0, reach))
        reach *= 2
    return out


def continues(sample_index: Tensor) -> Tensor:
    """For each of T tokens, whether the next token belongs to the same sample, as bools [T].

    `sample_index` must be the whole pack in order, not a context-parallel shard.
    """
    same = torch.zeros_like(sample_index, dtype=torch.bool)
    same[:-1] = sample_index[1:] == sample_index[:-1]
    return same
