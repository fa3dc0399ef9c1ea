"""Matmuls a·b with an epilogue: work on the result before it is written to memory.

    matmul_add                a·b + c
    matmul_swiglu             up = a·b, and act = silu(gate) · up
    matmul_swiglu_backward    the gradients of gate and up, where a·b is the gradient of act

a is [T, K]. b is [K, N], row-major or column-major. All other tensors are [T, N].

On Hopper, the operators are matmuls of `quack-kernels`, whose epilogues compute in float32. On other devices they are
plain torch. `passes.matmul_epilogues` inserts them into compiled layers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from padfree.layers.ops.quack_support import is_supported
from padfree.layers.ops.swiglu import swiglu, swiglu_backward

ADD = "padfree::matmul_add"
SWIGLU = "padfree::matmul_swiglu"
BACKWARD = "padfree::matmul_swiglu_backward"
OVERWRITING = "padfree::matmul_swiglu_backward_"

torch.library.define(ADD, "(Tensor a, Tensor b, Tensor c) -> Tensor")
torch.library.define(SWIGLU, "(Tensor a, Tensor b, Tensor gate) -> (Tensor, Tensor)")
torch.library.define(BACKWARD, "(Tensor a, Tensor b, Tensor gate, Tensor up) -> (Tensor, Tensor)")
# Writes the gradients of gate and up over gate and up.
torch.library.define(OVERWRITING, "(Tensor a, Tensor b, Tensor(a!) gate, Tensor(b!) up) -> ()")


@torch.library.impl(ADD, ("cpu", "cuda"))
def _matmul_add(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    if not is_supported(a, b):
        return torch.addmm(c, a, b)
    from padfree.layers.ops import quack_matmul_epilogues as kernels

    out = torch.empty_like(c, memory_format=torch.contiguous_format)
    kernels.add(a, b, c, out)
    return out


@torch.library.impl(SWIGLU, ("cpu", "cuda"))
def _matmul_swiglu(a: Tensor, b: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    if not is_supported(a, b):
        up = a @ b
        return up, swiglu(gate, up).contiguous()
    from padfree.layers.ops import quack_matmul_epilogues as kernels

    up, act = (torch.empty_like(gate, memory_format=torch.contiguous_format) for _ in range(2))
    kernels.swiglu(a, b, gate, up, act)
    return up, act


@torch.library.impl(BACKWARD, ("cpu", "cuda"))
def _matmul_swiglu_backward(a: Tensor, b: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    dgate, dup = (torch.empty_like(gate, memory_format=torch.contiguous_format) for _ in range(2))
    _backward_into(a, b, gate, up, dgate, dup)
    return dgate, dup


@torch.library.impl(OVERWRITING, ("cpu", "cuda"))
def _matmul_swiglu_backward_overwriting(a: Tensor, b: Tensor, gate: Tensor, up: Tensor) -> None:
    _backward_into(a, b, gate, up, gate, up)


def _backward_into(a: Tensor, b: Tensor, gate: Tensor, up: Tensor, dgate: Tensor, dup: Tensor) -> None:
    if not is_supported(a, b):
        for target, result in zip((dgate, dup), swiglu_backward(a @ b, gate, up), strict=True):
            target.copy_(result)
        return
    from padfree.layers.ops import quack_matmul_epilogues as kernels

    kernels.swiglu_backward(a, b, gate, up, dgate, dup)


@torch.library.register_fake(ADD)  # type: ignore[untyped-decorator]
def _sum_shape(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return c.new_empty(c.shape)


@torch.library.register_fake(SWIGLU)  # type: ignore[untyped-decorator]
def _shapes(a: Tensor, b: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), gate.new_empty(gate.shape)


@torch.library.register_fake(BACKWARD)  # type: ignore[untyped-decorator]
def _backward_shapes(a: Tensor, b: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


@torch.library.register_fake(OVERWRITING)  # type: ignore[untyped-decorator]
def _no_shapes(*_: Tensor) -> None:
    return None
