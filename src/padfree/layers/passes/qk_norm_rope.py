"""Replace QK-norm followed by RoPE in a layer's graph by the operator qk_norm_rope.

`qk_norm_rope_pass` runs before autograd. `heads` are the query or key heads [1, T, H, d] of T tokens, with H heads of
size d, and cos and sin are [1, T, d]. The pass replaces the nodes of

    t = RMSNorm(heads).transpose(1, 2)
    y = t · cos + cat(-t[.., d/2:], t[.., :d/2]) · sin

by

    y = qk_norm_rope(heads, weight, cos, sin, eps).transpose(1, 2)

It does so only if no other node reads the intermediate results. A QK-norm without RoPE is left to the compiler.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

import padfree.layers.ops.qk_norm_rope  # noqa: F401 (the operators)
from padfree.layers.passes.graph_nodes import example, is_call, only_user, replace_before_autograd, same_sizes
from padfree.layers.passes.rms_norm import RMSNorm, match_rms_norm


class _Rope(NamedTuple):
    cos: fx.Node
    sin: fx.Node
    result: fx.Node


def qk_norm_rope_pass(graph: fx.Graph) -> int:
    """Replace each QK-norm with RoPE by qk_norm_rope. Returns the number of replacements."""
    count = 0
    for node in list(graph.nodes):
        norm = match_rms_norm(node)
        heads = None if norm is None else example(norm.x)
        if norm is None or heads is None or heads.ndim != 4:
            continue
        rope = _match_rope(norm, heads)
        if rope is not None:
            _insert(graph, norm, rope)
            count += 1
    return count


def _match_rope(norm: RMSNorm, heads: Tensor) -> _Rope | None:
    """Return the graph nodes of the RoPE (rotary embedding) after `norm`. Returns None if there is no RoPE, or if
    another node also reads the result of `norm`.
    """
    turned_heads: Any = only_user(norm.result)
    if not is_call(turned_heads, "transpose", users=3) or turned_heads.args[1:] != (1, 2):
        return None
    half = heads.shape[-1] // 2
    parts = [user for user in turned_heads.users if is_call(user, operator.getitem)]
    low = [part for part in parts if part.args[1] == (..., slice(None, half, None))]
    high = [part for part in parts if part.args[1] == (..., slice(half, None, None))]
    straight = [user for user in turned_heads.users if is_call(user, operator.mul)]
    if not len(low) == len(high) == len(straight) == 1 or 2 * half != heads.shape[-1]:
        return None
    negative, rotated = only_user(high[0]), only_user(low[0])
    if not is_call(negative, operator.neg) or not is_call(rotated, torch.cat):
        return None
    if rotated.args[0] != (negative, low[0]) and rotated.args[0] != [negative, low[0]]:
        return None
    if rotated.kwargs != {"dim": -1} or len(rotated.args) != 1:
        return None
    crossed, result = only_user(rotated), only_user(straight[0])
    if not is_call(crossed, operator.mul) or not is_call(result, operator.add, users=None):
        return None
    if set(result.args) != {straight[0], crossed}:
        return None
    cos, sin = _angles(straight[0], turned_heads, heads), _angles(crossed, rotated, heads)
    return None if cos is None or sin is None else _Rope(cos, sin, result)


def _angles(multiplied: fx.Node, factor: fx.Node, heads: Tensor) -> fx.Node | None:
    """Return the node of cos or sin if the node `multiplied` is the product `factor` · cos or `factor` · sin of a RoPE,
    otherwise None.

    cos and sin must have the shape [1, T, d] and the dtype of `heads` [1, T, H, d].
    """
    others: list[Any] = [arg for arg in multiplied.args if arg is not factor]
    if len(others) != 1 or not is_call(others[0], "unsqueeze", users=None) or others[0].args[1:] != (1,):
        return None
    angles: fx.Node = others[0].args[0]
    value = example(angles)
    if value is None or value.requires_grad or value.dtype != heads.dtype:
        return None
    if not same_sizes(value.shape, (*heads.shape[:2], heads.shape[3])):
        return None
    return angles


def _insert(graph: fx.Graph, norm: RMSNorm, rope: _Rope) -> None:
    with graph.inserting_before(rope.result):
        arguments = (norm.x, norm.weight, rope.cos, rope.sin, norm.eps)
        call = graph.call_function(torch.ops.padfree.qk_norm_rope.default, arguments)
        y = graph.call_function(operator.getitem, (call, 0))
        transposed = graph.call_method("transpose", (y, 1, 2))
    replace_before_autograd(graph, rope.result, transposed)
