"""Optimizer state is stored by parameter name, and values that JSON would change are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from padfree.checkpoint.checkpointer import Checkpointer
from padfree.checkpoint.optimizer_state import describe_optimizer, optimizer_tensors
from padfree.optim.optimizer import make_optimizer
from padfree.optim.optimizer_settings import OptimizerConfig


def test_options_that_are_no_values_are_refused() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([{"params": model.parameters(), "rule": max}], lr=0.1)
    with pytest.raises(ValueError, match=r"optimizer\['groups'\]\[0\]\['rule'\]: JSON cannot store a builtin_"):
        describe_optimizer(model, optimizer)


def test_tensors_go_by_the_names_of_parameters() -> None:
    model = nn.Linear(2, 3)
    optimizer = torch.optim.AdamW([model.bias, model.weight], lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    assert optimizer_tensors(model, optimizer) == {}  # no step has been made yet
    optimizer.step()
    tensors = optimizer_tensors(model, optimizer)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        f"{kind}/{name}": shape if kind != "step" else ()
        for name, shape in (("weight", (3, 2)), ("bias", (3,)))
        for kind in ("step", "exp_avg", "exp_avg_sq")
    }
    assert tensors["exp_avg/bias"] is optimizer.state[model.bias]["exp_avg"]
    assert describe_optimizer(model, optimizer)["groups"][0]["params"] == ["bias", "weight"]


def test_a_checkpoint_of_torchs_adamw_resumes(tmp_path: Path) -> None:
    """Older checkpoints hold the options of `torch.optim.AdamW` and no rules; the next steps are bit-identical."""

    def trained(model: nn.Linear, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            model(torch.full((1, 2), float(step + 1))).square().sum().backward()
            optimizer.step()

    torch.manual_seed(0)
    model, again = nn.Linear(2, 3), nn.Linear(2, 3)
    groups = [{"params": [model.weight], "weight_decay": 0.1}, {"params": [model.bias], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.1, betas=(0.9, 0.95), fused=True)
    trained(model, optimizer, range(2))
    checkpointer = Checkpointer(tmp_path)
    path = checkpointer.save(2, model=model, optimizer=optimizer, extra={}, rank_state={})
    assert "rule" not in describe_optimizer(model, optimizer)["groups"][0]
    ours = make_optimizer(again, OptimizerConfig(lr=0.1, weight_decay=0.1))
    checkpointer.load(path, model=again, optimizer=ours)
    assert [group["rule"] for group in ours.param_groups] == ["adamw", "adamw"]
    trained(model, optimizer, range(2, 4))
    trained(again, ours, range(2, 4))
    for mine, theirs in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert ours.state[mine]["step"] == 4
