"""Finds the gated activation in a layer's graph, and lets its backward write over what it has read.

Before autograd (`replace_gated`):

    silu(gate) · up     where both are matrix products                     becomes   swiglu

After autograd, in a backward graph that computes gate and up again (`overwrite`):

    act = swiglu(gate, up)    ...    dgate, dup = swiglu_backward(dact, gate, up)

becomes swiglu_backward_(dact, gate, up), after which they are act, dgate and dup. What needs act moves behind it.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import fx

import padfree.layers.ops.swiglu  # noqa: F401 (the operators)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def replace_gated(graph: fx.Graph, products: Collection[Any]) -> int:
    """Put the operator where the activations are; how many they were. `products` are the graph's matrix products."""
    count = 0
    for silu in list(graph.nodes):
        if silu.target is not torch.nn.functional.silu or len(silu.users) != 1:
            continue
        gate, (product,) = silu.args[0], silu.users
        others = [arg for arg in product.args if arg is not silu]
        if product.target is not operator.mul or len(others) != 1:
            continue
        (up,) = others
        if not all(isinstance(node, fx.Node) and node.target in products for node in (gate, up)):
            continue
        values = [node.meta.get("example_value") for node in (gate, up)]
        if any(value is None or value.dtype not in DTYPES for value in values) or values[0].dtype != values[1].dtype:
            continue
        with graph.inserting_before(product):
            act = graph.call_function(torch.ops.padfree.swiglu.default, (gate, up))
        act.meta = dict(product.meta)
        product.replace_all_uses_with(act)
        graph.erase_node(product)
        graph.erase_node(silu)
        count += 1
    return count


def overwrite(graph: fx.Graph) -> None:
    """Compute act, dgate and dup in place of dact, gate and up, where nobody else needs these."""
    for backward in graph.find_nodes(op="call_function", target=torch.ops.padfree.swiglu_backward.default):
        dact, gate, up = backward.args
        forward = graph.find_nodes(op="call_function", target=torch.ops.padfree.swiglu.default)
        again = [node for node in forward if node.args == (gate, up)]
        if len(again) != 1 or not (_is_free(dact, 1) and _is_free(gate, 2) and _is_free(up, 2)):
            continue
        (act,) = again
        later = _between(graph, act, backward)
        if backward in later:
            continue
        with graph.inserting_before(backward):
            call = graph.call_function(torch.ops.padfree.swiglu_backward_.default, (dact, gate, up))
        call.meta["val"] = None
        call.meta["eager_input_vals"] = (tuple(arg.meta["val"] for arg in (dact, gate, up)), {})
        place = call
        for node in later:
            place.append(node)
            place = node
        act.replace_all_uses_with(dact)
        for part in list(backward.users):
            part.replace_all_uses_with((gate, up)[part.args[1]])
            graph.erase_node(part)
        graph.erase_node(backward)
        graph.erase_node(act)


def _is_free(node: fx.Node, num_users: int) -> bool:
    """Whether a tensor is computed in this graph, perhaps in another shape, and used only so often."""
    if len(node.users) != num_users:
        return False
    while node.target in (torch.ops.aten.view.default, torch.ops.aten.reshape.default):
        node = node.args[0]  # type: ignore[assignment]
        if len(node.users) != 1:
            return False
    return node.op == "call_function"


def _between(graph: fx.Graph, first: fx.Node, last: fx.Node) -> list[fx.Node]:
    """What depends on `first` and comes before `last`, in order; with `last` if that depends on it, too."""
    found: set[fx.Node] = {first}
    nodes = list(graph.nodes)
    for node in nodes[nodes.index(first) + 1 : nodes.index(last) + 1]:
        if any(each in found for each in node.all_input_nodes):
            found.add(node)
    return [node for node in nodes if node in found and node is not first]
