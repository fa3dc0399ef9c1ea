# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""SwiGLU as Triton kernels. A program computes `BLOCK` elements, 8 per thread."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
WARPS = 8


def forward(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.contiguous(), up.contiguous()
    act = torch.empty_like(gate)
    _forward_kernel[_grid(gate)](gate, up, act, gate.numel(), BLOCK=BLOCK, num_warps=WARPS)
    return act


def backward(dact: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    dact, gate, up = dact.contiguous(), gate.contiguous(), up.contiguous()
    dgate, dup = torch.empty_like(gate), torch.empty_like(up)
    _backward_kernel[_grid(gate)](
        dact, gate, up, dgate, dup, dact, gate.numel(), HAS_ACT=False, BLOCK=BLOCK, num_warps=WARPS
    )
    return dgate, dup


def backward_overwriting(dact: Tensor, gate: Tensor, up: Tensor) -> None:
    """Compute act = silu(gate) · up and the gradients of gate and up in place: write act over dact, dgate over gate and
    dup over up.
    """
    assert all(tensor.is_contiguous() for tensor in (dact, gate, up))
    _backward_kernel[_grid(gate)](
        dact, gate, up, gate, up, dact, gate.numel(), HAS_ACT=True, BLOCK=BLOCK, num_warps=WARPS
    )


def _grid(tensor: Tensor) -> tuple[int]:
    return (triton.cdiv(tensor.numel(), BLOCK),)


@triton.jit
def _forward_kernel(gate, up, act, count, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    g = tl.load(gate + place, mask=inside).to(tl.float32)
    u = tl.load(up + place, mask=inside).to(tl.float32)
    tl.store(act + place, (g * tl.sigmoid(g) * u).to(act.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(dact, gate, up, dgate, dup, act, count, HAS_ACT: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    d = tl.load(dact + place, mask=inside).to(tl.float32)
    g = tl.load(gate + place, mask=inside).to(tl.float32)
    u = tl.load(up + place, mask=inside).to(tl.float32)
    share = tl.sigmoid(g)
    silu = g * share
    tl.store(dgate + place, (d * u * (share + silu * (1 - share))).to(dgate.dtype.element_ty), mask=inside)
    tl.store(dup + place, (d * silu).to(dup.dtype.element_ty), mask=inside)
    if HAS_ACT:
        tl.store(act + place, (silu * u).to(act.dtype.element_ty), mask=inside)
