"""Rules that decide on which mesh a parameter is sharded. They are ordered; the first rule that matches applies.

    rules = [Rule("experts", lambda place: place.role == "expert", mesh.over(shard=("shard",), replicate=("context",))),
             everything_over(mesh.fsdp)]

A rule places a parameter on a mesh of one dimension, which it is sharded over, or of two: replicated over the first,
sharded over the second. `dim` is the dimension of the tensor that is cut. FSDP2 gathers the parameters of a module
together. Therefore a module becomes an FSDP2 unit of its own if none of its parameters matches the last rule, and it is
refused if its parameters match rules with different meshes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from padfree.model.roles import Role, roles_of


class ParameterPlace(NamedTuple):
    """A parameter, where it is and what it is: what a rule decides by."""

    module: nn.Module
    name: str  # in its module
    parameter: nn.Parameter
    role: Role


class Rule(NamedTuple):
    """Parameters that it `applies` to are sharded over `mesh` along their dimension `dim`."""

    name: str
    applies: Callable[[ParameterPlace], bool]
    mesh: DeviceMesh
    dim: int = 0


def everything_over(mesh: DeviceMesh) -> Rule:
    """The rule that stands last: rows over all ranks that share one set of weights."""
    return Rule("fsdp", lambda _: True, mesh)


def rules_by_module(model: nn.Module, rules: Sequence[Rule]) -> dict[nn.Module, Rule]:
    """The rule of every module that has parameters of its own."""
    roles, found = roles_of(model), dict[nn.Module, Rule]()
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            place = ParameterPlace(module, name, parameter, roles[parameter])
            rule = next(rule for rule in rules if rule.applies(place))
            other = found.setdefault(module, rule)
            assert other is rule, f"{path}.{name} follows the rule {rule.name!r}, its module {other.name!r}"
    return found
