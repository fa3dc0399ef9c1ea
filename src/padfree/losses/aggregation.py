"""Ways of averaging a loss. Each way gives every token a weight, and the loss is `(weights * losses).sum()`.

This example is the mean over the tokens of three samples:

    mask        1 1 1 0 | 0 1 1 | 0 0      1: the token is trained
    weights     ¼ ¼ 0 0 | ¼ ¼ 0 | 0 0

A token's weight is stored at the position before the token, which predicts it. So the first token of a sample has no
weight. Trained tokens with a weight are called *scored*.

`docs/concepts/losses.md` lists the weights of all modes.
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
    """Return the weights of the tokens of the global batch, one float32 array [n] per sample, for the function `pack`.

    `masks[i]` [n] says which tokens of sample i are trained. The mode 'group-mean' needs `groups`. Samples with the
    same entry in `units` count as one sample.
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
    """Return the weights [T] (float32) of the tokens of a packed batch, for code without `Sample` objects.

    `divisor` is the result of `weight_divisor`. `group_counts` [B], for 'group-mean', counts the scored tokens of each
    sample's group. `reduce` sums over the ranks that share the pack.
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
    """Return the number by which all token weights of the global batch are divided, such as the number of samples.

    `counts` [B] is the number of scored tokens of each sample. Samples and groups without scored tokens are not
    counted.
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
