"""The float8 dtype of matmuls, and the sizes that they accept."""

from __future__ import annotations

from typing import Any

import torch

DTYPE = torch.float8_e4m3fn

MULTIPLE = 16
"""`torch._scaled_mm` sums over a dimension that must be a multiple of this number, like its result's last dimension."""


def rounded_up(count: Any) -> Any:
    """The next multiple of `MULTIPLE`."""
    return (count + MULTIPLE - 1) // MULTIPLE * MULTIPLE
