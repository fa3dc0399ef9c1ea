"""MoE experts for decoding, with tensor shapes that do not depend on the router's choice, as CUDA graphs require.

Each of T tokens uses k of E experts, which gives R = T k pairs (token, expert). The pairs are sorted by expert, and
each expert multiplies the tokens of its pairs.

For example, 4 tokens use the experts 0 1, 1 2, 1 0 and 1 2. The sorted pairs are 0 5 (expert 0), 1 2 4 6 (expert 1)
and 3 7 (expert 2).
"""

from __future__ import annotations

import importlib.util
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from padfree.model.stacked_experts import stacked_experts


def all_stacked(model: PreTrainedModel) -> bool:
    """Return True if the model has experts and the weights of all experts of a layer are stacked into one tensor."""
    stacked = set(stacked_experts(model))
    named = [module for name, module in model.named_modules() if name.rpartition(".")[2] == "experts"]
    return bool(stacked) and all(module in stacked for module in named)


def use_decode_experts(model: PreTrainedModel) -> None:
    """Replace the forward method of the model's stacked experts by `experts_forward`, which has no backward pass."""
    for module in stacked_experts(model):
        object.__setattr__(module, "forward", partial(experts_forward, module))


def experts_forward(module: nn.Module, hidden: Tensor, choices: Tensor, weights: Tensor) -> Tensor:
    """Return the output [T, D] of a module of stacked experts, in place of the module's own forward method.

    `hidden` [T, D]: the input. `choices` and `weights` [T, k]: for each token, its k experts and their weights.
    """
    own: Any = module
    top = choices.shape[1]
    order, starts = sorted_rows(choices, own.num_experts)
    first, bias = ("gate_up_proj", "gate_up_proj_bias") if own.has_gate else ("up_proj", "up_proj_bias")
    linear = partial(grouped_linear, order=order, starts=starts, transposed=own.is_transposed)
    rows = linear(hidden, getattr(own, first), getattr(own, bias) if own.has_bias else None, gather=top, scatter=False)
    rows = own._apply_gate(rows) if own.has_gate else own.act_fn(rows)
    rows = linear(rows, own.down_proj, own.down_proj_bias if own.has_bias else None, gather=0, scatter=True)
    if getattr(own, "has_post_expert_norm", False):
        rows = own.post_expert_norm(rows)
    outputs: Tensor = (rows.view(*choices.shape, -1) * weights[..., None]).sum(1).to(hidden.dtype)
    return outputs


def sorted_rows(choices: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Sort the R = T k pairs (token, expert) by expert. `choices` [T, k]: the k experts of each token.

    Return `order` [R], indices into the flattened `choices`, and `starts` [E + 1]. The pairs of expert e are
    `order[starts[e]:starts[e + 1]]`.
    """
    experts, order = torch.sort(choices.reshape(-1), stable=True)
    bounds = torch.arange(num_experts + 1, device=choices.device, dtype=experts.dtype)
    return order, torch.searchsorted(experts, bounds, out_int32=True)


def reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    order: Tensor,
    starts: Tensor,
    gather: int,
    scatter: bool,
    transposed: bool,
) -> Tensor:
    """Compute `grouped_linear` as a loop over the experts, for which the host must read `starts` from the device."""
    rows = x[order // gather] if gather else x
    out = rows.new_empty(len(order), weight.shape[2 if transposed else 1])
    ends = starts.tolist()
    for expert, (start, end) in enumerate(pairwise(ends)):
        if start < end:
            matrix = weight[expert] if transposed else weight[expert].T
            out[start:end] = rows[start:end] @ matrix
            if bias is not None:
                out[start:end] += bias[expert]
    return torch.empty_like(out).index_copy_(0, order, out) if scatter else out


@torch.library.custom_op("padfree::grouped_linear", mutates_args=())
def grouped_linear(
    x: Tensor,  # [R, K] the sorted rows; [T, K] the tokens if `gather` is not 0
    weight: Tensor,  # [E, N, K]; [E, K, N] if `transposed`
    bias: Tensor | None,  # [E, N]
    order: Tensor,  # [R], from `sorted_rows`
    starts: Tensor,  # [E + 1], from `sorted_rows`
    gather: int,  # the number of experts per token, so that sorted row r is x[order[r] // gather]; or 0
    scatter: bool,  # whether the result of sorted row r is at index order[r], and not at r
    transposed: bool,
) -> Tensor:
    """Multiply each of R rows with the weight of its expert. Return [R, N]. A row is a token paired with one of its
    experts.
    """
    if x.is_cuda and x.dtype != torch.float64 and importlib.util.find_spec("triton") is not None:
        from padfree.rollout.engines.in_process.triton_grouped_linear import multiply

        return multiply(x, weight, bias, order, starts, gather, scatter, transposed)
    return reference(x, weight, bias, order, starts, gather, scatter, transposed)


@grouped_linear.register_fake
def _shapes(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    order: Tensor,
    starts: Tensor,
    gather: int,
    scatter: bool,
    transposed: bool,
) -> Tensor:
    return x.new_empty(order.shape[0], weight.shape[2 if transposed else 1])
