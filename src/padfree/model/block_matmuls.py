"""CPU operators that give a token bitwise the same result, whatever other tokens are in the call (`rollout.exact`).

Matmul libraries choose the order of summation by the shape of a matmul. `experts_forward` therefore multiplies blocks
of `BLOCK_ROWS` rows, and fills up the last block with zeros. For example, an expert with 5 tokens and blocks of 4 rows
computes two blocks. The second block has one token and 3 rows of zeros.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from padfree.model.stacked_experts import stacked_experts

BLOCK_ROWS = 16
"""The number of tokens per matmul of an expert. A linear layer with one output is padded to as many outputs."""


def use_block_matmuls(model: nn.Module) -> None:
    """Make the result for a token independent of the other tokens of the call, in stacked experts and in linear layers
    that have a single output. The forward of these modules is replaced.
    """
    for module in stacked_experts(model):
        object.__setattr__(module, "forward", partial(experts_forward, module))
    widen_narrow_layers(model)


def widen_narrow_layers(model: nn.Module) -> None:
    """Make linear layers with one output feature use `narrow_forward`."""
    for module in model.modules():
        if is_narrow(module):
            object.__setattr__(module, "forward", partial(narrow_forward, module))


def is_narrow(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and module.out_features == 1


def narrow_forward(module: nn.Module, x: Tensor) -> Tensor:
    """Compute a linear layer with one output: pad its weight with zeros to `BLOCK_ROWS` outputs, and keep the first."""
    # Libraries use a different algorithm for the product of a matrix and a vector, so compute several outputs.
    own: Any = module
    weight = functional.pad(own.weight, (0, 0, 0, BLOCK_ROWS - 1))
    result = functional.linear(x, weight)[..., :1]
    return result if own.bias is None else result + own.bias


def experts_forward(module: nn.Module, hidden: Tensor, choices: Tensor, weights: Tensor) -> Tensor:
    """Compute the outputs [T, D] of a layer's experts, with matmuls over blocks of `BLOCK_ROWS` tokens. Differentiable.

    `hidden` [T, D] are the inputs, `choices` [T, k] the experts of each token, and `weights` [T, k] the factors of
    their outputs.
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
    total = chosen[:, 0]  # sum in the order of the choices
    for number in range(1, num_choices):
        total = total + chosen[:, number]
    return total.to(hidden.dtype)


def linear_in_blocks(rows: Tensor, weight: Tensor, bias: Tensor | None, sizes: list[int], transposed: bool) -> Tensor:
    """Multiply rows [R, K], sorted by expert, with the matrices of their experts. Returns [R, N].

    `sizes` [E] holds the number of rows of each expert. `weight` is [E, N, K], or [E, K, N] if `transposed` is True.
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
