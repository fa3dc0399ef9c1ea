"""Check the tensor arguments of the losses. Each argument has one of these kinds:

    quantity    rewards, log-probabilities, values    any real dtype; integers and bools are computed as float32
    index       groups, sample_index, pairs           any integer dtype
    mask        which positions are actions           bool only, because an integer 2 would be ambiguous

On a GPU, only dtypes and shapes are checked, so that nothing synchronises. On the CPU, indices are also checked for
their range.
"""

from __future__ import annotations

import torch
from torch import Tensor

from padfree.batch import need_tensor
from padfree.errors import UserError


def quantity(name: str, values: Tensor) -> Tensor:
    """Return the values as floats. Integers and bools become float32, so that results are not truncated."""
    need_tensor(name, values)
    return values if values.is_floating_point() else values.float()


def wide(name: str, values: Tensor) -> Tensor:
    """Return the values in float64."""
    need_tensor(name, values)
    return values.double()


def loss_input(name: str, values: Tensor) -> Tensor:
    """Return the values in the dtype of a loss: float64 if they are float64, else float32."""
    values = quantity(name, values)
    return values if values.dtype == torch.float64 else values.float()


def result_type(*values: Tensor) -> torch.dtype:
    """Return the dtype of a result that is computed from these tensors: their promoted dtype, or float32 if that is
    an integer or bool dtype.
    """
    joined = values[0].dtype
    for other in values[1:]:
        joined = torch.promote_types(joined, other.dtype)
    return joined if joined.is_floating_point else torch.float32


def index(name: str, values: Tensor, size: int | None = None) -> Tensor:
    """Check that the values are integers. Return them as they are if they are int32, and otherwise as int64.

    If `size` is given, all values must be from 0 to size - 1. `name` names the values in errors.
    """
    need_tensor(name, values)
    if values.is_floating_point() or values.dtype == torch.bool:
        raise UserError(name, "is not an integer dtype", f"give integers, such as {name}.long()", value=values.dtype)
    if values.dtype not in (torch.int32, torch.int64):
        values = values.long()  # torch reads uint8 as a mask
    if size is not None and values.device.type == "cpu" and values.numel():
        low, high = int(values.min()), int(values.max())
        if low < 0 or high >= size:
            raise UserError(
                name, f"{low if low < 0 else high} is out of range", f"give values from 0 to {max(size - 1, 0)}"
            )
    return values


def mask(name: str, values: Tensor) -> Tensor:
    """Return the values, after checking that they are a bool tensor."""
    need_tensor(name, values)
    if values.dtype != torch.bool:
        raise UserError(name, "is not bool", f"give bools, such as {name}.bool()", value=values.dtype)
    return values


def same_length(reference: str, length: int, **tensors: Tensor | None) -> None:
    """Raise `UserError` unless every tensor has shape [length].

    `reference` says what `length` counts. For example, "tokens in mask" gives "but there are 5 tokens in mask".
    """
    for name, values in tensors.items():
        if values is not None and tuple(values.shape) != (length,):
            raise UserError(
                name, f"has shape {tuple(values.shape)}, but there are {length} {reference}", "give one value for each"
            )
