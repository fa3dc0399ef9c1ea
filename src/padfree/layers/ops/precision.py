"""The dtype in which the operators compute, and whether they use Triton."""

from __future__ import annotations

import torch
from torch import Tensor


def wide_type(tensor: Tensor) -> torch.dtype:
    """Return the dtype in which operators compute with this tensor. They round their results to the tensor's
    own dtype.
    """
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def has_kernels(tensor: Tensor) -> bool:
    """Return whether operators on this tensor use Triton kernels instead of plain torch."""
    return tensor.is_cuda and tensor.dtype != torch.float64
