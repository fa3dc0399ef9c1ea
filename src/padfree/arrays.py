"""Convert numbers from users to numpy arrays. Users may give lists, arrays, or tensors of any dtype on any device.

    [1, 0]   np.array([1, 0])   torch.tensor([1.0, 0.0], dtype=torch.bfloat16, device="cuda")

numpy has no bfloat16, and rejects tensors that are on a device or require gradients. The functions of this module
accept them. Nothing is rounded: if a function needs integers, other numbers raise `UserError`.

The module also has `concatenated_ranges`, for index arithmetic, and the random number generator `splitmix64`, for
shuffled orders and sampling keys.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from padfree.errors import UserError


def host_array(values: Any, name: str) -> NDArray[Any]:
    """Convert the values to a numpy array of the same dtype, or of dtype float32 if they are bfloat16.

    `name` identifies the values in error messages.
    """
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        values = values.float() if str(values.dtype) == "torch.bfloat16" else values
    try:
        return np.asarray(values)
    except (TypeError, ValueError):
        raise UserError(
            name, f"is a {type(values).__name__} that numpy cannot convert", "give a flat list of numbers"
        ) from None


def number_array(values: Any, name: str) -> NDArray[Any]:
    """Convert the values to an array of bools, integers or floats. `name` identifies the values in error messages."""
    array = host_array(values, name)
    if array.size and array.dtype.kind not in "biuf":
        raise UserError(name, f"got a {array.dtype} array of shape {array.shape}", "give real numbers")
    return array


def integer_array(values: Any, name: str) -> NDArray[np.int64]:
    """Convert the values to a flat array of integers. An empty list is accepted, whatever dtype numpy gives it."""
    array = host_array(values, name)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise UserError(name, f"got a {array.dtype} array of shape {array.shape}", "give a flat list of integers")
    return array.astype(np.int64, copy=False)


def concatenated_ranges(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Concatenate ranges of integers: starts [2, 0] and lengths [3, 2] give 2, 3, 4 and 0, 1, so [2, 3, 4, 0, 1]."""
    return np.repeat(starts - (np.cumsum(lengths) - lengths), lengths) + np.arange(int(lengths.sum()))


def need_whole(name: str, value: Any, least: int, cure: str) -> None:
    """Raise `UserError` unless `value` is an integer of at least `least`. `cure` is the last part of the message: what
    to do.
    """
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise UserError(name, "", cure, value=value)


def need_number(name: str, value: Any, low: float, high: float, cure: str) -> None:
    """Raise `UserError` unless `value` is a number from `low` to `high`. NaN is refused, too.

    `cure` is the last part of the message: what to do.
    """
    is_number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    if not is_number or not low <= value <= high:
        raise UserError(name, "", cure, value=value)


def token_array(tokens: Any, name: str) -> NDArray[np.integer[Any]]:
    """Convert the token ids of the sample called `name` to an array [n] of integers."""
    array = host_array(tokens, f"tokens of {name}")
    if array.size == 0 and array.ndim == 1:
        return array if array.dtype.kind in "iu" else array.astype(np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise UserError(
            f"tokens of {name}",
            f"got a {array.dtype} array of shape {array.shape}",
            "give a flat list of integer token ids",
        )
    if array.dtype.kind == "i" and array.min() < 0:
        raise UserError(
            f"tokens of {name}", f"token id {array.min()} is negative", "give token ids of 0 or more, without padding"
        )
    # Convert uint64 to int64, because numpy promotes uint64 combined with int64 to float64.
    return array.astype(np.int64) if array.dtype == np.uint64 else array


def mask_array(mask: Any, length: int, name: str) -> NDArray[np.bool_]:
    """Convert a loss mask to an array of `length` bools. None means that all tokens are trained on."""
    if mask is None:
        return np.ones(length, dtype=np.bool_)
    array = number_array(mask, f"loss_mask of {name}")
    _check_length(array, length, "loss_mask", name)
    if array.dtype.kind != "b" and not np.isin(array, (0, 1)).all():
        raise UserError(
            f"loss_mask of {name}", "has values other than 0 and 1", "give 0 or 1, and use advantages to weight tokens"
        )
    return array.astype(np.bool_, copy=False)


def float_array(values: Any, length: int, field: str, name: str) -> NDArray[np.float32]:
    """Convert `values` to an array of one finite number per token of a sample.

    Messages call the values "`field` of `name`", for example "advantages of sample 3".
    """
    with np.errstate(over="ignore"):  # values that overflow float32 become inf, which raises an error below
        array = number_array(values, f"{field} of {name}").astype(np.float32, copy=False)
    _check_length(array, length, field, name)
    finite = np.isfinite(array)
    if not finite.all():
        where = int(np.argmin(finite))
        raise UserError(f"{field} of {name}", f"is {array[where]} at token {where}", "give finite numbers")
    return array


def single_number(value: Any, name: str) -> float:
    """Convert a number, or an array or tensor without dimensions, to a float."""
    array = number_array(value, name)
    if array.shape != ():
        raise UserError(name, "", "give one number", value=value)
    return float(array)


def _check_length(array: NDArray[Any], length: int, field: str, name: str) -> None:
    if array.shape != (length,):
        raise UserError(
            f"{field} of {name}",
            f"has shape {array.shape} for {length} tokens",
            "give one value per token, also for the tokens of the prompt",
        )


SPLITMIX64 = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
"""The constants of the random number generator splitmix64: its increment and its two multipliers."""


def splitmix64(states: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the outputs of the random number generator splitmix64 for these states.

    The generator is implemented here, so that an update of a library cannot change shuffled orders.
    """
    increment, first, second = (np.uint64(number) for number in SPLITMIX64)
    values = states + increment
    values = (values ^ (values >> np.uint64(30))) * first
    values = (values ^ (values >> np.uint64(27))) * second
    return values ^ (values >> np.uint64(31))
