"""Norms of gradients that are distributed over ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from padfree.distributed import make_mesh
from padfree.sharding.norm import gradient_norm
from tests.ranks import run_ranks

CPU = torch.device("cpu")


def module_with_gradients() -> tuple[nn.Module, torch.Tensor]:
    """A matrix whose rows two ranks cannot divide evenly, and a vector with fewer elements than ranks."""
    module = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(parameter.shape, generator=generator) for parameter in module.parameters()]
    return module, torch.cat([gradient.flatten() for gradient in gradients])


def assign(module: nn.Module, flat: torch.Tensor) -> None:
    for parameter, part in zip(module.parameters(), flat.split([p.numel() for p in module.parameters()]), strict=True):
        whole = part.view(parameter.shape)
        if isinstance(parameter, DTensor):
            whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
        parameter.grad = whole


def sharded_norms(rank: int, world: int) -> list[float]:
    found = []
    for replicate in (1, 2):
        mesh = make_mesh("cpu", replicate=replicate)
        module, flat = module_with_gradients()
        fully_shard(module, mesh=mesh.fsdp)
        assign(module, flat)
        found.append(gradient_norm(module.parameters(), CPU).item())
    return found


def norms_over_several_meshes(rank: int, world: int) -> float:
    """Every tensor on another mesh: sharded over all ranks, over one of two dimensions, replicated, not a DTensor."""
    mesh = make_mesh("cpu", context=2)
    module, flat = module_with_gradients()
    places: list[tuple[DeviceMesh, tuple[Placement, ...]] | None] = [
        (mesh.fsdp, (Shard(0),)),
        (mesh.over(shard=("shard",), replicate=("context",)), (Replicate(), Shard(0))),
        (mesh.devices, (Replicate(), Shard(1), Shard(1))),
        None,
    ]
    assert mesh.devices.mesh_dim_names == ("replicate", "shard", "context")
    parts = flat.split([parameter.numel() for parameter in module.parameters()])
    parameters = []
    for parameter, part, place in zip(module.parameters(), parts, places, strict=True):
        whole = part.view(parameter.shape)
        gradient = whole if place is None else distribute_tensor(whole, *place)
        parameters.append(nn.Parameter(gradient))
        parameters[-1].grad = gradient
    return gradient_norm(parameters, CPU).item()


def test_norm_of_one_process() -> None:
    module, flat = module_with_gradients()
    assign(module, flat)
    assert gradient_norm(module.parameters(), CPU).item() == pytest.approx(flat.norm().item(), rel=1e-6)
    assert gradient_norm([], CPU).item() == 0.0


def test_norm_counts_every_number_once() -> None:
    """Sharded gradients, and gradients that replicas hold twice."""
    expected = module_with_gradients()[1].norm().item()
    for found in run_ranks(2, sharded_norms):
        assert found == pytest.approx([expected] * 2, rel=1e-6)


def test_every_tensor_is_added_up_over_its_own_mesh() -> None:
    expected = module_with_gradients()[1].norm().item()
    assert run_ranks(4, norms_over_several_meshes) == pytest.approx([expected] * 4, rel=1e-6)
