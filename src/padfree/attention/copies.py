"""Copy elements of a tensor, some of them several times. The backward pass sums the gradients of the copies of each
element.

For example, the index 0 0 2 1 0 copies the elements a b c to a a c b a. If p q r s t are the gradients of the five
copies, the gradients of a, b and c are p+q+t, s and r.

The order of the sums is fixed in the Triton kernel and on the CPU. padfree copies the keys of shared prefixes and the
features of repeated images in this way.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from padfree.attention.backend import has_module
from padfree.batch import Copies


def copies_of(index: NDArray[np.int64], count: int, device: torch.device) -> Copies:
    """Return the index arrays for the gather `tensor[index]` and its backward pass, on the device.

    `count` is the number of elements of `tensor` along its first axis.
    """
    return copies_to_device(device, index, *group_copies(index, count))


def group_copies(index: NDArray[np.int64], count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Group m copies by the element that they were taken from: copy j was taken from element `index[j]`.

    Returns two arrays: the indices [m] of the copies, grouped by element, and the start [count + 1] of each group.
    `count` is the number of elements.
    """
    offsets = np.zeros(count + 1, dtype=np.int64)
    np.cumsum(np.bincount(index, minlength=count), out=offsets[1:])
    return np.argsort(index, kind="stable"), offsets


def copies_to_device(
    device: torch.device, index: NDArray[np.int64], copy_index: NDArray[np.int64], offsets: NDArray[np.int64]
) -> Copies:
    """Move three index arrays to the device as `Copies`, without synchronising with the device."""

    def moved(array: NDArray[np.int64]) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)

    return Copies(index=moved(index), copy_index=moved(copy_index), offsets=moved(offsets))


def take_copies(tensor: Tensor, copies: Copies) -> Tensor:
    """Copy elements of a tensor [n, ...] into a new tensor [m, ...]. `copies` lists the index of each copied element.

    Gradients flow back to the tensor.
    """
    taken: Tensor = _Take.apply(tensor, copies)  # type: ignore[no-untyped-call]
    return taken


def sum_copies(gradient: Tensor, index: Tensor, copy_index: Tensor, offsets: Tensor) -> Tensor:
    """Sum the gradients of the copies of each element: gradient [m, ...] of the m copies -> [n, ...] of the n elements.

    `index`, `copy_index` and `offsets` are the arrays of `Copies`. The sum is computed in float32, or in float64 for a
    float64 gradient.
    """
    count = len(offsets) - 1
    if gradient.is_cuda and gradient.dtype != torch.float64 and has_module("triton"):
        from padfree.attention.triton_copies import sum_rows

        return sum_rows(gradient, copy_index, offsets)
    return sum_copies_reference(gradient, index, count)


def sum_copies_reference(gradient: Tensor, index: Tensor, count: int) -> Tensor:
    """Return the sums [count, ...] of `sum_copies`, computed in plain PyTorch on any device.

    Copy j is a copy of element `index[j]` and has the gradient `gradient[j]`. `count` is the number of elements.
    """
    total = gradient.new_zeros(count, *gradient.shape[1:], dtype=torch.promote_types(gradient.dtype, torch.float32))
    return total.index_add_(0, index, gradient.to(total.dtype)).to(gradient.dtype)


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, copies: Copies) -> Tensor:
        ctx.copies = copies
        return tensor.index_select(0, copies.index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        copies: Copies = ctx.copies
        return sum_copies(gradient.contiguous(), copies.index, copies.copy_index, copies.offsets), None
