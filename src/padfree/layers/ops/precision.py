"""The dtype that the operators compute in, and whether they use a Triton kernel."""

from __future__ import annotations

import torch
from torch import Tensor


def wide_type(tensor: Tensor) -> torch.dtype:
    """The dtype of the arithmetic; results are rounded to the dtype of the tensor."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def has_kernels(tensor: Tensor) -> bool:
    """Whether Triton kernels are used instead of plain torch."""
    return tensor.is_cuda and tensor.dtype != torch.float64
