"""Gather each element of a tensor several times (forward), and sum the gradients of its copies (backward).

    take    [n, ...] -> [m, ...]    a b c            ->  a a c b a        (index 0 0 2 1 0)
    sum     [m, ...] -> [n, ...]    p q r s t        ->  p+q+t  s  r      in float32, in the order of the copies

In this example, a b c are the elements, and p q r s t are the gradients of the five copies. padfree copies elements if
samples of a pack share prefixes. The pack is then a prefix tree: the keys of a shared prefix are copied for every node
(range of tokens) that continues the prefix, and a hidden state is copied for every sample in which it predicts a token.
Each sum has a fixed order, so that the result is deterministic. The sum of an element without copies is 0.
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
    """The `Copies` object, on `device`, that describes a gather of m copies from `count` elements.

    Copy j is taken from element `index[j]`; the shape of `index` is [m].
    """
    return copies_to_device(device, index, *group_copies(index, count))


def group_copies(index: NDArray[np.int64], count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Group m copies by the element that they were taken from: copy j was taken from element `index[j]`.

    `count` is the number of elements. Returns two arrays. The first [m] holds the indices of the copies, grouped by
    element. The second [count + 1] holds the start of each element's group in the first array.
    """
    offsets = np.zeros(count + 1, dtype=np.int64)
    np.cumsum(np.bincount(index, minlength=count), out=offsets[1:])
    return np.argsort(index, kind="stable"), offsets


def copies_to_device(
    device: torch.device, index: NDArray[np.int64], copy_index: NDArray[np.int64], offsets: NDArray[np.int64]
) -> Copies:
    """Copy the three arrays of a `Copies` object to the device, without synchronising with the device."""

    def moved(array: NDArray[np.int64]) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)

    return Copies(index=moved(index), copy_index=moved(copy_index), offsets=moved(offsets))


def take_copies(tensor: Tensor, copies: Copies) -> Tensor:
    """Gather the copies of the elements of a tensor [n, ...]. Returns [m, ...]; differentiable."""
    taken: Tensor = _Take.apply(tensor, copies)  # type: ignore[no-untyped-call]
    return taken


def sum_copies(gradient: Tensor, index: Tensor, copy_index: Tensor, offsets: Tensor) -> Tensor:
    """Sum the gradients of the copies of each element: [m, ...] -> [n, ...], in the dtype of `gradient`.

    `index`, `copy_index` and `offsets` are the arrays of `Copies`. The sums are computed in float32, or in float64 if
    `gradient` is float64.
    """
    count = len(offsets) - 1
    if gradient.is_cuda and gradient.dtype != torch.float64 and has_module("triton"):
        from padfree.attention.triton_copies import sum_rows

        return sum_rows(gradient, copy_index, offsets)
    return sum_copies_reference(gradient, index, count)


def sum_copies_reference(gradient: Tensor, index: Tensor, count: int) -> Tensor:
    """The same result as `sum_copies`, in plain PyTorch on any device. `count` is the number of elements."""
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
