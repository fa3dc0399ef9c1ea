"""Replace RMSNorm in a layer's graph by the operators of `padfree.layers.ops.rms_norm`.

`rms_norm_pass` runs before autograd, and replaces norms whose result is read by a matmul. Other norms are left to the
compiler, which can fuse a norm with an addition.

`rms_norm_backward_pass` runs after autograd, and removes the additions before and after an rms_norm_backward:

    rms_norm_backward([d1 + d2 + d3], ..) + other     becomes   rms_norm_backward([d1, d2, d3], .., residual=other)
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import fx

import padfree.layers.ops.rms_norm  # noqa: F401 (the operators)
from padfree.layers.matmuls import is_matmul
from padfree.layers.passes.graph_nodes import (
    KERNEL_DTYPES,
    arguments,
    erase,
    example,
    is_call,
    is_plain_add,
    replace_before_autograd,
    same_sizes,
)

RESHAPES = ("view", "reshape", "flatten")
MAX_SUMMANDS = 3
"""The maximum number of upstream gradients per rms_norm_backward, which adds them up."""


# Before autograd


class RMSNorm(NamedTuple):
    """The torch.fx nodes of one RMSNorm of x: [1, T, D], or [1, T, H, d] for a QK-norm."""

    x: fx.Node
    weight: fx.Node
    eps: float
    result: fx.Node


def rms_norm_pass(graph: fx.Graph, *, every: bool = False) -> int:
    """Replace RMSNorms before a matmul (or all, with `every`) by padfree's operators. Returns the number replaced."""
    count = 0
    for node in list(graph.nodes):
        norm = match_rms_norm(node)  # match inside the loop, because x may be the sum of a norm that was just replaced
        if norm is None or _num_dims(norm.x) != 3 or not (every or _reaches_matmul(norm.result)):
            continue
        count += 1
        if _is_residual_add(norm.x):
            _insert_add_rms_norm(graph, norm)
        else:
            _insert_rms_norm(graph, norm)
    return count


def match_rms_norm(rsqrt: fx.Node) -> RMSNorm | None:
    """Return the RMSNorm that the node `rsqrt` is part of, or None."""
    if not is_call(rsqrt, torch.rsqrt):
        return None
    shifted: Any = rsqrt.args[0]
    if not is_call(shifted, operator.add) or not isinstance(shifted.args[1], float):
        return None
    mean, eps = shifted.args
    if not is_call(mean, "mean") or mean.args[1:] != (-1,) or mean.kwargs != {"keepdim": True}:
        return None
    square = mean.args[0]
    if not is_call(square, "pow") or square.args[1:] != (2,):
        return None
    wide = square.args[0]
    if not is_call(wide, "to", users=2) or wide.args[1:] != (torch.float32,):
        return None
    (scaled,) = rsqrt.users
    if not is_call(scaled, operator.mul) or set(scaled.args) != {wide, rsqrt}:
        return None
    return _match_weight(wide.args[0], scaled, eps)


def _match_weight(x: fx.Node, scaled: fx.Node, eps: float) -> RMSNorm | None:
    """Return the RMSNorm if the node `scaled` (the normalised x) is multiplied by a weight, or None."""
    (second,) = scaled.users
    rounded_first = is_call(second, "to")
    if not rounded_first and not is_call(second, operator.mul):
        return None
    (result,) = second.users
    weighted, rounded, factor = (result, second, second) if rounded_first else (second, result, scaled)
    if not is_call(weighted, operator.mul, users=None) or not is_call(rounded, "to", users=None):
        return None
    others: list[Any] = [arg for arg in weighted.args if arg is not factor]
    if len(others) != 1 or not isinstance(others[0], fx.Node) or others[0].op not in ("placeholder", "get_attr"):
        return None
    weight = others[0]
    states, numbers = example(x), example(weight)
    if states is None or numbers is None or states.ndim not in (3, 4) or states.dtype not in KERNEL_DTYPES:
        return None
    if rounded.args[1:] != (states.dtype,) or numbers.dtype != states.dtype:
        return None
    if not same_sizes(numbers.shape, states.shape[-1:]):
        return None
    return RMSNorm(x, weight, eps, result)


