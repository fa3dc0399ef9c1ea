"""Rules that decide on which mesh a parameter is sharded. The first rule that matches applies.

    rules = [Rule("experts", lambda info: info.role == "expert", mesh.over(shard=("shard",), replicate=("context",))),
             shard_everything(mesh.fsdp)]

A rule shards dimension `dim` of a parameter over a mesh. A mesh with two dimensions replicates over the first and
shards over the second. If `split` is set, dimension 0 of the parameter is first divided over another mesh, and each
rank computes only with its own part (`padfree.sharding.experts`).

All parameters of a module must match the same rule, because FSDP2 gathers them together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from padfree.model.roles import Role, roles_of


class ParameterInfo(NamedTuple):
    """What a sharding rule is applied to: a parameter, with its module and its role in the model."""

    module: nn.Module
    name: str  # within its module
    parameter: nn.Parameter
    role: Role


class Rule(NamedTuple):
    """A sharding rule: parameters for which the function `applies` returns True are sharded over `mesh` along dimension
    `dim`.
    """

    name: str
    applies: Callable[[ParameterInfo], bool]
    mesh: DeviceMesh
    dim: int = 0
    split: DeviceMesh | None = None  # if set, `mesh` shards the first dimension after 0 that it divides, not `dim`

    def dim_of(self, parameter: nn.Parameter) -> int:
        """Return the dimension along which `parameter` is sharded over `mesh`."""
        if self.split is None:
            return self.dim
        shards = self.mesh.size(self.mesh.ndim - 1)
        found = next((dim for dim in range(1, parameter.ndim) if parameter.shape[dim] % shards == 0), None)
        assert found is not None, (
            f"no dimension of {tuple(parameter.shape)} after the first is a multiple of {shards} ranks"
        )
        return found


def shard_everything(mesh: DeviceMesh) -> Rule:
    """Return a sharding rule that matches every parameter, and shards its dimension 0 over all ranks of `mesh`."""
    return Rule("fsdp", lambda _: True, mesh)


def rules_by_module(model: nn.Module, rules: Sequence[Rule]) -> dict[nn.Module, Rule]:
    """Return, for each module with parameters of its own, the first of `rules` that applies to these parameters."""
    roles, found = roles_of(model), dict[nn.Module, Rule]()
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            info = ParameterInfo(module, name, parameter, roles[parameter])
            rule = next(rule for rule in rules if rule.applies(info))
            other = found.setdefault(module, rule)
            assert other is rule, (
                f"parameter {path}.{name} matches rule {rule.name!r}, but its module uses {other.name!r} for another "
                "parameter"
            )
    return found
