"""Matmuls of stacked experts for `rollout.exact` on a GPU: the bits of a token do not depend on the other tokens.

Each token is paired with its k experts. The pairs are sorted by expert, and one `grouped_matmul` multiplies all pairs.
padfree tests on the device that the bits of a pair do not depend on the other pairs (`row_trial`).

No shape depends on the routing, so CUDA graphs can capture the operators.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from padfree.model.block_matmuls import use_block_matmuls, widen_narrow_layers
from padfree.model.expert_adapters import grouped_matmul
from padfree.model.stacked_experts import stacked_experts


def use_exact_matmuls(model: nn.Module, device: torch.device) -> None:
    """Make the result for a token independent of the other tokens of the call. The model is changed in place.

    This changes stacked experts, and linear layers with a single output. On a CPU, `padfree.model.block_matmuls` is
    used.
    """
    if device.type == "cpu":
        use_block_matmuls(model)
        return
    for module in stacked_experts(model):
        object.__setattr__(module, "forward", partial(experts_forward, module))
    widen_narrow_layers(model)


def experts_forward(module: nn.Module, hidden: Tensor, choices: Tensor, weights: Tensor) -> Tensor:
    """Compute stacked experts: hidden [T, D], choices [T, k] and weights [T, k] give [T, D]. Differentiable."""
    own: Any = module
    experts, order = torch.sort(choices.reshape(-1), stable=True)
    numbers = torch.arange(own.num_experts, device=experts.device, dtype=experts.dtype)
    ends = torch.searchsorted(experts, numbers, right=True, out_int32=True)  # [E] where the rows of each expert end

    def linear(rows: Tensor, name: str) -> Tensor:
        weight = getattr(own, name)
        result = grouped_matmul(rows, weight if own.is_transposed else weight.mT, ends)
        return result + getattr(own, f"{name}_bias")[experts] if own.has_bias else result

    rows = linear(hidden[order // choices.shape[1]], "gate_up_proj" if own.has_gate else "up_proj")
    rows = linear(own._apply_gate(rows) if own.has_gate else own.act_fn(rows), "down_proj")
    if getattr(own, "has_post_expert_norm", False):
        rows = own.post_expert_norm(rows)
    first, *others = (rows[torch.argsort(order)].view(*choices.shape, -1) * weights[..., None]).unbind(1)
    total = first.float()  # sum in the order of the choices
    for chosen in others:
        total = total + chosen
    return total.to(hidden.dtype)