def _num_dims(node: fx.Node) -> int:
    value = example(node)
    return 0 if value is None else value.ndim


def _reaches_matmul(node: fx.Node) -> bool:
    """Return whether a matmul reads the result of a node, possibly reshaped."""
    for user in node.users:
        if is_matmul(user.target, "before autograd"):
            return True
        if user.op == "call_method" and user.target in RESHAPES and _reaches_matmul(user):
            return True
    return False


def _is_residual_add(x: fx.Node) -> bool:
    """Return whether an RMSNorm's input x is a sum of two hidden states, and another node also reads x."""
    if not is_call(x, operator.add, users=None) or len(x.users) < 2:
        return False
    total, *parts = (example(node) for node in (x, *x.args))
    assert total is not None
    return all(part is not None and part.dtype == total.dtype and same_sizes(part.shape, total.shape) for part in parts)


def _insert_rms_norm(graph: fx.Graph, norm: RMSNorm) -> None:
    with graph.inserting_before(norm.result):
        call = graph.call_function(torch.ops.padfree.rms_norm.default, (norm.x, norm.weight, norm.eps))
        y = graph.call_function(operator.getitem, (call, 0))
    replace_before_autograd(graph, norm.result, y)


def _insert_add_rms_norm(graph: fx.Graph, norm: RMSNorm) -> None:
    with graph.inserting_before(norm.x):
        call = graph.call_function(torch.ops.padfree.add_rms_norm.default, (*norm.x.args, norm.weight, norm.eps))
        y = graph.call_function(operator.getitem, (call, 0))
        total = graph.call_function(operator.getitem, (call, 1))
    replace_before_autograd(graph, norm.result, y)
    replace_before_autograd(graph, norm.x, total)


# After autograd


def rms_norm_backward_pass(graph: fx.Graph) -> int:
    """Remove the additions before and after each rms_norm_backward. The operator adds the summands instead: they become
    its arguments `dys` and `residual`.

    Returns the number of rms_norm_backward nodes.
    """
    nodes = graph.find_nodes(op="call_function", target=torch.ops.padfree.rms_norm_backward.default)
    for node in nodes:
        _fold_summands(graph, node)
        _fold_residual(graph, node)
        # The compiler takes strides from `eager_input_vals`, and drops an argument without a value there.
        node.meta["eager_input_vals"] = (fx.map_arg(node.args, lambda arg: arg.meta["val"]), {})
    return len(nodes)


def _fold_summands(graph: fx.Graph, node: fx.Node) -> None:
    dys, x = arguments(node)[:2]
    summands: list[Any] = list(dys)
    while len(summands) < MAX_SUMMANDS:
        found = [(index, add) for index, dy in enumerate(summands) if (add := _source_add(dy, x))]
        if not found:
            break
        index, add = found[0]
        summands[index : index + 1] = add.args
    node.update_arg(0, summands)
    for dy in dys:
        erase(graph, dy)


def _source_add(node: Any, x: fx.Node) -> fx.Node | None:
    """Return the add whose result, possibly reshaped, is `node`.

    Return None if there is no such add, or if another node also reads its result.
    """
    aten = torch.ops.aten
    while len(node.users) == 1 and node.target in (aten.view.default, aten.reshape.default):
        node = node.args[0]
        if not same_sizes(node.meta["val"].shape[-1:], x.meta["val"].shape[-1:]):
            return None
    return node if len(node.users) == 1 and is_plain_add(node) else None


def _fold_residual(graph: fx.Graph, node: fx.Node) -> None:
    # `found` holds the node of dx. It is empty if only the weight's gradient is needed.
    found = [user for user in node.users if user.args[1] == 0]
    if arguments(node)[4] is not None or len(found) != 1 or len(found[0].users) != 1:
        return
    (dx,) = found
    (add,) = dx.users
    if not is_plain_add(add):
        return
    (other,) = (arg for arg in arguments(add) if arg is not dx)
    if node < other:
        return
    node.update_arg(4, other)
    add.replace_all_uses_with(dx)
    graph.erase_node(add)
