"""Operators whose bits for a token do not depend on the other tokens of the call, on a CPU (`rollout.exact`).

An expert gets few tokens in a decode step and many in a pack, and a library sums the inputs of a matmul in another
order if there are few rows. `experts_forward` therefore multiplies blocks of `BLOCK_ROWS` rows. Every call has the same
shape. Rows without a token are zero:

    choices [T, k]    0 2 | 2 1 | 2 0          rows of expert 0: tokens 0 2, of expert 1: token 1, of expert 2: 0 1 2
    blocks of 4       0 2 . . | 1 . . . | 0 1 2 .

The results of the k experts of a token are added in the order of its choices.

A linear layer with a single output is computed as one with `BLOCK_ROWS` outputs, of which the last ones are zero,
because libraries multiply a matrix by a vector in another way.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from padfree.model.stacked_experts import stacked_experts

BLOCK_ROWS = 16
"""The number of rows of a matmul of an expert, and the least number of outputs of a linear layer."""


def use_block_matmuls(model: nn.Module) -> None:
    """Let the stacked experts and the linear layers with a single output use the operators of this module, in place."""
    for module in stacked_experts(model):
        object.__setattr__(module, "forward", partial(experts_forward, module))
    widen_narrow_layers(model)


def widen_narrow_layers(model: nn.Module) -> None:
    """Let the linear layers with a single output use `narrow_forward`, in place."""
    for module in model.modules():
        if is_narrow(module):
            object.__setattr__(module, "forward", partial(narrow_forward, module))


def is_narrow(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and module.out_features == 1


def narrow_forward(module: nn.Module, x: Tensor) -> Tensor:
    """Compute a linear layer with one output as one with `BLOCK_ROWS` outputs, of which only the first is used."""
    own: Any = module
    weight = functional.pad(own.weight, (0, 0, 0, BLOCK_ROWS - 1))
    result = functional.linear(x, weight)[..., :1]
    return result if own.bias is None else result + own.bias


def experts_forward(module: nn.Module, hidden: Tensor, choices: Tensor, weights: Tensor) -> Tensor:
    """Compute stacked experts in blocks of rows: hidden [T, D], choices [T, k] and weights [T, k] give [T, D].
    Differentiable.
    """
    own: Any = module
    num_choices = choices.shape[1]
    experts, order = torch.sort(choices.reshape(-1), stable=True)
    sizes = torch.bincount(experts, minlength=own.num_experts).tolist()
    linear = partial(linear_in_blocks, sizes=sizes, transposed=own.is_transposed)
    first, bias = ("gate_up_proj", "gate_up_proj_bias") if own.has_gate else ("up_proj", "up_proj_bias")
    rows = linear(hidden[order // num_choices], getattr(own, first), getattr(own, bias) if own.has_bias else None)
    rows = own._apply_gate(rows) if own.has_gate else own.act_fn(rows)
    rows = linear(rows, own.down_proj, own.down_proj_bias if own.has_bias else None)
    if getattr(own, "has_post_expert_norm", False):
        rows = own.post_expert_norm(rows)
    chosen = rows[torch.argsort(order)].view(*choices.shape, -1) * weights[..., None]
    total = chosen[:, 0]
    for number in range(1, num_choices):
        total = total + chosen[:, number]
    return total.to(hidden.dtype)


def linear_in_blocks(rows: Tensor, weight: Tensor, bias: Tensor | None, sizes: list[int], transposed: bool) -> Tensor:
    """Multiply rows [R, K], sorted by expert, with the weight [E, N, K] of their expert; return [R, N].

    `sizes` are the numbers of rows of the E experts. If `transposed` is True, the weight is [E, K, N].
    """
    parts: list[Tensor] = []
    biases = [None] * len(sizes) if bias is None else bias.unbind(0)
    for own, matrix, added in zip(torch.split_with_sizes(rows, sizes), weight.unbind(0), biases, strict=True):
        padded = functional.pad(own, (0, 0, 0, -len(own) % BLOCK_ROWS))
        blocks = torch.split_with_sizes(padded, [BLOCK_ROWS] * (len(padded) // BLOCK_ROWS))
        results = [functional.linear(block, matrix.T if transposed else matrix, added) for block in blocks]
        if results:
            parts.append(torch.cat(results)[: len(own)])
    return torch.cat(parts)
