"""The norm of a gradient that is distributed over ranks, with parameters on several meshes.

For each dimension of a parameter's mesh, the gradient (a DTensor) has a placement:

- Shard: the ranks along this dimension hold different parts, so the squares are summed over these ranks.
- Replicate: the ranks along this dimension hold the same numbers, so the squares count once.

A gradient that is not a DTensor is the same on every rank, and also counts once. Squares are summed in float64.
Gradients with the same mesh and placements are reduced together.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

GradientPlacement = tuple[DeviceMesh, tuple[Placement, ...]] | None


@torch.no_grad()
def gradient_norm(parameters: Iterable[nn.Parameter], device: torch.device) -> Tensor:
    """Return the norm of the whole gradient, the same on every rank: a float64 tensor [] on `device`. All ranks must
    call this.
    """
    by_placement: dict[GradientPlacement, list[Tensor]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            by_placement.setdefault((gradient.device_mesh, gradient.placements), []).append(gradient.to_local())
        elif gradient is not None:
            by_placement.setdefault(None, []).append(gradient)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for own_placements, gradients in by_placement.items():
        squares = torch.stack(torch._foreach_norm(gradients)).double().square().sum().to(device)
        mesh, placements = own_placements or (None, ())
        for dim, placement in enumerate(placements):
            assert not placement.is_partial(), "gradients must be reduced already"
            if mesh is not None and placement.is_shard():
                dist.all_reduce(squares, group=mesh.get_group(dim))
        total += squares
    return total.sqrt()
