"""Shard a model with FSDP2: one unit per layer and per block of a vision tower, and a root unit for everything else.

Modules with a sharding rule of their own, such as experts divided over ranks, are separate units inside their layer.
Gradients are summed over ranks and not averaged, because token weights contain the global normaliser.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard
from transformers import PreTrainedModel

from padfree.distributed import Mesh
from padfree.model.structure import layers_of, tower_blocks
from padfree.sharding.experts import divide_experts
from padfree.sharding.rules import Rule, rules_by_module, shard_everything


def shard_model(
    model: PreTrainedModel,
    mesh: Mesh,
    dtype: torch.dtype,
    *,
    reshard: bool = True,
    offload: bool = False,
    rules: Sequence[Rule] = (),
    recompute_experts: bool = False,
) -> None:
    """Shard a model over all data and context ranks with FSDP2.

    `rules`: sharding rules for parameters that are sharded over another mesh. `recompute_experts`: with expert
    parallelism, recompute the activations of experts in backward.
    """
    lower = dtype != torch.float32
    # Inputs keep their dtype. Otherwise FSDP2 would round the token weights and log-probabilities of the batch.
    precision = (
        MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        if lower
        else MixedPrecisionPolicy()
    )
    offload_policy = CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda") if offload else OffloadPolicy()
    if lower:
        for parameter in model.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(dtype)
    if mesh.experts is not None:
        rules = (*divide_experts(model, mesh.experts, recompute=recompute_experts), *rules)
    common: dict[str, Any] = {"mp_policy": precision, "offload_policy": offload_policy}
    last = shard_everything(mesh.fsdp)
    for module, rule in rules_by_module(model, (*rules, last)).items():
        if rule is not last:
            cut = partial(_shard_along, rule=rule)
            fully_shard(module, mesh=rule.mesh, reshard_after_forward=reshard, shard_placement_fn=cut, **common)
    for layer in (*layers_of(model), *tower_blocks(model)):
        fully_shard(layer, mesh=last.mesh, reshard_after_forward=reshard, **common)
    fully_shard(model, mesh=last.mesh, **common)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo supports no other reduction


def _shard_along(parameter: nn.Parameter, rule: Rule) -> Shard:
    return Shard(rule.dim_of(parameter))
