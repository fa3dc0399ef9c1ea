"""The float8 dtype that matmuls use, and the matrix sizes that float8 matmuls accept."""

from __future__ import annotations

from typing import Any

import torch

DTYPE = torch.float8_e4m3fn

MULTIPLE = 16
"""Two dimensions of a `torch._scaled_mm` must be multiples of this number: the one that it sums over, and the last one
of its result.
"""


def rounded_up(count: Any) -> Any:
    """Return `count` rounded up to a multiple of `MULTIPLE`."""
    return (count + MULTIPLE - 1) // MULTIPLE * MULTIPLE
