"""RMSNorm as operators that read hidden states once in forward and once in backward.

    rms_norm            y = weight · x · rstd, with rstd = (mean x² + eps)^-½
    add_rms_norm        the same for x = a + b; also returns x
    rms_norm_backward   the gradients of x and of the weight

rms_norm_backward adds up several gradients of y (`dys`), and adds another gradient of x (`residual`) to its result. So
no sum is written to memory separately.

The arithmetic is float32. On a GPU, Triton kernels are used, elsewhere plain torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from padfree.layers.ops.precision import has_kernels, wide_type

RMS_NORM = "padfree::rms_norm"
ADD_RMS_NORM = "padfree::add_rms_norm"
BACKWARD = "padfree::rms_norm_backward"

# x, a, b, y and residual are [.., D], weight is [D] and rstd is [..], where D is the hidden size.
torch.library.define(RMS_NORM, "(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)")
torch.library.define(ADD_RMS_NORM, "(Tensor a, Tensor b, Tensor weight, float eps) -> (Tensor, Tensor, Tensor)")
torch.library.define(
    BACKWARD,
    "(Tensor[] dys, Tensor x, Tensor weight, Tensor rstd, Tensor? residual, bool weight_gradient) -> (Tensor, Tensor)",
)


# The reference in plain torch


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide = x.to(wide_type(x))
    rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    normal = wide * rstd
    return (weight * normal).to(x.dtype).contiguous(), rstd[..., 0]


def rms_norm_backward(
    dys: list[Tensor], x: Tensor, weight: Tensor, rstd: Tensor, residual: Tensor | None
) -> tuple[Tensor, Tensor]:
    wide = wide_type(x)
    dy = dys[0].to(wide).view_as(x)
    for other in dys[1:]:
        dy = dy + other.view_as(x)
    scale = rstd[..., None]
    normal = x * scale
    pull = dy * weight
    dx = (pull - normal * (pull * normal).mean(-1, keepdim=True)) * scale
    if residual is not None:
        dx = dx + residual
    dweight = (dy * normal).flatten(0, -2).sum(0)
    return dx.to(x.dtype).contiguous(), dweight.to(weight.dtype)


# The operators


@torch.library.impl(RMS_NORM, ("cpu", "cuda"))
def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    if not has_kernels(x):
        return rms_norm(x, weight, eps)
    from padfree.layers.ops import triton_rms_norm as kernels

    y, _, rstd = kernels.forward(x, None, weight, eps)
    return y, rstd


@torch.library.impl(ADD_RMS_NORM, ("cpu", "cuda"))
def _add_rms_norm(a: Tensor, b: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    if not has_kernels(a):
        total = (a + b).contiguous()
        y, rstd = rms_norm(total, weight, eps)
        return y, total, rstd
    from padfree.layers.ops import triton_rms_norm as kernels

    return kernels.forward(a, b, weight, eps)


@torch.library.impl(BACKWARD, ("cpu", "cuda"))
def _rms_norm_backward(
    dys: list[Tensor], x: Tensor, weight: Tensor, rstd: Tensor, residual: Tensor | None, weight_gradient: bool
) -> tuple[Tensor, Tensor]:
    if not has_kernels(x):
        dx, dweight = rms_norm_backward(dys, x, weight, rstd, residual)
        return dx, dweight if weight_gradient else weight.new_empty(0)
    from padfree.layers.ops import triton_rms_norm as kernels

    return kernels.backward(dys, x, weight, rstd, residual, weight_gradient=weight_gradient)


@torch.library.register_fake(RMS_NORM)  # type: ignore[untyped-decorator]
def _rms_norm_shapes(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=wide_type(x))


@torch.library.register_fake(ADD_RMS_NORM)  # type: ignore[untyped-decorator]
def _add_rms_norm_shapes(a: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return a.new_empty(a.shape), a.new_empty(a.shape), a.new_empty(a.shape[:-1], dtype=wide_type(a))


@torch.library.register_fake(BACKWARD)  # type: ignore[untyped-decorator]
def _rms_norm_backward_shapes(
    dys: list[Tensor], x: Tensor, weight: Tensor, rstd: Tensor, residual: Tensor | None, weight_gradient: bool
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape if weight_gradient else 0)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, *_ = inputs
    ctx.save_for_backward(x, weight, output[1])


def _gradients(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    needs_weight = ctx.needs_input_grad[1]
    dx, dweight = torch.ops.padfree.rms_norm_backward([dy], *ctx.saved_tensors, None, needs_weight)
    return dx, dweight if needs_weight else None, None


def _save_sum(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, total, rstd = output
    ctx.save_for_backward(total, inputs[2], rstd)


def _gradients_of_sum(ctx: Any, dy: Tensor, dtotal: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    needs_weight = ctx.needs_input_grad[2]
    dx, dweight = torch.ops.padfree.rms_norm_backward([dy], *ctx.saved_tensors, dtotal, needs_weight)
    return dx, dx, dweight if needs_weight else None, None


torch.library.register_autograd(RMS_NORM, _gradients, setup_context=_save)
torch.library.register_autograd(ADD_RMS_NORM, _gradients_of_sum, setup_context=_save_sum)
