"""The float8 dtype of matmuls, and the sizes that they accept."""

from __future__ import annotations

from typing import Any

import torch

DTYPE = torch.float8_e4m3fn

MULTIPLE = 16
"""The multiple that `torch._scaled_mm` requires of the dimension it sums over, and of the last one of its result."""


def rounded_up(count: Any) -> Any:
    """The next multiple of `MULTIPLE`."""
    return (count + MULTIPLE - 1) // MULTIPLE * MULTIPLE
