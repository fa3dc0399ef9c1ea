"""Ways of averaging a loss. Each way gives every token a weight, and the loss is `(weights * losses).sum()`.

A *scored* token is a trained token that is not the first token of its sample. The weight of a scored token is stored at
the position before the token, where the token is predicted. This example takes the mean over the tokens of three
samples with 4 scored tokens in total:

    mask        1 1 1 0 | 0 1 1 | 0 0      1: the token is trained
    weights     ¼ ¼ 0 0 | ¼ ¼ 0 | 0 0

A scored token of sample i in group g has this weight:

    token-mean            1 / N            every token counts the same
    sample-mean           1 / (B nᵢ)       mean over samples of each sample's mean
    sum-of-sample-mean    1 / nᵢ           sum over samples of each sample's mean
    sample-sum            1 / B            mean over samples of each sample's sum
    constant              1 / c            Dr. GRPO: for example c = longest response × number of samples
    group-mean            1 / (G n_g)      mean over groups of each group's token mean

Here nᵢ is the number of scored tokens of sample i, n_g that of group g, and N that of the batch. B and G are the
numbers of samples and groups with scored tokens. All counts are over the global batch, so the loss is the same however
the batch is split into packs.

With the argument `units`, several samples, such as the turns of a conversation, count as one sample in these formulas.

A sample without scored tokens has weight 0 and is not counted. To divide by a number that includes such samples, use
`constant`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Hashable, Sequence
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from padfree.arrays import host_array, integer_array, need_number, need_whole
from padfree.batch import IGNORE, at_predictions
from padfree.choices import WeightMode
from padfree.errors import UserError
from padfree.losses import checks
from padfree.losses.segment_sums import Reduce, no_reduce, segment_sum, spread

SMALLEST = sys.float_info.min
WEIGHT_MODES: tuple[WeightMode, ...] = get_args(WeightMode)


def token_weights(
    mode: WeightMode,
    masks: Sequence[NDArray[np.bool_]],
    *,
    groups: Sequence[Hashable] | None = None,
    constant: float | None = None,
    units: Sequence[Hashable | None] | None = None,
) -> list[NDArray[np.float32]]:
    """Return the weights of all tokens of the global batch: one float32 array [n] per sample of n tokens.

    Pass the result to `pack(samples, weights=...)`. `masks[i]` [n] says which tokens of sample i are trained. `groups`
    are needed for the mode `group-mean`, and `constant` is the divisor of the mode `constant`. Samples with the same
    entry in `units` count as one sample.
    """
    scored, lengths = _scored(masks)
    scales = _sample_weights(mode, _counts(scored, lengths), groups, constant, units)
    flat = np.repeat(scales.astype(np.float32), lengths) * scored
    ends = np.cumsum(lengths)
    return [flat[end - length : end] for length, end in zip(lengths, ends, strict=True)]


def batch_weights(
    mode: WeightMode,
    labels: Tensor,
    sample_index: Tensor,
    num_samples: int,
    *,
    divisor: float | Tensor,
    group_counts: Tensor | None = None,
    reduce: Reduce = no_reduce,
) -> Tensor:
    """Return the weights [T] (float32) of the tokens of a packed batch, on the device of the batch.

    This function is for code that has no `Sample` objects. `divisor` is the result of `weight_divisor` for the global
    batch. The mode 'group-mean' needs `group_counts` [B], the number of scored tokens in each sample's group. `reduce`
    sums over the ranks that hold parts of the same pack.
    """
    _check_mode(mode)
    need_whole("num_samples", num_samples, 0, "give the number of samples")
    if not isinstance(divisor, Tensor):
        need_number("divisor", divisor, SMALLEST, math.inf, "give a positive number, such as weight_divisor(...)")
    scored = checks.index("labels", labels) != IGNORE
    if mode == "group-mean":
        if group_counts is None:
            raise UserError(
                "group_counts",
                "is missing, but the mode 'group-mean' needs it",
                "give the number of scored tokens of each sample's group",
            )
        sizes = checks.wide("group_counts", group_counts)
    elif mode in ("sample-mean", "sum-of-sample-mean"):
        sizes = reduce(segment_sum(scored, sample_index, num_samples))
    else:
        sizes = torch.ones(num_samples, dtype=torch.float64, device=labels.device)
    scales = 1.0 / (sizes.clamp(min=1.0) * divisor)
    return torch.where(scored, spread(scales, sample_index), 0.0).float()


def weight_divisor(
    mode: WeightMode,
    counts: NDArray[np.integer[Any]],
    *,
    groups: Sequence[Hashable] | None = None,
    constant: float | None = None,
) -> float:
    """Return the number by which all token weights of the global batch are divided.

    The divisor of each mode (samples and groups without scored tokens are not counted):

        token-mean               the number of scored tokens
        sample-mean, sample-sum  the number of samples
        group-mean               the number of groups
        sum-of-sample-mean       1
        constant                 `constant`

    `counts` [B] is the number of scored tokens of each sample. A divisor that is a count is at least 1.
    """
    _check_mode(mode)
    counts = _checked_counts(counts)
    if mode == "constant":
        need_number("constant", constant, SMALLEST, sys.float_info.max, "give a positive number to divide by")
        assert constant is not None
        return float(constant)
    if constant is not None:
        raise UserError(
            "constant",
            f"{constant} has no effect in the mode {mode!r}",
            "leave it out, or use the mode 'constant'",
        )
    if mode == "sum-of-sample-mean":
        return 1.0
    if mode == "token-mean":
        return max(float(counts.sum()), 1.0)
    if mode == "group-mean":
        group = _group_index(groups, len(counts))
        return max(float(len(np.unique(group[counts > 0]))), 1.0)
    return max(float(np.count_nonzero(counts)), 1.0)


def scored_counts(masks: Sequence[NDArray[np.bool_]]) -> NDArray[np.int64]:
    """Return the number of scored tokens of each sample, [B]. The first token of a sample is not scored."""
    return _counts(*_scored(masks))


def group_token_counts(counts: NDArray[np.integer[Any]], groups: Sequence[Hashable]) -> NDArray[np.int64]:
    """Return, for each sample, the number of scored tokens in its whole group, [B].

    `counts` [B] has the number of scored tokens of each sample.
    """
    counts = _checked_counts(counts)
    group = _group_index(groups, len(counts))
    return np.bincount(group, weights=counts).astype(np.int64)[group]


def _scored(masks: Sequence[NDArray[np.bool_]]) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Return bools for the positions of all samples, concatenated, and the lengths [B] of the samples.

    A bool says whether the position predicts a trained token.
    """
    lengths = np.fromiter((len(mask) for mask in masks), dtype=np.int64, count=len(masks))
    flat = np.concatenate([np.empty(0, np.bool_), *(_checked_mask(mask, index) for index, mask in enumerate(masks))])
    return at_predictions(flat, np.concatenate([[0], np.cumsum(lengths)])), lengths


