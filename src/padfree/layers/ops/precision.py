"""Which type the operators compute in, and whether a Triton kernel does it."""

from __future__ import annotations

import torch
from torch import Tensor


def wide_type(tensor: Tensor) -> torch.dtype:
    """The type that arithmetic is done in; results are rounded to the tensor's own."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def has_kernels(tensor: Tensor) -> bool:
    """Whether Triton kernels compute it, or plain torch."""
    return tensor.is_cuda and tensor.dtype != torch.float64
