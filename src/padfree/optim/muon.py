"""Muon: orthogonalised momentum for hidden matrices (weights inside layers). For a matrix [A, B], a step computes

    buffer  = lerp(buffer, gradient, 1 - momentum)
    update  = lerp(gradient, buffer, momentum)              without Nesterov: update = buffer
    update  = Newton-Schulz(update)                         U S V^T -> about U V^T
    weight  = (1 - lr * weight_decay) * weight - lr * update_rms * sqrt(max(A, B)) * update

With `update_rms` 0.2, Muon's updates are about as large as AdamW's. A learning rate tuned for AdamW then also suits
Muon (Moonshot AI, "Muon is scalable for LLM training").

The formulas match `torch.optim.Muon` with `adjust_lr_fn="match_rms_adamw"`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from padfree.optim.matrices import MatrixSplit, matrix_split_of, on_whole_matrices
from padfree.optim.rule import Group, State, local

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPS = 1e-7

MOST_NUMBERS = 1 << 25
"""The maximum number of elements of the matrices that this rank orthogonalises in one batch. If a single matrix has
more elements, the rank orthogonalises one matrix at a time.
"""


class Muon:
    """The Muon update rule for hidden matrices.

    The options of its parameter groups are `momentum`, `nesterov`, `newton_schulz_steps`, `weight_decay` and
    `update_rms`.
    """

    remembers = "Muon's momentum"

    @torch.no_grad()
    def step(self, group: Group, state: State, finite: Tensor, scale: Tensor | None) -> None:
        orthogonal = partial(orthogonalize, steps=group["newton_schulz_steps"])
        made = finite.double()  # 1: make the step; 0: skip it
        done = 0  # number of matrices so far, so that a different rank computes the first matrix of each batch
        for batch in _batches(group["params"], state):
            sizes = [len(part) for part in batch.weights]
            gradient = torch.cat(batch.gradients)
            if scale is not None:
                gradient *= scale
            gradient = torch.where(finite, gradient, 0)  # 0 * inf would be NaN
            buffer = torch.cat(batch.buffers)
            buffer.lerp_(gradient, ((1 - group["momentum"]) * made).to(buffer.dtype))
            torch._foreach_copy_(batch.buffers, list(torch.split(buffer, sizes)))
            update = gradient.lerp_(buffer, group["momentum"]) if group["nesterov"] else buffer
            dtype = torch.bfloat16 if batch.device.type == "cuda" else update.dtype
            found = on_whole_matrices(orthogonal, update.to(batch.device, dtype), batch.split, done)
            # An orthogonalised matrix [A, B] has a root mean square of 1 / sqrt(max(A, B)).
            reach = group["lr"] * group["update_rms"] * math.sqrt(max(batch.shape))
            change = found.to(update) * (-reach * made).to(update.dtype)
            if group["weight_decay"]:
                torch._foreach_mul_(batch.weights, (1 - group["lr"] * group["weight_decay"] * made).to(update.dtype))
            torch._foreach_add_(batch.weights, list(torch.split(change, sizes)))
            done += len(update)

    def state_bytes(self, group: Group, numbers: int, columns: int) -> int:
        return 4 * numbers


def orthogonalize(matrices: Tensor, steps: int) -> Tensor:
    """Orthogonalise n matrices [n, A, B] by Newton-Schulz iterations.

    A result has the same singular vectors as its matrix, but all nonzero singular values are replaced by about 1.
    """
    a, b, c = COEFFICIENTS
    found = matrices.mT if matrices.shape[-2] > matrices.shape[-1] else matrices
    found = found / torch.linalg.vector_norm(found, dim=(-2, -1), keepdim=True).clamp(min=EPS)
    for _ in range(steps):
        gram = found @ found.mT
        found = torch.baddbmm(found, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.mT if matrices.shape[-2] > matrices.shape[-1] else found


class _Batch(NamedTuple):
    """Matrices of one shape that are updated together. Each tensor in the lists is a view [n, a, b] of this rank's
    shards of n matrices.
    """

    shape: torch.Size  # [A, B] of a whole matrix
    split: MatrixSplit | None
    device: torch.device  # the device that computes the Newton-Schulz iterations
    weights: list[Tensor]
    gradients: list[Tensor]
    buffers: list[Tensor]


def _batches(parameters: list[Tensor], state: State) -> Iterator[_Batch]:
    """Yield batches of all matrices with a gradient. The matrices of a batch have the same shape and sharding."""
    by_kind: dict[tuple[object, ...], list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            if not state[parameter]:
                zeros = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                state[parameter]["momentum_buffer"] = zeros
            placement = (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else ()
            by_kind.setdefault((parameter.shape, parameter.dtype, parameter.device, *placement), []).append(parameter)
    for found in by_kind.values():
        split, shape = matrix_split_of(found[0]), found[0].shape[-2:]
        numbers = shape.numel() if split is None else shape.numel() // shape[split.dim] * max(split.sizes)
        most = max(1 if split is None else split.group.size(), MOST_NUMBERS // max(1, numbers))
        batch = _Batch(shape, split, _device(found[0]), [], [], [])
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
    """Return this rank's shard [..., a, b] of a tensor as a view [n, a, b]."""
    part = local(tensor)
    return part.view(math.prod(part.shape[:-2]), *part.shape[-2:])


def _device(parameter: Tensor) -> torch.device:
    """Return the device that computes the Newton-Schulz iterations for a parameter.

    This is the device of the parameter or, for a sharded parameter, that of its mesh. With `parallel.offload`, the
    parameter is on the CPU, but its mesh may be on GPUs.
    """
    return torch.device(parameter.device_mesh.device_type) if isinstance(parameter, DTensor) else parameter.device
