"""Muon: the momentum of a hidden matrix, orthogonalised.

    buffer  = lerp(buffer, gradient, 1 - momentum)
    update  = lerp(gradient, buffer, momentum)              or the buffer, without Nesterov
    update  = Newton-Schulz(update)                         U S V^T -> about U V^T
    weight  = (1 - lr * weight_decay) * weight - lr * update_rms * sqrt(max(A, B)) * update

A matrix [A, B] with orthonormal rows or columns has the root mean square 1 / sqrt(max(A, B)), so that every update has
the root mean square lr * `update_rms`, whatever the shape. AdamW's updates have about 0.2 lr; with 0.2 a learning rate
and a weight decay that suit AdamW suit Muon (Moonshot AI, "Muon is scalable for LLM training"). Momentum, coefficients
and norms match `torch.optim.Muon` with `adjust_lr_fn="match_rms_adamw"`. `padfree.optim.reference_adamw` has the same
for one matrix, plainly.

Every matrix of a parameter [..., A, B] is one of its own: each expert is. Matrices of one shape are computed as a batch
[n, A, B], those that are divided over ranks by one rank each (`padfree.optim.matrices`). On a GPU the iteration runs in
bfloat16, on the CPU in the dtype of the weights. Whether the step is made and what gradients are multiplied by are
tensors on the device: the host never waits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from padfree.optim.matrices import MatrixSplit, cut_of, on_whole_matrices
from padfree.optim.rule import Group, State, local

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPS = 1e-7

MOST_NUMBERS = 1 << 25
"""Of this rank's part of a batch of matrices, unless that is one matrix, or one for each rank."""


class Muon:
    """Options: `momentum`, `nesterov`, `newton_schulz_steps`, `weight_decay`, `update_rms`."""

    remembers = "Muon's momentum"

    @torch.no_grad()
    def step(self, group: Group, state: State, finite: Tensor, scale: Tensor | None) -> None:
        orthogonal = partial(orthogonalize, steps=group["newton_schulz_steps"])
        made = finite.double()  # 1 or 0
        done = 0  # matrices so far: which rank computes the first one of a batch moves on from batch to batch
        for batch in _batches(group["params"], state):
            sizes = [len(part) for part in batch.weights]
            gradient = torch.cat(batch.gradients)
            if scale is not None:
                gradient *= scale
            gradient = torch.where(finite, gradient, 0)  # 0 times what is not finite would not be 0
            buffer = torch.cat(batch.buffers)
            buffer.lerp_(gradient, ((1 - group["momentum"]) * made).to(buffer.dtype))
            torch._foreach_copy_(batch.buffers, list(torch.split(buffer, sizes)))
            update = gradient.lerp_(buffer, group["momentum"]) if group["nesterov"] else buffer
            dtype = torch.bfloat16 if batch.device.type == "cuda" else update.dtype
            found = on_whole_matrices(orthogonal, update.to(batch.device, dtype), batch.cut, done)
            reach = group["lr"] * group["update_rms"] * math.sqrt(max(batch.shape))
            change = found.to(update) * (-reach * made).to(update.dtype)
            if group["weight_decay"]:
                torch._foreach_mul_(batch.weights, (1 - group["lr"] * group["weight_decay"] * made).to(update.dtype))
            torch._foreach_add_(batch.weights, list(torch.split(change, sizes)))
            done += len(update)

    def state_bytes(self, numbers: int) -> int:
        return 4 * numbers


def orthogonalize(matrices: Tensor, steps: int) -> Tensor:
    """[n, A, B] -> [n, A, B]: singular values to about 1, those of 0 excepted."""
    a, b, c = COEFFICIENTS
    found = matrices.mT if matrices.shape[-2] > matrices.shape[-1] else matrices
    found = found / torch.linalg.vector_norm(found, dim=(-2, -1), keepdim=True).clamp(min=EPS)
    for _ in range(steps):
        gram = found @ found.mT
        found = torch.baddbmm(found, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.mT if matrices.shape[-2] > matrices.shape[-1] else found


class _Batch(NamedTuple):
    """Matrices of one shape, as this rank holds them: parts [n, a, b] of parameters, which share their memory."""

    shape: torch.Size  # [A, B] of a whole matrix
    cut: MatrixSplit | None
    device: torch.device  # where they are computed
    weights: list[Tensor]
    gradients: list[Tensor]
    buffers: list[Tensor]


def _batches(parameters: list[Tensor], state: State) -> Iterator[_Batch]:
    """All matrices of parameters with a gradient; in a batch are those that have the same shape and are cut alike."""
    alike: dict[tuple[object, ...], list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            if not state[parameter]:
                zeros = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                state[parameter]["momentum_buffer"] = zeros
            place = (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else ()
            alike.setdefault((parameter.shape, parameter.dtype, parameter.device, *place), []).append(parameter)
    for found in alike.values():
        cut, shape = cut_of(found[0]), found[0].shape[-2:]
        numbers = shape.numel() if cut is None else shape.numel() // shape[cut.dim] * max(cut.sizes)
        most = max(1 if cut is None else cut.group.size(), MOST_NUMBERS // max(1, numbers))
        batch = _Batch(shape, cut, _device(found[0]), [], [], [])
        for parameter in found:
            assert parameter.grad is not None
            tensors = (parameter, parameter.grad, state[parameter]["momentum_buffer"])
            for parts in zip(*(torch.split(_matrices(each), most) for each in tensors), strict=True):
                if batch.weights and sum(map(len, batch.weights)) + len(parts[0]) > most:
                    yield batch
                    batch = batch._replace(weights=[], gradients=[], buffers=[])
                for some, part in zip(batch[-3:], parts, strict=True):
                    some.append(part)
        yield batch


def _matrices(tensor: Tensor) -> Tensor:
    """[..., A, B] -> [n, a, b]: this rank's parts of its matrices."""
    part = local(tensor)
    return part.view(math.prod(part.shape[:-2]), *part.shape[-2:])


def _device(parameter: Tensor) -> torch.device:
    """Parameters that wait on the CPU (`parallel.offload`) are computed on the device of their mesh."""
    return torch.device(parameter.device_mesh.device_type) if isinstance(parameter, DTensor) else parameter.device
