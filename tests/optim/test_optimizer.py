"""Who decays, and norms of gradients that are spread over ranks. Steps themselves are tested with the engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from padfree.distributed import Mesh, distributed, make_mesh
from padfree.optim.optimizer import gradient_norm, make_optimizer, scale_gradients, set_learning_rate, step_if
from tests.ranks import run_ranks


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    with distributed(device="cpu") as device:
        yield make_mesh(device)


def small_model() -> nn.Module:
    parts = {"embedding": nn.Embedding(7, 4), "norm": nn.LayerNorm(4), "projection": nn.Linear(4, 4)}
    return nn.ModuleDict(parts)


def test_matrices_decay_and_vectors_do_not() -> None:
    model = small_model()
    optimizer = make_optimizer(model, lr=1e-3, weight_decay=0.1)
    decays = {id(parameter): group["weight_decay"] for group in optimizer.param_groups for parameter in group["params"]}
    by_name = {name: decays[id(parameter)] for name, parameter in model.named_parameters()}
    assert len(by_name) == len(decays)
    for name, decay in by_name.items():
        assert decay == (0.0 if "norm" in name or "bias" in name else 0.1), name


def test_frozen_parameters_are_left_out() -> None:
    model = small_model()
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="ModuleDict has no parameter that requires a gradient"):
        make_optimizer(model, lr=1e-3)
    next(model.parameters()).requires_grad_(True)
    optimizer = make_optimizer(model, lr=1e-3)
    assert [len(group["params"]) for group in optimizer.param_groups] == [1]
    set_learning_rate(optimizer, 0.5)
    assert optimizer.param_groups[0]["lr"] == 0.5


def module_with_gradients() -> tuple[nn.Module, torch.Tensor]:
    """Rows that two ranks cannot divide evenly, and a vector shorter than the ranks are many."""
    module = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(parameter.shape, generator=generator) for parameter in module.parameters()]
    return module, torch.cat([gradient.flatten() for gradient in gradients])


def assign(module: nn.Module, flat: torch.Tensor) -> None:
    for parameter, part in zip(module.parameters(), flat.split([p.numel() for p in module.parameters()]), strict=True):
        whole = part.view(parameter.shape)
        if isinstance(parameter, torch.distributed.tensor.DTensor):
            whole = torch.distributed.tensor.distribute_tensor(whole, parameter.device_mesh, parameter.placements)
        parameter.grad = whole


def sharded_norms(rank: int, world: int) -> list[tuple[float, float]]:
    found = []
    for replicate in (1, 2):
        mesh = make_mesh("cpu", replicate=replicate)
        module, flat = module_with_gradients()
        fully_shard(module, mesh=mesh.fsdp)
        assign(module, flat)
        norm = gradient_norm(module.parameters(), mesh)
        scale_gradients(module.parameters(), torch.tensor(0.25, dtype=torch.float64))
        found.append((norm.item(), gradient_norm(module.parameters(), mesh).item()))
    return found


def test_norm_of_one_process(mesh: Mesh) -> None:
    module, flat = module_with_gradients()
    assign(module, flat)
    assert gradient_norm(module.parameters(), mesh).item() == pytest.approx(flat.norm().item(), rel=1e-6)
    assert gradient_norm([], mesh).item() == 0.0


def test_norm_counts_every_number_once() -> None:
    """Sharded, and held twice by replicas."""
    expected = module_with_gradients()[1].norm().item()
    for by_layout in run_ranks(2, sharded_norms):
        for norm, scaled in by_layout:
            assert norm == pytest.approx(expected, rel=1e-6)
            assert scaled == pytest.approx(expected / 4, rel=1e-6)


@pytest.mark.parametrize("kind", ["fused", "plain"])
def test_a_step_that_is_not_finite_changes_nothing(kind: str) -> None:
    """Neither weights, nor moments, nor the count of steps; and the next one is as if it had not been tried."""
    results = []
    for tries in (["finite", "nan", "finite"], ["finite", "finite"]):
        torch.manual_seed(0)
        model = nn.Linear(3, 3)
        optimizer = (
            make_optimizer(model, lr=0.1) if kind == "fused" else torch.optim.Adagrad(model.parameters(), lr=0.1)
        )
        for number in tries:
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 1.0 if number == "finite" else torch.nan)
            step_if(optimizer, torch.tensor(number == "finite"))
        results.append([*model.parameters(), *(state["step"] for state in optimizer.state.values())])
    for mine, expected in zip(*results, strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=0)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kind", ["fused", "plain"])
def test_a_factor_is_one_of_the_gradients(kind: str, device: str) -> None:
    """A quarter, bitwise: what a step does with all gradients multiplied before it."""
    results = []
    for inside in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(5, 3, device=device)
        optimizer = (
            make_optimizer(model, lr=0.1) if kind == "fused" else torch.optim.Adagrad(model.parameters(), lr=0.1)
        )
        for number in (1.0, -3.0):
            optimizer.zero_grad()
            model(torch.full((2, 5), number, device=device)).square().sum().backward()
            quarter, finite = torch.tensor(0.25, dtype=torch.float64, device=device), torch.ones((), device=device) > 0
            if not inside:
                scale_gradients(model.parameters(), quarter)
            step_if(optimizer, finite, quarter if inside else None)
        results.append([tensor.clone() for tensor in model.parameters()])
    for mine, expected in zip(*results, strict=True):
        assert torch.equal(mine, expected)


def test_steps_are_those_of_adamw(mesh: Mesh) -> None:
    """Bitwise, of whole parameters and of sharded ones; a step that is not finite changes neither weights nor state."""
    results = []
    for kind in ("torch", "whole", "sharded"):
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        if kind == "sharded":
            fully_shard(model, mesh=mesh.fsdp)
        optimizer: torch.optim.Optimizer = (
            torch.optim.AdamW(
                [
                    {"params": [model.weight], "weight_decay": 0.1},
                    {"params": [model.bias], "weight_decay": 0.0},
                ],
                lr=0.1,
                betas=(0.9, 0.95),
                fused=True,
            )
            if kind == "torch"
            else make_optimizer(model, lr=0.1, weight_decay=0.1)
        )
        for step in range(4):
            optimizer.zero_grad()
            model(torch.full((2, 4), float(step + 1))).square().sum().backward()
            step_if(optimizer, torch.tensor(step != 2))
        state = optimizer.state[model.weight]
        tensors = [model.weight, model.bias, state["exp_avg"], state["exp_avg_sq"], state["step"]]
        results.append([tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for tensor in tensors])
    for result in results[1:]:
        for found, expected in zip(result, results[0], strict=True):
            assert torch.equal(found, expected)
    assert results[0][-1] == 3
