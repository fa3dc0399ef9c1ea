"""Finds the norms of hidden states in a layer's graph, and what backward adds around them.

Before autograd, in the graph of a layer as it is written (`replace_norms`):

    x.to(float32) -> pow(2) -> mean -> + eps -> rsqrt -> · -> to(bfloat16) -> weight ·     becomes   rms_norm
    a + b -> the same, and a + b is used elsewhere as well                                 becomes   add_rms_norm

if the row [1, T, D] has as many columns as the weight, and the result goes into a matrix product, so that it is
written to memory anyway. Norms of heads, and those whose result is only rotated or added to something, are left to the
compiler, which computes them together with what comes next.

After autograd, in the backward graph (`GatherGradients`):

    rms_norm_backward([d1 + d2 + d3], ..) + other     becomes   rms_norm_backward([d1, d2, d3], .., residual=other)

where nobody else asks for the sums. The compiler's own passes come later.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq

import padfree.train.norms  # noqa: F401 (the operators)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
RESHAPES = ("view", "reshape", "flatten")
MAX_SUMMANDS = 3
"""Gradients of y that the kernel reads at a time."""


AS_WRITTEN = False
"""Whether hidden states are rounded before the product with the weight, too, where the module has it so. The compiler
computes such a chain in float32 and rounds its end alone, which is nearer to exact results: so do we."""


# Before autograd


class _Norm(NamedTuple):
    x: fx.Node
    weight: fx.Node
    eps: float
    rounded: bool
    result: fx.Node


def replace_norms(graph: fx.Graph, products: Collection[Any]) -> int:
    """Put the operators where the norms are; how many they were. `products` are the matrix products of the graph."""
    norms = [norm for node in graph.nodes if (norm := _match(node)) and _reaches(norm.result, products)]
    for norm in norms:
        if _is_stream(norm.x):
            _insert_with_sum(graph, norm)
        else:
            _insert(graph, norm)
    return len(norms)


def _match(rsqrt: fx.Node) -> _Norm | None:
    """The norm around `rsqrt`, if it is one."""
    if rsqrt.op != "call_function" or rsqrt.target is not torch.rsqrt or len(rsqrt.users) != 1:
        return None
    shifted, scaled = rsqrt.args[0], next(iter(rsqrt.users))
    if not _is_call(shifted, operator.add) or not isinstance(shifted.args[1], float):
        return None
    mean = shifted.args[0]
    if not _is_call(mean, "mean") or mean.args[1:] != (-1,) or mean.kwargs != {"keepdim": True}:
        return None
    square = mean.args[0]
    if not _is_call(square, "pow") or square.args[1:] != (2,):
        return None
    wide = square.args[0]
    if not _is_call(wide, "to", users=2) or wide.args[1:] != (torch.float32,):
        return None
    if not _is_call(scaled, operator.mul) or set(scaled.args) != {wide, rsqrt}:
        return None
    return _match_end(wide.args[0], scaled, shifted.args[1])


def _match_end(x: Any, scaled: fx.Node, eps: float) -> _Norm | None:
    """The product with the weight, and the rounding before or after it."""
    row = _value(x)
    if row is None or row.ndim != 3 or row.dtype not in DTYPES:
        return None
    second = next(iter(scaled.users))
    rounded = _is_call(second, "to")
    result = next(iter(second.users))
    product, rounding = (result, second) if rounded else (second, result)
    if product.target is not operator.mul or not _is_call(rounding, "to", users=None):
        return None
    if rounding.args[1:] != (row.dtype,) or (second if rounded else scaled) not in product.args:
        return None
    (weight,) = (arg for arg in product.args if arg is not (second if rounded else scaled))
    value = _value(weight)
    if value is None or weight.op not in ("placeholder", "get_attr"):
        return None
    if value.dtype != row.dtype or value.ndim != 1 or not _same(value.shape, row.shape[-1:]):
        return None
    return _Norm(x, weight, eps, rounded, result)


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
    return all(part is not None and part.dtype == total.dtype and _same(part.shape, total.shape) for part in parts)


def _insert(graph: fx.Graph, norm: _Norm) -> None:
    with graph.inserting_before(norm.result):
        arguments = (norm.x, norm.weight, norm.eps, norm.rounded and AS_WRITTEN)
        call = graph.call_function(torch.ops.padfree.rms_norm.default, arguments)
        y = graph.call_function(operator.getitem, (call, 0))
    _replace(graph, norm.result, y)


def _insert_with_sum(graph: fx.Graph, norm: _Norm) -> None:
    a, b = norm.x.args
    with graph.inserting_before(norm.x):
        arguments = (a, b, norm.weight, norm.eps, norm.rounded and AS_WRITTEN)
        call = graph.call_function(torch.ops.padfree.add_rms_norm.default, arguments)
        y = graph.call_function(operator.getitem, (call, 0))
        total = graph.call_function(operator.getitem, (call, 1))
    _replace(graph, norm.result, y)
    _replace(graph, norm.x, total)


def _replace(graph: fx.Graph, old: fx.Node, new: fx.Node) -> None:
    """Let `new` be asked for in place of `old`, and take out whatever nobody asks for then."""
    new.meta = dict(old.meta)
    old.replace_all_uses_with(new)
    _erase(graph, old)


def _erase(graph: fx.Graph, node: fx.Node) -> None:
    if node.users or node.op in ("placeholder", "get_attr", "output"):
        return
    inputs = node.all_input_nodes
    graph.erase_node(node)
    for each in inputs:
        _erase(graph, each)


def _same(left: Any, right: Any) -> bool:
    return statically_known_true(sym_eq(tuple(left), tuple(right)))


# After autograd


class GatherGradients(CustomGraphPass):  # type: ignore[misc]
    """A pass of inductor's over each graph after autograd."""

    def __call__(self, graph: fx.Graph) -> None:
        gather(graph)

    def uuid(self) -> bytes:
        """What the compiler's caches know this pass by."""
        return get_hash_for_files((__file__,))


