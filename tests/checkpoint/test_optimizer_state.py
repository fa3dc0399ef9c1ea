"""Optimizer state goes by names, and what JSON would change is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from padfree.checkpoint.optimizer_state import describe_optimizer, optimizer_tensors


def test_options_that_are_no_values_are_refused() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([{"params": model.parameters(), "rule": max}], lr=0.1)
    with pytest.raises(ValueError, match=r"optimizer\['groups'\]\[0\]\['rule'\]: builtin_function_or_method; give"):
        describe_optimizer(model, optimizer)


def test_tensors_go_by_the_names_of_parameters() -> None:
    model = nn.Linear(2, 3)
    optimizer = torch.optim.AdamW([model.bias, model.weight], lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    assert optimizer_tensors(model, optimizer) == {}  # nothing has been stepped yet
    optimizer.step()
    tensors = optimizer_tensors(model, optimizer)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        f"{kind}/{name}": shape if kind != "step" else ()
        for name, shape in (("weight", (3, 2)), ("bias", (3,)))
        for kind in ("step", "exp_avg", "exp_avg_sq")
    }
    assert tensors["exp_avg/bias"] is optimizer.state[model.bias]["exp_avg"]
    assert describe_optimizer(model, optimizer)["groups"][0]["params"] == ["bias", "weight"]
