"""Find the modules that hold all experts of a layer as stacked weights.

    experts(hidden [T, D], choices [T, k], weights [T, k]) -> [T, D]        as in transformers
    experts.gate_up_proj    [E, 2 I, D]
    experts.down_proj       [E, D, I]

transformers computes modules with stacked experts through its `ExpertsInterface`. Every parameter of such a module,
biases included, has one entry per expert in dimension 0. Experts that are a list of modules, or that a model computes
in another way, are not found.
"""

from __future__ import annotations

from torch import nn

from padfree.model.routers import routers_of


def stacked_experts(model: nn.Module) -> list[nn.Module]:
    """Return the modules that hold all experts of a layer as stacked weights, in the order of the model's modules."""
    return [module for module in model.modules() if _is_stacked(module)]


def _is_stacked(module: nn.Module) -> bool:
    count = getattr(module, "num_experts", None)
    own = [parameter for parameter in module._parameters.values() if parameter is not None]
    dispatched = hasattr(module, "is_transposed") and hasattr(module, "has_gate")  # set by use_experts_implementation
    return dispatched and bool(own) and all(each.ndim >= 2 and each.shape[0] == count for each in own)


def undivided(model: nn.Module, expert: int, shards: int) -> str | None:
    """Return the reason why the experts of this model cannot be divided over `expert` ranks, or None if they can.

    The experts are divided into `expert` parts, and FSDP2 shards each part over `shards` ranks.
    """
    name, found = type(model).__name__, stacked_experts(model)
    if not found:
        how = "computes its experts in another way than transformers' ExpertsInterface"
        return f"{name} {how if routers_of(model) else 'has no experts'}"
    for module in found:
        count = int(module.num_experts)  # type: ignore[arg-type]
        if count % expert:
            return f"{expert} does not divide the {count} experts of {name}"
        for parameter_name, parameter in module._parameters.items():
            if parameter is not None and all(size % shards for size in parameter.shape[1:]):
                shape = list(parameter.shape)
                return f"{parameter_name} {shape} cannot be sharded: no size after the first is a multiple of {shards}"
    return None
