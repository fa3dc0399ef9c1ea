"""What passes over a layer's graph ask of its nodes."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq


def arguments(node: fx.Node) -> tuple[Any, ...]:
    return node.args


def erase(graph: fx.Graph, node: fx.Node) -> None:
    """Take out a node that nobody asks for, and whatever nobody asks for then."""
    if node.users or node.op in ("placeholder", "get_attr", "output"):
        return
    inputs = node.all_input_nodes
    graph.erase_node(node)
    for each in inputs:
        erase(graph, each)


def same_sizes(left: Any, right: Any) -> bool:
    return statically_known_true(sym_eq(tuple(left), tuple(right)))


def is_plain_sum(node: fx.Node) -> bool:
    """Of two different tensors of one type and shape."""
    if node.target is not torch.ops.aten.add.Tensor or node.kwargs or len(set(node.args)) != 2:
        return False
    total = node.meta["val"]
    parts = [arg.meta["val"] for arg in node.args if isinstance(arg, fx.Node)]
    return len(parts) == 2 and all(part.dtype == total.dtype and same_sizes(part.shape, total.shape) for part in parts)
