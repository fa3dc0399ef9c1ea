"""The dtype in which padfree's custom operators compute, and whether they use Triton kernels."""

from __future__ import annotations

import torch
from torch import Tensor


def wide_type(tensor: Tensor) -> torch.dtype:
    """Return the dtype in which operators compute with this tensor. Results are then rounded to the tensor's own
    dtype.
    """
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def has_kernels(tensor: Tensor) -> bool:
    """Return whether operators on this tensor use Triton kernels instead of plain torch."""
    return tensor.is_cuda and tensor.dtype != torch.float64
