"""What the functions of this folder take: a torch tensor of the right kind, or one line that says what to give.

    quantity    rewards, log-probabilities, values    any real type; integers and bools are computed as float32
    index       groups, sample_index, pairs           any integer type
    mask        which positions are actions           bool only: what would an integer 2 mean?

Only the type is looked at, so that nothing waits for the device. Whether an index is in range is looked at on the CPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from padfree.batch import need_tensor
from padfree.errors import UserError


def quantity(name: str, values: Tensor) -> Tensor:
    """The values as floats: float32 for integers and bools, whose own type would cut off every result."""
    need_tensor(name, values)
    return values if values.is_floating_point() else values.float()


def wide(name: str, values: Tensor) -> Tensor:
    """The values in float64."""
    need_tensor(name, values)
    return values.double()


def loss_input(name: str, values: Tensor) -> Tensor:
    """The values in the type a loss is computed in: float64 where they are, else float32."""
    values = quantity(name, values)
    return values if values.dtype == torch.float64 else values.float()


def result_type(*values: Tensor) -> torch.dtype:
    """The type of a result made from these: theirs, joined; float32 where none is a float."""
    joined = values[0].dtype
    for other in values[1:]:
        joined = torch.promote_types(joined, other.dtype)
    return joined if joined.is_floating_point else torch.float32


def index(name: str, values: Tensor, size: int | None = None) -> Tensor:
    """An index that torch takes for one: int32 or int64. `size`: the entries are 0 to size - 1."""
    need_tensor(name, values)
    if values.is_floating_point() or values.dtype == torch.bool:
        raise UserError(name, "", f"give integers, such as {name}.long()", value=values.dtype)
    if values.dtype not in (torch.int32, torch.int64):
        values = values.long()  # torch reads uint8 as a mask
    if size is not None and values.device.type == "cpu" and values.numel():
        low, high = int(values.min()), int(values.max())
        if low < 0 or high >= size:
            raise UserError(name, f"{low if low < 0 else high} with {size} in all", f"give 0 up to {max(size - 1, 0)}")
    return values


def mask(name: str, values: Tensor) -> Tensor:
    """A bool tensor."""
    need_tensor(name, values)
    if values.dtype != torch.bool:
        raise UserError(name, "", f"give bools, such as {name}.bool()", value=values.dtype)
    return values


def same_length(reference: str, length: int, **tensors: Tensor | None) -> None:
    """Every tensor has one entry for each of `length` things."""
    for name, values in tensors.items():
        if values is not None and tuple(values.shape) != (length,):
            raise UserError(name, f"shape {tuple(values.shape)} for {length} {reference}", "give one entry each")
