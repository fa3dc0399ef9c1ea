"""Sums over dimensions of a tensor, computed by PyTorch's own kernel also in compiled layers.

The compiler chooses the order of a sum when it compiles a graph, and may choose another order in another graph. With
`rollout.exact`, sampler and trainer have different graphs of the same layer, and must add in the same order.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("padfree::row_sum", mutates_args=())
def row_sum(x: Tensor, dims: list[int], keepdim: bool, dtype: torch.dtype | None) -> Tensor:
    return x.contiguous().sum(dims, keepdim=keepdim, dtype=dtype)


@row_sum.register_fake
def _shape(x: Tensor, dims: list[int], keepdim: bool, dtype: torch.dtype | None) -> Tensor:
    return x.new_empty(x.shape).sum(dims, keepdim=keepdim, dtype=dtype)


@torch.library.custom_op("padfree::row_mean", mutates_args=())
def row_mean(x: Tensor, dims: list[int], keepdim: bool, dtype: torch.dtype | None) -> Tensor:
    return x.contiguous().mean(dims, keepdim=keepdim, dtype=dtype)


@row_mean.register_fake
def _shape_of_mean(x: Tensor, dims: list[int], keepdim: bool, dtype: torch.dtype | None) -> Tensor:
    return x.new_empty(x.shape).mean(dims, keepdim=keepdim, dtype=dtype)
