"""Puts products with epilogues into a layer's graphs, after autograd.

    swiglu(gate, a·b)                       becomes   mm_swiglu(a, b, gate)             `fuse`
    swiglu_backward(a·b, gate, up)          becomes   mm_swiglu_backward(a, b, ..)
    a·b + c                                 becomes   mm_add(a, b, c)

where nobody else asks for the product, and nothing else is added. (The `up` of mm_swiglu is a result as well: backward
wants it.) In a backward graph that computes gate and up again, nobody needs them after that:

    mm_swiglu_backward(a, b, gate, up)      becomes   mm_swiglu_backward_               `overwrite`
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

import padfree.layers.ops.matmul_epilogues  # noqa: F401 (the operators)
from padfree.layers.ops.quack_support import is_whole
from padfree.layers.passes.nodes import arguments, erase, is_plain_sum

ATEN = torch.ops.aten
RESHAPES = (ATEN.view.default, ATEN.reshape.default, ATEN.unsqueeze.default)


class _Product(NamedTuple):
    a: fx.Node
    b: fx.Node


def fuse(graph: fx.Graph) -> None:
    for node in graph.find_nodes(op="call_function", target=torch.ops.padfree.swiglu.default):
        _fuse_forward(graph, node)
    for node in graph.find_nodes(op="call_function", target=torch.ops.padfree.swiglu_backward.default):
        _fuse_backward(graph, node)
    for node in graph.find_nodes(op="call_function", target=ATEN.add.Tensor):
        _fuse_sum(graph, node)


def _fuse_forward(graph: fx.Graph, node: fx.Node) -> None:
    gate, up = arguments(node)
    product = _product(up, None)
    if product is None or any(user is not node and user < node for user in up.users):
        return
    with graph.inserting_before(node):
        results = _call(graph, torch.ops.padfree.mm_swiglu.default, (*product, _matrix(graph, gate)), 2)
        for old, new in zip((up, node), results, strict=True):
            _replace(graph, old, _shaped(graph, new, old))


def _fuse_backward(graph: fx.Graph, node: fx.Node) -> None:
    dact, gate, up = arguments(node)
    product = _product(dact, 1)
    if product is None:
        return
    with graph.inserting_before(node):
        matrices = (_matrix(graph, gate), _matrix(graph, up))
        results = _call(graph, torch.ops.padfree.mm_swiglu_backward.default, (*product, *matrices), 2)
        for part in list(node.users):
            _, place = arguments(part)
            _replace(graph, part, _shaped(graph, results[place], part))


def _fuse_sum(graph: fx.Graph, node: fx.Node) -> None:
    parts = arguments(node)
    # The compiler rounds a longer sum once, and not each time something is added.
    if not is_plain_sum(node) or any(each.target is ATEN.add.Tensor for each in (*parts, *node.users)):
        return
    found = [(product, place) for place, part in enumerate(parts) if (product := _product(part, 1))]
    if len(found) != 1:  # of two products, neither is at hand before the other
        return
    ((product, place),) = found
    with graph.inserting_before(node):
        (result,) = _call(graph, torch.ops.padfree.mm_add.default, (*product, _matrix(graph, parts[1 - place])), 1)
        _replace(graph, node, _shaped(graph, result, node))


def overwrite(graph: fx.Graph) -> None:
    """Put dgate and dup in the places of gate and up, where these are computed in this graph and not used again."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.padfree.mm_swiglu_backward.default):
        _, _, gate, up = arguments(node)
        if not _is_free(gate, node) or not _is_free(up, node):
            continue
        with graph.inserting_before(node):
            call = graph.call_function(torch.ops.padfree.mm_swiglu_backward_.default, node.args)
        call.meta["val"] = None
        call.meta["eager_input_vals"] = (tuple(arg.meta["val"] for arg in arguments(node)), {})
        for part in list(node.users):
            _, place = arguments(part)
            part.replace_all_uses_with((gate, up)[place])
            graph.erase_node(part)
        graph.erase_node(node)


def _is_free(matrix: fx.Node, node: fx.Node) -> bool:
    """Whether a matrix is computed in this graph, and nobody besides `node` uses it but the product before."""
    if matrix.target not in (ATEN.mm.default, operator.getitem):
        return False
    others = [user for user in matrix.users if user is not node and (user.users or user.op != "call_function")]
    return all(user.target is torch.ops.padfree.mm_swiglu.default for user in others)


# The nodes


def _product(node: fx.Node, num_users: int | None) -> _Product | None:
    """The factors, if a row is a product, perhaps in another shape, and used only so often."""
    row = node.meta["val"]
    if (num_users is not None and len(node.users) != num_users) or not _is_row(row):
        return None
    while node.target in RESHAPES:
        node = node.args[0]  # type: ignore[assignment]
        if len(node.users) != 1:
            return None
    if node.target is not ATEN.mm.default:
        return None
    a, b = arguments(node)
    inner, columns = a.meta["val"].shape[1], b.meta["val"].shape[1]
    return _Product(a, b) if columns == row.shape[-1] and is_whole(inner) and is_whole(columns) else None


def _is_row(value: Tensor) -> bool:
    """[T, N] or [1, T, N]"""
    return value.ndim == 2 or (value.ndim == 3 and value.shape[0] == 1)


def _matrix(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """A row as [T, N]."""
    value = node.meta["val"]
    if value.ndim == 2:
        return node
    if node.target in RESHAPES:
        source: Any = node.args[0]
        if source.meta["val"].ndim == 2 and source.meta["val"].shape[1] == value.shape[2]:
            return source  # type: ignore[no-any-return]
    matrix = graph.call_function(ATEN.squeeze.dim, (node, 0))
    matrix.meta["val"] = value.squeeze(0)
    return matrix


def _shaped(graph: fx.Graph, matrix: fx.Node, like: fx.Node) -> fx.Node:
    """A matrix in the shape of another node's result."""
    if like.meta["val"].ndim == 2:
        return matrix
    shaped = graph.call_function(ATEN.unsqueeze.default, (matrix, 0))
    shaped.meta["val"] = matrix.meta["val"].unsqueeze(0)
    return shaped


def _call(graph: fx.Graph, target: Any, args: tuple[fx.Node, ...], num_results: int) -> list[fx.Node]:
    """A call with what the compiler wants to know of it, and its results."""
    values = tuple(arg.meta["val"] for arg in args)
    call = graph.call_function(target, args)
    call.meta["val"] = target(*values)
    call.meta["eager_input_vals"] = (values, {})
    if num_results == 1:
        return [call]
    results = [graph.call_function(operator.getitem, (call, place)) for place in range(num_results)]
    for result, value in zip(results, call.meta["val"], strict=True):
        result.meta["val"] = value
    return results


def _replace(graph: fx.Graph, old: fx.Node, new: fx.Node) -> None:
    old.replace_all_uses_with(new)
    erase(graph, old)
