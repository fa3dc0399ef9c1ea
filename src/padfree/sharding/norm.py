"""The norm of a gradient whose tensors are spread over ranks, each over its own mesh.

    placement of a gradient          what the ranks along that dimension of its mesh hold
    Shard                            different parts: squares are added up over them
    Replicate, or no DTensor         the same numbers: counted once

Squares are added up in float64, once for all tensors that are placed alike. With `parallel.offload` gradients are on
the CPU; sums over ranks are made on the device of the run all the same.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

ParameterPlace = tuple[DeviceMesh, tuple[Placement, ...]] | None


@torch.no_grad()
def gradient_norm(parameters: Iterable[nn.Parameter], device: torch.device) -> Tensor:
    """[] float64 on `device`: the norm of the whole gradient, the same on every rank. All ranks call it alike."""
    by_place: dict[ParameterPlace, list[Tensor]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            by_place.setdefault((gradient.device_mesh, gradient.placements), []).append(gradient.to_local())
        elif gradient is not None:
            by_place.setdefault(None, []).append(gradient)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for place, gradients in by_place.items():
        squares = torch.stack(torch._foreach_norm(gradients)).double().square().sum().to(device)
        mesh, placements = place or (None, ())
        for dim, placement in enumerate(placements):
            assert not placement.is_partial(), "gradients are reduced before"
            if mesh is not None and placement.is_shard():
                dist.all_reduce(squares, group=mesh.get_group(dim))
        total += squares
    return total.sqrt()
