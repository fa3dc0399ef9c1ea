"""The reference implementation of AdamW with moments in bfloat16 or int8, in plain PyTorch.

In step t, with m and v read from the state and converted to float32:

    rate       = lr / (1 - beta1^t)
    correction = 1 / sqrt(1 - beta2^t)
    m          = m + (1 - beta1) * (gradient - m)
    v          = beta2 * v + (1 - beta2) * gradient^2
    weight     = (1 - lr * weight_decay) * weight - rate * m / (sqrt(v) * correction + eps)
    state      = m and v, rounded stochastically

Skipped steps do not count in t. Only the device knows t, `rate` and `correction`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from padfree.optim.state_format import INT8, RowRange, decode_int8, encode_int8, random_bits, round_bfloat16

CHUNK = 1 << 20
"""The maximum number of elements of a parameter that are updated at a time, which limits the temporary memory."""


class Step(NamedTuple):
    """The values of an AdamW step that are the same for all parameters, such as the learning rate."""

    finite: Tensor  # bool, on the device
    scale: Tensor | None  # float32, on the device
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


class Moment(NamedTuple):
    """Some matrix rows [R, C] of one AdamW moment. In int8, the matrix rows come with their scales [R, blocks]."""

    values: Tensor
    scales: Tensor | None


class ParameterRows(NamedTuple):
    """Some matrix rows [R, C] of a parameter, with their gradient and optimizer state."""

    weight: Tensor  # float32
    gradient: Tensor
    exp_avg: Moment
    exp_avg_sq: Moment
    range: RowRange
    factors: Tensor  # [2] float32: rate and correction
    step: Tensor  # int64
    number: int  # of the parameter in its group


def update_reference(rows: ParameterRows, step: Step) -> None:
    """Make one AdamW step for some matrix rows of a parameter, in chunks that limit the temporary memory."""
    count, columns = rows.weight.shape
    most = max(1, CHUNK // columns)
    for begin in range(0, count, most):
        part = slice(begin, min(begin + most, count))
        _update_chunk(rows, step, part, random_bits(rows.step, rows.number, rows.range, part, columns))


def _update_chunk(rows: ParameterRows, step: Step, part: slice, bits: Tensor) -> None:
    finite, weight = step.finite, rows.weight[part]
    gradient = rows.gradient[part].float()
    if step.scale is not None:
        gradient = gradient * step.scale
    first = _read(rows.exp_avg, part, "exp_avg")
    second = _read(rows.exp_avg_sq, part, "exp_avg_sq")
    first = first + (1 - step.beta1) * (gradient - first)
    second = step.beta2 * second + (1 - step.beta2) * (gradient * gradient)
    rate, correction = rows.factors
    kept = 1 - step.lr * step.weight_decay
    updated = kept * weight - rate * first / (second.sqrt() * correction + step.eps)
    weight.copy_(torch.where(finite, updated, weight))
    _write(rows.exp_avg, part, "exp_avg", first, bits & 0xFFFF, finite)
    _write(rows.exp_avg_sq, part, "exp_avg_sq", second, bits >> 16, finite)


def _read(moment: Moment, part: slice, kind: str) -> Tensor:
    if moment.scales is None:
        return moment.values[part].float()
    return decode_int8(moment.values[part], moment.scales[part], INT8[kind])


def _write(moment: Moment, part: slice, kind: str, values: Tensor, bits: Tensor, finite: Tensor) -> None:
    stored = (round_bfloat16(values, bits),) if moment.scales is None else encode_int8(values, bits, INT8[kind])
    for own, new in zip(moment, stored, strict=False):
        assert own is not None
        own[part].copy_(torch.where(finite, new, own[part]))
