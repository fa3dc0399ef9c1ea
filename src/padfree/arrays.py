"""What a user gives as numbers, as a numpy array: lists, arrays, and tensors of any type on any device.

    [1, 0]   np.array([1, 0])   torch.tensor([1.0, 0.0], dtype=torch.bfloat16, device="cuda")

numpy has no bfloat16 and refuses tensors on a device or with a gradient; here they are no special case. Nothing is
rounded to an integer: where whole numbers are needed, others are refused.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def host_array(values: Any, name: str) -> NDArray[Any]:
    """The values as an array of the type they have; `name` is what an error calls them."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        values = values.float() if str(values.dtype) == "torch.bfloat16" else values
    try:
        return np.asarray(values)
    except (TypeError, ValueError):
        raise ValueError(f"{name}: a {type(values).__name__} that is no array of numbers; give a flat list") from None


def number_array(values: Any, name: str) -> NDArray[Any]:
    """The same, of bools, integers or floats."""
    array = host_array(values, name)
    if array.size and array.dtype.kind not in "biuf":
        raise ValueError(f"{name}: {array.dtype} array of shape {array.shape}; give real numbers")
    return array


def integer_array(values: Any, name: str) -> NDArray[np.int64]:
    """A flat array of integers; no entries at all are no integers either."""
    array = host_array(values, name)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"{name}: {array.dtype} array of shape {array.shape}; give a flat list of integers")
    return array.astype(np.int64, copy=False)
