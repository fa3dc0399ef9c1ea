"""SwiGLU, act = silu(gate) · up, as operators. The operator swiglu_backward_ overwrites its inputs.

Tensors of the MLP's intermediate size are the largest of a layer, and backward needs six of them: gate, up, act and
their gradients. Overwriting inputs saves memory.

The arithmetic is float32, and results are rounded once. On a GPU, Triton kernels are used, elsewhere plain torch.
`passes.swiglu` inserts the operators into compiled layers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from padfree.layers.ops.precision import has_kernels, wide_type

SWIGLU = "padfree::swiglu"
BACKWARD = "padfree::swiglu_backward"
OVERWRITING = "padfree::swiglu_backward_"

torch.library.define(SWIGLU, "(Tensor gate, Tensor up) -> Tensor")
torch.library.define(BACKWARD, "(Tensor dact, Tensor gate, Tensor up) -> (Tensor, Tensor)")
# Writes act over dact, and the gradients of gate and up over gate and up.
torch.library.define(OVERWRITING, "(Tensor(a!) dact, Tensor(b!) gate, Tensor(c!) up) -> ()")


# The reference in plain torch


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return (_silu(gate) * up).to(gate.dtype)


def swiglu_backward(dact: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    wide = gate.to(wide_type(gate))
    share = torch.sigmoid(wide)
    dgate = share * (1 + wide * (1 - share)) * dact * up
    return dgate.to(gate.dtype), (dact * _silu(gate)).to(gate.dtype)


def _silu(gate: Tensor) -> Tensor:
    return torch.nn.functional.silu(gate.to(wide_type(gate)))


# The operators


@torch.library.impl(SWIGLU, ("cpu", "cuda"))
def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    if not has_kernels(gate):
        return swiglu(gate, up).contiguous()
    from padfree.layers.ops import triton_swiglu as kernels

    return kernels.forward(gate, up)


@torch.library.impl(BACKWARD, ("cpu", "cuda"))
def _swiglu_backward(dact: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    if not has_kernels(gate):
        dgate, dup = swiglu_backward(dact, gate, up)
        return dgate.contiguous(), dup.contiguous()
    from padfree.layers.ops import triton_swiglu as kernels

    return kernels.backward(dact, gate, up)


@torch.library.impl(OVERWRITING, ("cpu", "cuda"))
def _swiglu_backward_overwriting(dact: Tensor, gate: Tensor, up: Tensor) -> None:
    if not has_kernels(gate):
        act, (dgate, dup) = swiglu(gate, up), swiglu_backward(dact, gate, up)
        for target, result in ((dact, act), (gate, dgate), (up, dup)):
            target.copy_(result)
        return
    from padfree.layers.ops import triton_swiglu as kernels

    kernels.backward_overwriting(dact, gate, up)


@torch.library.register_fake(SWIGLU)  # type: ignore[untyped-decorator]
def _swiglu_shape(gate: Tensor, up: Tensor) -> Tensor:
    return gate.new_empty(gate.shape)


@torch.library.register_fake(BACKWARD)  # type: ignore[untyped-decorator]
def _backward_shapes(dact: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


@torch.library.register_fake(OVERWRITING)  # type: ignore[untyped-decorator]
def _no_shapes(dact: Tensor, gate: Tensor, up: Tensor) -> None:
    return None


def _save(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: torch.autograd.function.BackwardCFunction, dact: Tensor) -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, Tensor] = torch.ops.padfree.swiglu_backward(dact, *ctx.saved_tensors)
    return result


torch.library.register_autograd(SWIGLU, _gradients, setup_context=_save)
