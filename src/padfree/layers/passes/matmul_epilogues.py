"""Insert matmuls with epilogues into a layer's graphs, after autograd.

`matmul_epilogues_pass` runs before Inductor's own passes:

    swiglu(gate, a·b)                          becomes   matmul_swiglu(a, b, gate)
    swiglu_backward(a·b, gate, up)             becomes   matmul_swiglu_backward(a, b, gate, up)
    a·b + c                                    becomes   matmul_add(a, b, c)

An add is replaced only if it is not part of a longer sum. For matmul_swiglu_backward and matmul_add, no other node may
read the result of the matmul a·b.

`matmul_epilogues_overwrite_pass` runs after Inductor's passes, and changes backward graphs that recompute gate and up:

    matmul_swiglu_backward(a, b, gate, up)     becomes   matmul_swiglu_backward_, which writes over gate and up
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

import padfree.layers.ops.matmul_epilogues  # noqa: F401 (the operators)
from padfree.layers.ops.quack_support import is_whole
from padfree.layers.passes.graph_nodes import arguments, is_plain_add, replace

ATEN = torch.ops.aten
RESHAPES = (ATEN.view.default, ATEN.reshape.default, ATEN.unsqueeze.default)


class _Matmul(NamedTuple):
    a: fx.Node
    b: fx.Node


def matmul_epilogues_pass(graph: fx.Graph) -> int:
    """Fuse matmuls with the operation that reads their result: SwiGLU, the backward of SwiGLU, or an addition.

    Returns the number of changes.
    """
    count = 0
    for target, fuse in (
        (torch.ops.padfree.swiglu.default, _fuse_swiglu),
        (torch.ops.padfree.swiglu_backward.default, _fuse_swiglu_backward),
        (ATEN.add.Tensor, _fuse_add),
    ):
        count += sum(fuse(graph, node) for node in graph.find_nodes(op="call_function", target=target))
    return count


def _fuse_swiglu(graph: fx.Graph, node: fx.Node) -> bool:
    gate, up = arguments(node)
    matmul = _source_matmul(up, None)
    if matmul is None or any(user is not node and user < node for user in up.users):
        return False
    with graph.inserting_before(node):
        results = _call(graph, torch.ops.padfree.matmul_swiglu.default, (*matmul, _matrix(graph, gate)), 2)
        for old, new in zip((up, node), results, strict=True):
            replace(graph, old, _shaped(graph, new, old))
    return True


def _fuse_swiglu_backward(graph: fx.Graph, node: fx.Node) -> bool:
    dact, gate, up = arguments(node)
    matmul = _source_matmul(dact, 1)
    if matmul is None:
        return False
    with graph.inserting_before(node):
        matrices = (_matrix(graph, gate), _matrix(graph, up))
        results = _call(graph, torch.ops.padfree.matmul_swiglu_backward.default, (*matmul, *matrices), 2)
        for part in list(node.users):
            _, index = arguments(part)
            replace(graph, part, _shaped(graph, results[index], part))
    return True


def _fuse_add(graph: fx.Graph, node: fx.Node) -> bool:
    parts = arguments(node)
    # Leave longer sums to the compiler, which rounds them once and not after each add.
    if not is_plain_add(node) or any(each.target is ATEN.add.Tensor for each in (*parts, *node.users)):
        return False
    found = [(matmul, index) for index, part in enumerate(parts) if (matmul := _source_matmul(part, 1))]
    # Exactly one summand must be a matmul. The other one is the argument c, which must already be in memory.
    if len(found) != 1:
        return False
    ((matmul, index),) = found
    with graph.inserting_before(node):
        (result,) = _call(graph, torch.ops.padfree.matmul_add.default, (*matmul, _matrix(graph, parts[1 - index])), 1)
        replace(graph, node, _shaped(graph, result, node))
    return True


def matmul_epilogues_overwrite_pass(graph: fx.Graph) -> int:
    """Let the backward of SwiGLU write over its inputs gate and up, if no node reads them later."""
    count = 0
    for node in graph.find_nodes(op="call_function", target=torch.ops.padfree.matmul_swiglu_backward.default):
        _, _, gate, up = arguments(node)
        if not _is_free(gate, node) or not _is_free(up, node):
            continue
        with graph.inserting_before(node):
            call = graph.call_function(torch.ops.padfree.matmul_swiglu_backward_.default, node.args)
        call.meta["val"] = None
        call.meta["eager_input_vals"] = (tuple(arg.meta["val"] for arg in arguments(node)), {})
        for part in list(node.users):
            _, index = arguments(part)
            part.replace_all_uses_with((gate, up)[index])
            graph.erase_node(part)
        graph.erase_node(node)
        count += 1
    return count


def _is_free(matrix: fx.Node, node: fx.Node) -> bool:
    """Return whether `node` may overwrite the tensor `matrix`. This is allowed if no later node reads it."""
    if matrix.target not in (ATEN.mm.default, operator.getitem):
        return False
    others = [user for user in matrix.users if user is not node and (user.users or user.op != "call_function")]
    return all(user.target is torch.ops.padfree.matmul_swiglu.default for user in others)


# The nodes


def _source_matmul(node: fx.Node, num_users: int | None) -> _Matmul | None:
    """Return the factors a and b if `node` is the result of a matmul a·b, possibly reshaped; otherwise None."""
    value = node.meta["val"]
    if (num_users is not None and len(node.users) != num_users) or not _is_matrix_like(value):
        return None
    while node.target in RESHAPES:
        node = node.args[0]  # type: ignore[assignment]
        if len(node.users) != 1:
            return None
    if node.target is not ATEN.mm.default:
        return None
    a, b = arguments(node)
    inner, columns = a.meta["val"].shape[1], b.meta["val"].shape[1]
    return _Matmul(a, b) if columns == value.shape[-1] and is_whole(inner) and is_whole(columns) else None


def _is_matrix_like(value: Tensor) -> bool:
    """Return whether the shape of a tensor is [T, N] or [1, T, N]."""
    return value.ndim == 2 or (value.ndim == 3 and value.shape[0] == 1)


def _matrix(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Add a node that reshapes the result [T, N] or [1, T, N] of `node` to [T, N]."""
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
    """Add a node that reshapes the result of `matrix` to the shape of the result of `like`."""
    if like.meta["val"].ndim == 2:
        return matrix
    shaped = graph.call_function(ATEN.unsqueeze.default, (matrix, 0))
    shaped.meta["val"] = matrix.meta["val"].unsqueeze(0)
    return shaped


def _call(graph: fx.Graph, target: Any, args: tuple[fx.Node, ...], num_results: int) -> list[fx.Node]:
    """Insert a call of `target`, with metadata for the compiler, and return the nodes of its results."""
    values = tuple(arg.meta["val"] for arg in args)
    call = graph.call_function(target, args)
    call.meta["val"] = target(*values)
    call.meta["eager_input_vals"] = (values, {})
    if num_results == 1:
        return [call]
    results = [graph.call_function(operator.getitem, (call, index)) for index in range(num_results)]
    for result, value in zip(results, call.meta["val"], strict=True):
        result.meta["val"] = value
    return results
