"""Low-rank adapters on routers and on stacked experts (E experts whose weights are one tensor).

    experts.gate_up_proj          [E, out, in]    frozen; [E, in, out] in gpt-oss
    experts.lora_A.gate_up_proj   [E, rank, in]   trained
    experts.lora_B.gate_up_proj   [E, out, rank]  trained

`_experts_forward` replaces the forward of the experts. It computes what transformers' `grouped_mm` computes, plus the
adapters, for every `experts_implementation`.

The forward of a router with an adapter reads W + scale * B A in place of its weight W [E, D].
"""

from __future__ import annotations

from collections.abc import Iterable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.integrations.moe import _grouped_mm

ALIGNMENT = 16
"""The strides of the arguments of `torch.nn.functional.grouped_mm` must be multiples of this many bytes."""


class ExpertMatrices(nn.Module):
    """The adapter matrices A (or B) of all experts of a layer: one stacked tensor for each weight that has adapters."""

    def __init__(self, shapes: dict[str, tuple[int, int, int]]) -> None:
        super().__init__()
        self.num_experts = next(iter(shapes.values()))[0]
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, device="meta")))


def stacked_weights(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the stacked weights in `module` that can have adapters.

    The result is empty if `module` does not hold stacked experts.
    """
    experts: Any = module
    if not all(hasattr(experts, name) for name in ("num_experts", "has_gate", "has_bias", "is_transposed")):
        return ()
    return ("gate_up_proj" if experts.has_gate else "up_proj", "down_proj")


def has_expert_adapters(module: nn.Module) -> bool:
    return isinstance(getattr(module, "lora_A", None), ExpertMatrices)


def adapt_experts(experts: Any, names: tuple[str, ...], *, rank: int, scale: float, dropout: float) -> None:
    """Add low-rank adapters, on the meta device, to the stacked weights `names` of a module of experts."""
    read, written = (1, 2) if experts.is_transposed else (2, 1)
    weights = {name: getattr(experts, name) for name in names}
    experts.lora_A = ExpertMatrices({name: (len(each), rank, each.shape[read]) for name, each in weights.items()})
    experts.lora_B = ExpertMatrices({name: (len(each), each.shape[written], rank) for name, each in weights.items()})
    experts.lora_scale, experts.lora_dropout = scale, dropout
    object.__setattr__(experts, "forward", MethodType(_experts_forward, experts))


def adapt_router(router: Any, *, adapter: str, rank: int, scale: float) -> None:
    """Add an adapter to the weight of a router, on the meta device. The adapter's parameters are named as in PEFT's
    layers.
    """
    # no dropout: dropout applies to inputs, and this adapter is only added to the weight
    num_experts, width = router.weight.shape
    router.lora_A = nn.ModuleDict({adapter: nn.Linear(width, rank, bias=False, device="meta")})
    router.lora_B = nn.ModuleDict({adapter: nn.Linear(rank, num_experts, bias=False, device="meta")})
    router.scaling, router.fan_in_fan_out = {adapter: scale}, False
    object.__setattr__(router, "forward", MethodType(_router_forward, router))


def _router_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    ((adapter, scale),) = self.scaling.items()
    weight = self.weight
    added = self.lora_B[adapter].weight @ self.lora_A[adapter].weight
    self._parameters["weight"] = weight + (added * scale).to(weight.dtype)
    try:
        return type(self).forward(self, *args, **kwargs)
    finally:
        self._parameters["weight"] = weight


def merged_weight(experts: Any, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return the stacked `weight` plus the scaled product of the adapters `a` [E, rank, in] and `b` [E, out, rank].

    The result has the dtype of `weight`.
    """
    a, b = a.to(weight.dtype), b.to(weight.dtype)
    left, right = (a.mT, b.mT) if experts.is_transposed else (b, a)
    return torch.baddbmm(weight, left, right, alpha=experts.lora_scale)


def _experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Return the outputs [T, D] of the experts for hidden states [T, D], chosen experts [T, k] and weights [T, k]."""
    num_tokens, per_token = top_k_index.shape
    # Sort the tokens by expert, once for all matmuls. Expert e ends at offsets[e].
    chosen, order = torch.sort(top_k_index.reshape(-1))
    experts = torch.arange(self.num_experts, device=chosen.device)
    offsets = torch.searchsorted(chosen, experts, right=True).to(torch.int32)

    def project(name: str, x: Tensor) -> Tensor:
        weight = getattr(self, name)
        y: Tensor = grouped_matmul(x, weight if self.is_transposed else weight.mT, offsets)
        if self.has_bias:
            y = y + getattr(self, f"{name}_bias")[chosen]
        a, b = getattr(self.lora_A, name, None), getattr(self.lora_B, name, None)
        if a is None or b is None:
            return y
        if self.lora_dropout:
            x = functional.dropout(x, self.lora_dropout, self.training)
        return y + low_rank(x, a.to(x.dtype), b.to(x.dtype), offsets, scale=self.lora_scale)

    x = hidden_states[order // per_token]
    up, down = stacked_weights(self)
    x = project(up, x)
    x = project(down, self._apply_gate(x) if self.has_gate else self.act_fn(x))
    if getattr(self, "has_post_expert_norm", False):
        x = self.post_expert_norm(x)
    x = x * top_k_weights.reshape(-1)[order, None]
    y: Tensor = x[torch.argsort(order)].view(num_tokens, per_token, -1).sum(1)
    return y.to(hidden_states.dtype)


def low_rank(x: Tensor, a: Tensor, b: Tensor, offsets: Tensor, *, scale: float = 1.0) -> Tensor:
    """Apply the low-rank adapters `a` [E, rank, in] and `b` [E, out, rank] of E experts to tokens `x` [S, in].

    The tokens are sorted by expert: expert e has the tokens from offsets[e - 1] to offsets[e]. Returns [S, out]."""
    # The kernels need aligned strides. Pad the rank with zeros, which do not change the result.
    if fill := -a.shape[1] % (ALIGNMENT // a.element_size()):
        a, b = functional.pad(a, (0, 0, 0, fill)), functional.pad(b, (0, fill))
    return grouped_matmul(grouped_matmul(x, a.mT, offsets) * scale, b.mT, offsets)


def grouped_matmul(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Multiply tokens [S, in], sorted by expert, with the matrices [E, in, out] of their experts. Returns [S, out].

    Expert e has the tokens from offsets[e - 1] to offsets[e].
    """
    if has_grouped_kernel(weight.shape[1:], x.dtype):
        y: Tensor = _grouped_mm(x, weight, offsets)
    else:
        y = torch.ops.transformers.grouped_mm_fallback(x.to(weight.dtype), weight, offsets)
    return y


def has_grouped_kernel(sizes: Iterable[int], dtype: torch.dtype) -> bool:
    """Return whether there is a grouped kernel for matrices of the size `sizes`."""
    return dtype != torch.float64 and not any(size % (ALIGNMENT // dtype.itemsize) for size in sizes)