def _checked_mask(mask: ArrayLike, index: int) -> NDArray[np.bool_]:
    array = host_array(mask, "masks")
    if array.ndim != 1 or not (array.dtype.kind == "b" or np.isin(array, (0, 1)).all()):
        raise UserError(
            "masks",
            f"got a {array.dtype} array of shape {array.shape} at index {index}",
            "give one bool (or 0 and 1) per token",
        )
    return array.astype(np.bool_, copy=False)


def _checked_counts(counts: ArrayLike) -> NDArray[np.int64]:
    array = integer_array(counts, "counts")
    if array.min(initial=0) < 0:
        raise UserError("counts", f"{array.min()} is negative", "give integers of 0 or more")
    return array


def _counts(scored: NDArray[np.bool_], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the sum of the bools `scored` over each sample, [B]."""
    before: NDArray[np.int64] = np.zeros(len(scored) + 1, dtype=np.int64)
    np.cumsum(scored, out=before[1:])
    ends = np.cumsum(lengths)
    counts: NDArray[np.int64] = before[ends] - before[ends - lengths]
    return counts


def _sample_weights(
    mode: WeightMode,
    counts: NDArray[np.int64],
    groups: Sequence[Hashable] | None,
    constant: float | None,
    units: Sequence[Hashable | None] | None,
) -> NDArray[np.float64]:
    """Return the weight of the scored tokens of each sample, [B]. All scored tokens of a sample have the same
    weight.
    """
    if units is not None and mode != "group-mean":
        unit = _unit_index(units, len(counts))
        totals = np.bincount(unit, weights=counts, minlength=len(np.unique(unit))).astype(np.int64)
        return _sample_weights(mode, totals, None, constant, None)[unit]
    divisor = weight_divisor(mode, counts, groups=groups, constant=constant)
    sizes = np.ones(len(counts))
    if mode in ("sample-mean", "sum-of-sample-mean"):
        sizes = np.maximum(counts, 1)
    elif mode == "group-mean":
        assert groups is not None
        sizes = np.maximum(group_token_counts(counts, groups), 1)
    return np.asarray(1.0 / (sizes * divisor))


def _group_index(groups: Sequence[Hashable] | None, num_samples: int) -> NDArray[np.int64]:
    """Number the groups in order of appearance, and return the number of each sample's group, [B]."""
    if groups is None or len(groups) != num_samples:
        given = "is None" if groups is None else f"has {len(groups)} entries"
        raise UserError(
            "groups", f"{given} for {num_samples} samples", "give the group of each sample, for the mode 'group-mean'"
        )
    numbers: dict[Hashable, int] = {}
    for index, group in enumerate(groups):
        if group is None:
            raise UserError(
                "groups", f"is None at index {index}", "give the group of each sample, for the mode 'group-mean'"
            )
        numbers.setdefault(group, len(numbers))
    return np.fromiter((numbers[group] for group in groups), dtype=np.int64, count=num_samples)


def _unit_index(units: Sequence[Hashable | None], num_samples: int) -> NDArray[np.int64]:
    """Number the units in order of appearance, and return the number of each sample's unit, [B].

    A unit is several samples that count as one, such as the turns of a conversation.
    """
    if len(units) != num_samples:
        raise UserError(
            "units",
            f"has {len(units)} entries for {num_samples} samples",
            "give one entry per sample: the same name for samples that count as one, or None",
        )
    numbers: dict[Hashable, int] = {}
    keys = [("alone", index) if unit is None else ("unit", unit) for index, unit in enumerate(units)]
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int64)


def _check_mode(mode: str) -> None:
    if mode not in WEIGHT_MODES:
        raise UserError("weights", f"unknown mode {mode!r}", f"use one of {', '.join(WEIGHT_MODES)}")
