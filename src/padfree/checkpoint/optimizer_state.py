"""Store the optimizer state by parameter name, so that it does not depend on the order of parameters.

In this example, the state of the parameter norm.weight is stored in two places of a checkpoint.

optimizer.state[parameter] = {"step": tensor [], "exp_avg": tensor [5, 2]}
  tensors       optimizer/step/norm.weight, optimizer/exp_avg/norm.weight        stored with the tensors of the model
  description   {"groups": [{"lr": 1e-5, ..., "params": [names]}], "values": {name: values that are not tensors}}
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from padfree.checkpoint.checkpoint_files import DTYPE_OF, Reader, check_json
from padfree.errors import UserError
from padfree.model.named_tensors import local_part, local_region, named_tensors, sharded_like

IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")
"""Options that select the implementation of an optimizer. A resumed run ignores their saved values."""


def optimizer_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the tensors of the optimizer state. Their keys are `<kind>/<parameter name>`, such as
    `exp_avg/norm.weight`.
    """
    tensors: dict[str, Tensor] = {}
    for name, parameter in named_tensors(model).items():
        for kind, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(value, Tensor):
                continue
            if isinstance(parameter, DTensor) and value.ndim and not isinstance(value, DTensor):
                raise UserError(
                    "optimizer",
                    f"the state {kind!r} of {name} is not sharded like the parameter",
                    "use an optimizer whose state is sharded like the parameters",
                )
            tensors[f"{kind}/{name}"] = value
    return tensors


def describe_optimizer(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return the state of the optimizer except its tensors: the options of its parameter groups and other values."""
    names = {id(tensor): name for name, tensor in named_tensors(model).items()}
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        unknown = [parameter for parameter in group["params"] if id(parameter) not in names]
        if unknown:
            raise UserError(
                "optimizer",
                "has parameters that do not belong to the model",
                "create the optimizer after the model is sharded",
            )
        options = {
            key: value.item() if isinstance(value, Tensor) else value for key, value in group.items() if key != "params"
        }
        groups.append({**options, "params": [names[id(parameter)] for parameter in group["params"]]})
    values = {
        names[id(parameter)]: {kind: value for kind, value in state.items() if not isinstance(value, Tensor)}
        for parameter, state in optimizer.state.items()
    }
    described = {"groups": groups, "values": values}
    check_json(described, "optimizer")
    return described


def load_optimizer(model: nn.Module, optimizer: Optimizer, described: dict[str, Any], reader: Reader) -> None:
    """Load a saved state into an optimizer.

    `described` holds the saved values that are not tensors, and `reader` reads the saved tensors. `described` must name
    the same parameters as the optimizer's groups, in the same order.
    """
    parameters = named_tensors(model)
    state: dict[int, dict[str, Any]] = {}
    groups = []
    for group, saved in zip(optimizer.param_groups, described["groups"], strict=True):
        options = {key: value for key, value in group.items() if key != "params"}
        for key, value in saved.items():
            if key != "params" and key not in IMPLEMENTATION:
                options[key] = _like(value, options.get(key))
        first = len(state)
        for name in saved["params"]:
            state[len(state)] = dict(described["values"].get(name, {}))
        groups.append({**options, "params": list(range(first, len(state)))})
    numbers = {name: number for number, name in enumerate(n for group in described["groups"] for n in group["params"])}
    for key, about in reader.tensors.items():
        if key.startswith("optimizer/"):
            _, kind, name = key.split("/", 2)
            parameter, dtype = parameters[name], DTYPE_OF[about["dtype"]]
            is_sharded = kind != "step" and about["shape"][:-1] == list(parameter.shape)[:-1]
            value = (
                sharded_like(parameter, about["shape"], dtype)
                if is_sharded
                else torch.empty(about["shape"], dtype=dtype)
            )
            reader.fill(key, local_part(value), local_region(value))
            state[numbers[name]][kind] = value.detach()
    filled = {number: values for number, values in state.items() if values}
    optimizer.load_state_dict({"state": filled, "param_groups": groups})
    # `load_state_dict` casts the state to the dtype of the parameters. Restore the states that had another dtype.
    for name, number in numbers.items():
        own = optimizer.state.get(parameters[name], {})
        for kind, value in filled.get(number, {}).items():
            if isinstance(value, Tensor) and own[kind].dtype != value.dtype:
                own[kind] = value


def _like(value: Any, current: Any) -> Any:
    """Convert an optimizer option that was read from JSON to the type of its `current` value, e.g. a list to a
    tuple.
    """
    if isinstance(current, Tensor):
        return torch.full_like(current, value)
    return tuple(value) if isinstance(current, tuple) else value
