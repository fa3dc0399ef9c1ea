"""Sums, means and scans over the samples of a pack, without a loop.

For example, two samples of 3 and 2 tokens, and a padding token with the index 2 = num_samples:

    sample_index   [T]   0  0  0 | 1  1 | 2
    values         [T]  .5 .3 .2 |.8 .1 | 9
    segment_sum    [B]       1.0     .9

A context rank sums only its own tokens, and `reduce` adds the results of the ranks. Sums are float64, so that the order
of additions hardly changes results rounded to float32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from padfree.arrays import need_whole
from padfree.batch import need_tensor
from padfree.losses import checks

Reduce = Callable[[Tensor], Tensor]
"""A function that sums a tensor over ranks. It need not be differentiable."""


def no_reduce(values: Tensor) -> Tensor:
    """Return the values unchanged: the `Reduce` function of a process that holds its whole pack, so that nothing is
    summed over processes.
    """
    return values


def segment_sum(values: Tensor, sample_index: Tensor, num_samples: int) -> Tensor:
    """Return the sum of the values [T, ...] of each sample: [B, ...] in float64. Padding tokens are left out."""
    need_whole("num_samples", num_samples, 0, "give the number of samples")
    values = checks.wide("values", values)
    sums = values.new_zeros((num_samples + 1, *values.shape[1:]))
    return sums.index_add(0, checks.index("sample_index", sample_index, num_samples + 1), values)[:num_samples]


def spread(values: Tensor, sample_index: Tensor) -> Tensor:
    """Give each token the value of its sample: [B] -> [T]. Padding tokens get 0."""
    need_tensor("values", values)
    return torch.cat([values, values.new_zeros(1)])[checks.index("sample_index", sample_index, len(values) + 1)]


def segment_mean(
    values: Tensor, mask: Tensor, sample_index: Tensor, num_samples: int, reduce: Reduce = no_reduce
) -> Tensor:
    """Return the mean of the values [T] that `mask` selects in each sample, [B] in float64.

    The mean is 0 for a sample in which `mask` selects no value.
    """
    values, mask = checks.wide("values", values), checks.mask("mask", mask)
    sums = torch.stack([torch.where(mask, values, 0.0), mask.double()], dim=1)
    totals, counts = reduce(segment_sum(sums, sample_index, num_samples)).unbind(1)
    return totals / counts.clamp(min=1.0)


def scan_back(values: Tensor, factors: Tensor, length: int | None = None) -> Tensor:
    """Solve `out[t] = values[t] + factors[t] * out[t + 1]` for `out` [T], with 0 after the end.

    `length` makes this faster if every `length` consecutive factors contain a 0, for example at sample ends.
    """
    out, factors = values.double(), factors.double()
    num_tokens = len(values)
    reach, limit = 1, num_tokens if length is None else min(length, num_tokens)
    while reach < limit:  # each pass combines two steps of the recurrence into one, so log2(limit) passes are enough
        behind = torch.nn.functional.pad(out[reach:], (0, reach))
        out = out + factors * behind
        factors = factors * torch.nn.functional.pad(factors[reach:], (0, reach))
        reach *= 2
    return out


def continues(sample_index: Tensor) -> Tensor:
    """Return bools [T] that say whether the next token belongs to the same sample.

    `sample_index` must be the whole pack in order, not the tokens of a context rank.
    """
    same = torch.zeros_like(sample_index, dtype=torch.bool)
    same[:-1] = sample_index[1:] == sample_index[:-1]
    return same
