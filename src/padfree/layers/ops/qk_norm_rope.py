"""QK-norm and RoPE of one projection (queries or keys) as one operator.

    n = weight · x · rstd                 RMSNorm of each head
    y = n · cos + (-n₂, n₁) · sin         RoPE; n₁ and n₂ are the halves of n

x and y are [.., T, H, d], for T tokens with H heads of size d. The arithmetic is float32. cos and sin get no gradient.

On a GPU, Triton kernels are used, elsewhere plain torch. `passes.qk_norm_rope` inserts the operator into compiled
layers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from padfree.layers.ops.precision import has_kernels, wide_type
from padfree.layers.ops.rms_norm import rms_norm_backward

QK_NORM_ROPE = "padfree::qk_norm_rope"
BACKWARD = "padfree::qk_norm_rope_backward"

torch.library.define(QK_NORM_ROPE, "(Tensor x, Tensor weight, Tensor cos, Tensor sin, float eps) -> (Tensor, Tensor)")
torch.library.define(
    BACKWARD,
    "(Tensor dy, Tensor x, Tensor weight, Tensor rstd, Tensor cos, Tensor sin, bool weight_gradient) "
    "-> (Tensor, Tensor)",
)


def qk_norm_rope(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Compute QK-norm and RoPE in plain torch. Returns y [.., T, H, d] and 1 / rms [.., T, H] of each head vector.

    x is [.., T, H, d], weight [d], and cos and sin [.., T, d].
    """
    wide = x.to(wide_type(x))
    rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    normal = weight * (wide * rstd)
    low, high = normal.chunk(2, dim=-1)
    y = normal * cos[..., None, :] + torch.cat((-high, low), dim=-1) * sin[..., None, :]
    return y.to(x.dtype).contiguous(), rstd[..., 0]


def qk_norm_rope_backward(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of `qk_norm_rope` in plain torch. Returns dx [.., T, H, d] and dweight [d]."""
    dy = dy.to(wide_type(x))
    low, high = (dy * sin[..., None, :]).chunk(2, dim=-1)
    dnormal = dy * cos[..., None, :] + torch.cat((high, -low), dim=-1)
    return rms_norm_backward([dnormal], x, weight, rstd, None)


@torch.library.impl(QK_NORM_ROPE, ("cpu", "cuda"))
def _qk_norm_rope(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    if not has_kernels(x):
        return qk_norm_rope(x, weight, cos, sin, eps)
    from padfree.layers.ops import triton_qk_norm_rope

    return triton_qk_norm_rope.forward(x, weight, cos, sin, eps)


@torch.library.impl(BACKWARD, ("cpu", "cuda"))
def _qk_norm_rope_backward(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, cos: Tensor, sin: Tensor, weight_gradient: bool
) -> tuple[Tensor, Tensor]:
    if not has_kernels(x):
        dx, dweight = qk_norm_rope_backward(dy, x, weight, rstd, cos, sin)
        return dx, dweight if weight_gradient else weight.new_empty(0)
    from padfree.layers.ops import triton_qk_norm_rope

    return triton_qk_norm_rope.backward(dy, x, weight, rstd, cos, sin, weight_gradient=weight_gradient)


@torch.library.register_fake(QK_NORM_ROPE)  # type: ignore[untyped-decorator]
def _qk_norm_rope_shapes(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=wide_type(x))


@torch.library.register_fake(BACKWARD)  # type: ignore[untyped-decorator]
def _backward_shapes(dy: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape if rest[-1] else 0)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, cos, sin, _ = inputs
    ctx.save_for_backward(x, weight, output[1], cos, sin)


def _gradients(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    needs_weight = ctx.needs_input_grad[1]
    dx, dweight = torch.ops.padfree.qk_norm_rope_backward(dy, *ctx.saved_tensors, needs_weight)
    return dx, dweight if needs_weight else None, None, None, None


torch.library.register_autograd(QK_NORM_ROPE, _gradients, setup_context=_save)
