"""Finds the norms in a layer's graph, and what backward adds around them.

Before autograd, in the graph of a layer as it is written (`replace_norms`):

    x.to(float32) -> pow(2) -> mean -> + eps -> rsqrt -> · -> to(bfloat16) -> weight ·     becomes   rms_norm
    a + b -> the same, and a + b is used elsewhere as well                                 becomes   add_rms_norm

if the row [1, T, D] has as many columns as the weight, and the result goes into a matrix product, so that it is
written to memory anyway. Those whose result is only added to something are left to the compiler, which computes them
together with what comes next. Of heads [1, T, H, d]

    the same -> transpose -> t · cos + cat(-t[d/2:], t[:d/2]) · sin                        becomes   rotated_rms_norm

After autograd, in the backward graph (`gather`):

    rms_norm_backward([d1 + d2 + d3], ..) + other     becomes   rms_norm_backward([d1, d2, d3], .., residual=other)

where nobody else asks for the sums. The compiler's own passes come later.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

import padfree.layers.ops.qk_norm_rope  # noqa: F401 (the operators)
from padfree.layers.passes.nodes import arguments, erase, is_plain_sum, same_sizes

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
RESHAPES = ("view", "reshape", "flatten")
MAX_SUMMANDS = 3
"""Gradients of y that the kernel reads at a time."""


# Before autograd


class _Norm(NamedTuple):
    x: fx.Node
    weight: fx.Node
    eps: float
    result: fx.Node


def replace_norms(graph: fx.Graph, products: Collection[Any]) -> int:
    """Put the operators where the norms are; how many they were. `products` are the matrix products of the graph."""
    count = 0
    for node in list(graph.nodes):
        norm = _match(node)  # not before the others are replaced: it may have their sum for x
        if norm is None:
            continue
        if _dimensions(norm.x) == 4:
            count += _insert_rotated(graph, norm)
        elif _reaches(norm.result, products):
            count += 1
            if _is_stream(norm.x):
                _insert_with_sum(graph, norm)
            else:
                _insert(graph, norm)
    return count


def _match(rsqrt: fx.Node) -> _Norm | None:
    """The norm around `rsqrt`, if it is one."""
    if not _is_call(rsqrt, torch.rsqrt):
        return None
    shifted: Any = rsqrt.args[0]
    if not _is_call(shifted, operator.add) or not isinstance(shifted.args[1], float):
        return None
    mean, eps = shifted.args
    if not _is_call(mean, "mean") or mean.args[1:] != (-1,) or mean.kwargs != {"keepdim": True}:
        return None
    square = mean.args[0]
    if not _is_call(square, "pow") or square.args[1:] != (2,):
        return None
    wide = square.args[0]
    if not _is_call(wide, "to", users=2) or wide.args[1:] != (torch.float32,):
        return None
    (scaled,) = rsqrt.users
    if not _is_call(scaled, operator.mul) or set(scaled.args) != {wide, rsqrt}:
        return None
    return _match_end(wide.args[0], scaled, eps)


def _match_end(x: fx.Node, scaled: fx.Node, eps: float) -> _Norm | None:
    """The product with the weight, and the rounding before or after it."""
    (second,) = scaled.users
    rounded_first = _is_call(second, "to")
    if not rounded_first and not _is_call(second, operator.mul):
        return None
    (result,) = second.users
    product, rounding, factor = (result, second, second) if rounded_first else (second, result, scaled)
    if not _is_call(product, operator.mul, users=None) or not _is_call(rounding, "to", users=None):
        return None
    others: list[Any] = [arg for arg in product.args if arg is not factor]
    if len(others) != 1 or not isinstance(others[0], fx.Node) or others[0].op not in ("placeholder", "get_attr"):
        return None
    weight = others[0]
    row, numbers = _value(x), _value(weight)
    if row is None or numbers is None or row.ndim not in (3, 4) or row.dtype not in DTYPES:
        return None
    if rounding.args[1:] != (row.dtype,) or numbers.dtype != row.dtype or not same_sizes(numbers.shape, row.shape[-1:]):
        return None
    return _Norm(x, weight, eps, result)


def _is_call(node: Any, target: Any, users: int | None = 1) -> bool:
    """A call of a function, or of a method by its name, whose result is used so often."""
    if not isinstance(node, fx.Node) or node.target != target:
        return False
    op = "call_method" if isinstance(target, str) else "call_function"
    return node.op == op and (users is None or len(node.users) == users)


def _value(node: Any) -> Tensor | None:
    """The tensor without data that stands for the result of a node before autograd."""
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value if isinstance(value, Tensor) else None


def _dimensions(node: fx.Node) -> int:
    value = _value(node)
    return 0 if value is None else value.ndim


def _reaches(node: fx.Node, products: Collection[Any]) -> bool:
    """Whether a result goes into a matrix product, perhaps in another shape."""
    for user in node.users:
        if user.target in products:
            return True
        if user.op == "call_method" and user.target in RESHAPES and _reaches(user, products):
            return True
    return False


def _is_stream(x: fx.Node) -> bool:
    """The sum of two hidden states that somebody besides the norm asks for."""
    if not _is_call(x, operator.add, users=None) or len(x.users) < 2:
        return False
    total, *parts = (_value(node) for node in (x, *x.args))
    assert total is not None
    return all(part is not None and part.dtype == total.dtype and same_sizes(part.shape, total.shape) for part in parts)


def _insert(graph: fx.Graph, norm: _Norm) -> None:
    with graph.inserting_before(norm.result):
        arguments = (norm.x, norm.weight, norm.eps)
        call = graph.call_function(torch.ops.padfree.rms_norm.default, arguments)
        y = graph.call_function(operator.getitem, (call, 0))
    _replace(graph, norm.result, y)


def _insert_with_sum(graph: fx.Graph, norm: _Norm) -> None:
    with graph.inserting_before(norm.x):
        arguments = (*norm.x.args, norm.weight, norm.eps)
        call = graph.call_function(torch.ops.padfree.add_rms_norm.default, arguments)
        y = graph.call_function(operator.getitem, (call, 0))
        total = graph.call_function(operator.getitem, (call, 1))
    _replace(graph, norm.result, y)
    _replace(graph, norm.x, total)


class _Rotation(NamedTuple):
    cos: fx.Node
    sin: fx.Node
    result: fx.Node


def _match_rotation(norm: _Norm) -> _Rotation | None:
    """The rotation of [1, H, T, d] by angles [1, T, d] that is all a norm of heads [1, T, H, d] is used for."""
    heads: Any = _only_user(norm.result)
    if not _is_call(heads, "transpose", users=3) or heads.args[1:] != (1, 2):
        return None
    row = _value(norm.x)
    assert row is not None
    half = row.shape[-1] // 2
    parts = [user for user in heads.users if _is_call(user, operator.getitem)]
    low = [part for part in parts if part.args[1] == (..., slice(None, half, None))]
    high = [part for part in parts if part.args[1] == (..., slice(half, None, None))]
    straight = [user for user in heads.users if _is_call(user, operator.mul)]
    if not len(low) == len(high) == len(straight) == 1 or 2 * half != row.shape[-1]:
        return None
    negative, turned = _only_user(high[0]), _only_user(low[0])
    if not _is_call(negative, operator.neg) or not _is_call(turned, torch.cat):
        return None
    if turned.args[0] != (negative, low[0]) and turned.args[0] != [negative, low[0]]:
        return None
    if turned.kwargs != {"dim": -1} or len(turned.args) != 1:
        return None
    crossed, result = _only_user(turned), _only_user(straight[0])
    if not _is_call(crossed, operator.mul) or not _is_call(result, operator.add, users=None):
        return None
    if set(result.args) != {straight[0], crossed}:
        return None
    cos, sin = _angles(straight[0], heads, row), _angles(crossed, turned, row)
    return None if cos is None or sin is None else _Rotation(cos, sin, result)


def _angles(product: fx.Node, factor: fx.Node, row: Tensor) -> fx.Node | None:
    """What `factor` is multiplied with, before it got a dimension for the heads."""
    others: list[Any] = [arg for arg in product.args if arg is not factor]
    if len(others) != 1 or not _is_call(others[0], "unsqueeze", users=None) or others[0].args[1:] != (1,):
        return None
    angles: fx.Node = others[0].args[0]
    value = _value(angles)
    if value is None or value.requires_grad or value.dtype != row.dtype:
        return None
    if not same_sizes(value.shape, (*row.shape[:2], row.shape[3])):
        return None
    return angles


def _only_user(node: Any) -> Any:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _insert_rotated(graph: fx.Graph, norm: _Norm) -> bool:
    """Whether the norm of heads is followed by a rotation, and is replaced together with it."""
    rotation = _match_rotation(norm)
    if rotation is None:
        return False
    with graph.inserting_before(rotation.result):
        arguments = (norm.x, norm.weight, rotation.cos, rotation.sin, norm.eps)
        call = graph.call_function(torch.ops.padfree.rotated_rms_norm.default, arguments)
        y = graph.call_function(operator.getitem, (call, 0))
        heads = graph.call_method("transpose", (y, 1, 2))
    _replace(graph, rotation.result, heads)
    return True


def _replace(graph: fx.Graph, old: fx.Node, new: fx.Node) -> None:
    """Let `new` be asked for in place of `old`, and take out whatever nobody asks for then."""
    new.meta = dict(old.meta)
    old.replace_all_uses_with(new)
    erase(graph, old)


# After autograd


def gather(graph: fx.Graph) -> None:
    """Give the backward of each norm the gradients that would be added up before it, and the one after it."""
    backward = torch.ops.padfree.rms_norm_backward.default
    for node in graph.find_nodes(op="call_function", target=backward):
        _take_summands(graph, node)
        _take_residual(graph, node)
        # The compiler gives each argument the strides of its example in here, and drops those that have none.
        node.meta["eager_input_vals"] = (fx.map_arg(node.args, lambda arg: arg.meta["val"]), {})


def _take_summands(graph: fx.Graph, node: fx.Node) -> None:
    dys, x = arguments(node)[:2]
    summands: list[Any] = list(dys)
    while len(summands) < MAX_SUMMANDS:
        found = [(place, total) for place, dy in enumerate(summands) if (total := _sum_behind(dy, x))]
        if not found:
            break
        place, total = found[0]
        summands[place : place + 1] = total.args
    node.update_arg(0, summands)
    for dy in dys:
        erase(graph, dy)


def _sum_behind(node: Any, x: fx.Node) -> fx.Node | None:
    """The sum of which `node` is the only use, perhaps in another shape with as many columns as x."""
    aten = torch.ops.aten
    while len(node.users) == 1 and node.target in (aten.view.default, aten.reshape.default):
        node = node.args[0]
        if not same_sizes(node.meta["val"].shape[-1:], x.meta["val"].shape[-1:]):
            return None
    return node if len(node.users) == 1 and is_plain_sum(node) else None


def _take_residual(graph: fx.Graph, node: fx.Node) -> None:
    found = [user for user in node.users if user.args[1] == 0]  # none if only the weight's gradient is asked for
    if arguments(node)[4] is not None or len(found) != 1 or len(found[0].users) != 1:
        return
    (dx,) = found
    (total,) = dx.users
    if not is_plain_sum(total):
        return
    (other,) = (arg for arg in arguments(total) if arg is not dx)
    if node < other:
        return
    node.update_arg(4, other)
    total.replace_all_uses_with(dx)
    graph.erase_node(total)
