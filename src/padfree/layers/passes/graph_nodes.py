"""Functions that examine and replace the nodes of a layer's graph.

A node's fake tensor is in `meta["example_value"]` before autograd and in `meta["val"]` after it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq

KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""The dtypes that padfree's kernels support."""


def arguments(node: fx.Node) -> tuple[Any, ...]:
    return node.args


def is_call(node: Any, target: Any, users: int | None = 1) -> bool:
    """Return whether a node calls `target` and exactly `users` other nodes read its result. If `users` is None, any
    number of nodes may read it.
    """
    if not isinstance(node, fx.Node) or node.target != target:
        return False
    op = "call_method" if isinstance(target, str) else "call_function"
    return node.op == op and (users is None or len(node.users) == users)


def only_user(node: Any) -> Any:
    """Return the only node that reads the result of `node`, or None if no node or several nodes read it."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def example(node: Any) -> Tensor | None:
    """Return the fake tensor of a node in a Dynamo graph, or None if the node's result is not a tensor."""
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value if isinstance(value, Tensor) else None


def same_sizes(left: Any, right: Any) -> bool:
    return statically_known_true(sym_eq(tuple(left), tuple(right)))


def is_plain_add(node: fx.Node) -> bool:
    """Return whether an AOTAutograd node adds two different tensors of the same dtype and shape as the result."""
    if node.target is not torch.ops.aten.add.Tensor or node.kwargs or len(set(node.args)) != 2:
        return False
    total = node.meta["val"]
    parts = [arg.meta["val"] for arg in node.args if isinstance(arg, fx.Node)]
    return len(parts) == 2 and all(part.dtype == total.dtype and same_sizes(part.shape, total.shape) for part in parts)


def replace(graph: fx.Graph, old: fx.Node, new: fx.Node) -> None:
    """Replace the node `old` by `new`, and erase nodes whose results are no longer read."""
    old.replace_all_uses_with(new)
    erase(graph, old)


def replace_before_autograd(graph: fx.Graph, old: fx.Node, new: fx.Node) -> None:
    """Replace the node `old` of a Dynamo graph by `new`, and copy the metadata of `old` to `new`."""
    new.meta = dict(old.meta)
    replace(graph, old, new)


def erase(graph: fx.Graph, node: fx.Node) -> None:
    """Erase a node whose result is not read, and its inputs that no other node reads."""
    if node.users or node.op in ("placeholder", "get_attr", "output"):
        return
    inputs = node.all_input_nodes
    graph.erase_node(node)
    for each in inputs:
        erase(graph, each)