def gather(graph: fx.Graph) -> None:
    """Give the backward of each norm the gradients that would be added up before it, and the one after it."""
    backward = torch.ops.padfree.rms_norm_backward.default
    for node in graph.find_nodes(op="call_function", target=backward):
        _take_summands(graph, node)
        _take_residual(graph, node)
        # The compiler gives each argument the strides of its example in here, and drops those that have none.
        node.meta["eager_input_vals"] = (fx.map_arg(node.args, lambda arg: arg.meta["val"]), {})


def _take_summands(graph: fx.Graph, node: fx.Node) -> None:
    before: list[fx.Node] = list(node.args[0])  # type: ignore[arg-type]
    summands = list(before)
    width = node.args[1].meta["val"].shape[-1]  # type: ignore[union-attr]
    while len(summands) < MAX_SUMMANDS:
        found = [(place, total) for place, dy in enumerate(summands) if (total := _sum_behind(dy, width))]
        if not found:
            break
        place, total = found[0]
        summands[place : place + 1] = total.args  # type: ignore[assignment]
    node.update_arg(0, summands)
    for each in before:
        _erase(graph, each)


def _sum_behind(node: fx.Node, width: int) -> fx.Node | None:
    """The sum of which `node` is the only use, perhaps in another shape with as many columns."""
    aten = torch.ops.aten
    while len(node.users) == 1 and node.target in (aten.view.default, aten.reshape.default):
        node = node.args[0]  # type: ignore[assignment]
        if not _same(node.meta["val"].shape[-1:], (width,)):
            return None
    return node if len(node.users) == 1 and _is_plain_sum(node) else None


def _take_residual(graph: fx.Graph, node: fx.Node) -> None:
    (dx,) = (user for user in node.users if user.args[1] == 0)
    if node.args[4] is not None or len(dx.users) != 1:
        return
    total = next(iter(dx.users))
    if not _is_plain_sum(total):
        return
    (other,) = (arg for arg in total.args if arg is not dx)
    if not other < node:  # type: ignore[operator]
        return  # it comes later than the norm
    node.update_arg(4, other)
    total.replace_all_uses_with(dx)
    graph.erase_node(total)


def _is_plain_sum(node: fx.Node) -> bool:
    """Of two different tensors of one type and shape."""
    if node.target is not torch.ops.aten.add.Tensor or node.kwargs or len(set(node.args)) != 2:
        return False
    total, *parts = (arg.meta["val"] if isinstance(arg, fx.Node) else None for arg in (node, *node.args))
    return all(
        isinstance(part, Tensor) and part.dtype == total.dtype and _same(part.shape, total.shape) for part in parts
    )
