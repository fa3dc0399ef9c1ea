"""What a user gives as numbers, as a numpy array: lists, arrays, and tensors of any type on any device.

    [1, 0]   np.array([1, 0])   torch.tensor([1.0, 0.0], dtype=torch.bfloat16, device="cuda")

numpy has no bfloat16 and refuses tensors on a device or with a gradient; here they are no special case. Nothing is
rounded to an integer: where whole numbers are needed, others are refused. And arithmetic on ranges of such numbers.

`splitmix64` is the one source of shuffled orders and sampling keys.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from padfree.errors import UserError


def host_array(values: Any, name: str) -> NDArray[Any]:
    """The values as an array of the type they have; `name` is what an error calls them."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        values = values.float() if str(values.dtype) == "torch.bfloat16" else values
    try:
        return np.asarray(values)
    except (TypeError, ValueError):
        raise UserError(name, f"a {type(values).__name__} that is no array of numbers", "give a flat list") from None


def number_array(values: Any, name: str) -> NDArray[Any]:
    """The same, of bools, integers or floats."""
    array = host_array(values, name)
    if array.size and array.dtype.kind not in "biuf":
        raise UserError(name, f"{array.dtype} array of shape {array.shape}", "give real numbers")
    return array


def integer_array(values: Any, name: str) -> NDArray[np.int64]:
    """A flat array of integers. An empty list is one, whatever type numpy gives it."""
    array = host_array(values, name)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise UserError(name, f"{array.dtype} array of shape {array.shape}", "give a flat list of integers")
    return array.astype(np.int64, copy=False)


def concatenated_ranges(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """The numbers of some ranges, one range after the other: 2 and 0, 3 and 2 long -> 2 3 4 0 1."""
    return np.repeat(starts - (np.cumsum(lengths) - lengths), lengths) + np.arange(int(lengths.sum()))


def need_whole(name: str, value: Any, least: int, cure: str) -> None:
    """Refuse what is no whole number of `least` or more."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise UserError(name, "", cure, value=value)


def need_number(name: str, value: Any, low: float, high: float, cure: str) -> None:
    """Refuse what is no number from `low` to `high`, NaN among it."""
    is_number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    if not is_number or not low <= value <= high:
        raise UserError(name, "", cure, value=value)


def token_array(tokens: Any, name: str) -> NDArray[np.integer[Any]]:
    """[n] token ids of a sample, which `name` names."""
    array = host_array(tokens, f"tokens of {name}")
    if array.size == 0 and array.ndim == 1:
        return array if array.dtype.kind in "iu" else array.astype(np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise UserError(
            f"tokens of {name}", f"{array.dtype} array of shape {array.shape}", "give a flat list of integer token ids"
        )
    if array.dtype.kind == "i" and array.min() < 0:
        raise UserError(
            f"tokens of {name}", f"negative id {array.min()}", "give token ids of 0 or more, without padding"
        )
    # numpy joins unsigned and signed 64 bits to floats
    return array.astype(np.int64) if array.dtype == np.uint64 else array


def mask_array(mask: Any, length: int, name: str) -> NDArray[np.bool_]:
    """[n] which tokens of a sample are trained on; all where nobody says."""
    if mask is None:
        return np.ones(length, dtype=np.bool_)
    array = number_array(mask, f"loss_mask of {name}")
    _check_length(array, length, "loss_mask", name)
    if array.dtype.kind != "b" and not np.isin(array, (0, 1)).all():
        raise UserError(
            f"loss_mask of {name}", "values other than 0 and 1", "use advantages or weights to scale a token"
        )
    return array.astype(np.bool_, copy=False)


def float_array(values: Any, length: int, field: str, name: str) -> NDArray[np.float32]:
    """[n] one finite number per token of a sample."""
    with np.errstate(over="ignore"):  # what float32 cannot hold is inf, and refused below
        array = number_array(values, f"{field} of {name}").astype(np.float32, copy=False)
    _check_length(array, length, field, name)
    finite = np.isfinite(array)
    if not finite.all():
        where = int(np.argmin(finite))
        raise UserError(f"{field} of {name}", f"{array[where]} at token {where}", "every entry must be finite")
    return array


def single_number(value: Any, name: str) -> float:
    """One number, also in an array or tensor without dimensions."""
    array = number_array(value, name)
    if array.shape != ():
        raise UserError(name, "", "give one number", value=value)
    return float(array)


def _check_length(array: NDArray[Any], length: int, field: str, name: str) -> None:
    if array.shape != (length,):
        raise UserError(
            f"{field} of {name}",
            f"shape {array.shape} for {length} tokens",
            "give one entry per token (prompt included)",
        )


SPLITMIX64 = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
"""The increment of splitmix64 and its two multipliers."""


def splitmix64(states: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """What splitmix64 gives from each of these states.

    It is written out instead of taken from a library's generator, so that no version of a library can change it.
    """
    increment, first, second = (np.uint64(number) for number in SPLITMIX64)
    values = states + increment
    values = (values ^ (values >> np.uint64(30))) * first
    values = (values ^ (values >> np.uint64(27))) * second
    return values ^ (values >> np.uint64(31))
