"""The update rule of each parameter, and AdamW's steps. Muon's steps are in test_muon."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from padfree.distributed import Mesh
from padfree.optim.optimizer import RULES, Optimizer, make_optimizer
from padfree.optim.optimizer_settings import MuonSettings, OptimizerConfig
from padfree.testing.models import build


def small_model() -> nn.Module:
    parts = {"embedding": nn.Embedding(7, 4), "norm": nn.LayerNorm(4), "projection": nn.Linear(4, 4)}
    return nn.ModuleDict(parts)


def test_matrices_decay_and_vectors_do_not() -> None:
    model = small_model()
    optimizer = make_optimizer(model, OptimizerConfig(lr=1e-3, weight_decay=0.1))
    decays = {id(parameter): group["weight_decay"] for group in optimizer.param_groups for parameter in group["params"]}
    by_name = {name: decays[id(parameter)] for name, parameter in model.named_parameters()}
    assert len(by_name) == len(decays)
    for name, decay in by_name.items():
        assert decay == (0.0 if "norm" in name or "bias" in name else 0.1), name


def test_frozen_parameters_are_left_out() -> None:
    model = small_model()
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="ModuleDict has no parameter that requires a gradient"):
        make_optimizer(model, OptimizerConfig())
    next(model.parameters()).requires_grad_(True)
    optimizer = make_optimizer(model, OptimizerConfig())
    assert [len(group["params"]) for group in optimizer.param_groups] == [1]


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_the_schedule_multiplies_the_base_rate_of_every_group(name: str) -> None:
    muon = MuonSettings(lr=0.4, weight_decay=0.3)
    settings = OptimizerConfig(name=name, lr=0.1, weight_decay=0.2, muon=muon)  # type: ignore[arg-type]
    optimizer = make_optimizer(build("llama"), settings)
    optimizer.set_rates(0.5)
    found = [(group["rule"], group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    rest = [("adamw", 0.05, 0.2), ("adamw", 0.05, 0.0)]
    assert found == ([("muon", 0.2, 0.3), *rest] if name == "muon" else rest)
    assert optimizer.rates == ({"lr": 0.2, "lr/adamw": 0.05} if name == "muon" else {"lr": 0.05})
    optimizer.set_rates(1.0)
    assert [group["lr"] for group in optimizer.param_groups] == [group["base_lr"] for group in optimizer.param_groups]


def test_muon_takes_the_rate_and_decay_of_adamw_if_it_has_none() -> None:
    settings = OptimizerConfig(name="muon", lr=0.1, weight_decay=0.2)
    assert {group["lr"] for group in make_optimizer(build("llama"), settings).param_groups} == {0.1}
    assert (settings.muon_lr, settings.muon_weight_decay) == (0.1, 0.2)
    own = OptimizerConfig(name="muon", lr=0.1, muon=MuonSettings(lr=0.3))
    assert (own.with_lr(0.5).lr, own.with_lr(0.5).muon_lr) == (0.5, 0.5)
    assert own.with_lr(None) is own
    assert not own.changes_nothing
    assert not OptimizerConfig(name="muon", lr=0.0, muon=MuonSettings(lr=0.1)).changes_nothing
    assert OptimizerConfig(lr=0.0, muon=MuonSettings(lr=0.1)).changes_nothing


def test_options_remain_those_of_this_start() -> None:
    """Loading keeps the options of every rule and restores the state of the checkpoint."""
    model = build("llama")
    optimizer = make_optimizer(model, OptimizerConfig(name="muon", lr=0.1, muon=MuonSettings(momentum=0.5)))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    changed = OptimizerConfig(name="muon", lr=0.2, eps=1e-3, muon=MuonSettings(momentum=0.9, steps=3))
    again = make_optimizer(model, changed)
    expected = [{**group, "params": None} for group in again.param_groups]
    again.load_state_dict(optimizer.state_dict())
    assert [{**group, "params": None} for group in again.param_groups] == expected
    for parameter, state in optimizer.state.items():
        for kind, value in state.items():
            assert torch.equal(again.state[parameter][kind], value)


@pytest.mark.parametrize("rule", RULES)
def test_the_state_has_the_bytes_that_the_rule_says(rule: str) -> None:
    """In float32, without the step counter of each parameter."""
    model = nn.Linear(7, 5, bias=False)
    optimizer = one_rule(model, rule)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    state = [each for each in optimizer.state[model.weight].values() if each.ndim]
    (group,) = optimizer.param_groups
    assert RULES[rule].state_bytes(group, 35, 7) == sum(each.numel() * each.element_size() for each in state)


def one_rule(model: nn.Module, rule: str, **options: float) -> Optimizer:
    """All parameters in one group."""
    settings = {
        "adamw": {"betas": (0.9, 0.95), "eps": 1e-8, "fused": True, "state": "float32"},
        "muon": {"momentum": 0.95, "nesterov": True, "newton_schulz_steps": 5, "update_rms": 0.2},
    }
    common = {"params": list(model.parameters()), "rule": rule, "base_lr": 0.1, "weight_decay": 0.1}
    return Optimizer([{**common, **settings[rule], **options}])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("rule", RULES)
def test_a_step_that_is_not_finite_changes_nothing(rule: str, device: str) -> None:
    """Neither weights nor state change, and the next step is as if this one had not happened."""
    results = []
    for tries in (["finite", "nan", "finite"], ["finite", "finite"]):
        torch.manual_seed(0)
        model = nn.Linear(3, 3, bias=False, device=device)
        optimizer = one_rule(model, rule)
        for kind in tries:
            model.weight.grad = torch.arange(9.0, device=device).view(3, 3).sin()
            model.weight.grad[1] += 0.0 if kind == "finite" else torch.nan
            optimizer.step(torch.tensor(kind == "finite", device=device))
        results.append([model.weight, *optimizer.state[model.weight].values()])
    for mine, expected in zip(*results, strict=True):
        assert torch.equal(mine, expected)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("rule", RULES)
def test_a_scale_is_one_of_the_gradients(rule: str, device: str) -> None:
    """With a scale of 1/4: bit-identical to a step with all gradients multiplied in advance."""
    results = []
    for inside in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(5, 3, bias=False, device=device)
        optimizer = one_rule(model, rule)
        for number in (1.0, -3.0):
            optimizer.zero_grad()
            model(torch.full((2, 5), number, device=device)).square().sum().backward()
            assert model.weight.grad is not None
            quarter, finite = torch.tensor(0.25, dtype=torch.float64, device=device), torch.ones((), device=device) > 0
            if not inside:
                model.weight.grad *= quarter
            optimizer.step(finite, quarter if inside else None)
        results.append(model.weight.detach().clone())
    assert torch.equal(*results)


def test_steps_are_those_of_adamw(mesh: Mesh) -> None:
    """Bit-identical for whole and sharded parameters; a non-finite step changes neither weights nor state."""
    results = []
    for kind in ("torch", "whole", "sharded"):
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        if kind == "sharded":
            fully_shard(model, mesh=mesh.fsdp)
        groups = [{"params": [model.weight], "weight_decay": 0.1}, {"params": [model.bias], "weight_decay": 0.0}]
        optimizer: torch.optim.Optimizer = (
            torch.optim.AdamW(groups, lr=0.1, betas=(0.9, 0.95), fused=True)
            if kind == "torch"
            else make_optimizer(model, OptimizerConfig(lr=0.1, weight_decay=0.1))
        )
        for step in range(4):
            optimizer.zero_grad()
            model(torch.full((2, 4), float(step + 1))).square().sum().backward()
            if isinstance(optimizer, Optimizer):
                optimizer.step(torch.tensor(step != 2))
            elif step != 2:
                optimizer.step()
        state = optimizer.state[model.weight]
        tensors = [model.weight, model.bias, state["exp_avg"], state["exp_avg_sq"], state["step"]]
        results.append([tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for tensor in tensors])
    for result in results[1:]:
        for found, expected in zip(result, results[0], strict=True):
            assert torch.equal(found, expected)
    assert results[0][-1] == 3
