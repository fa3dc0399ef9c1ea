"""Replace SwiGLU in a layer's graph.

`swiglu_pass` runs before autograd:

    silu(gate) · up, both of them results of matmuls                                    becomes   swiglu(gate, up)

`swiglu_overwrite_pass` runs after autograd, and changes backward graphs that recompute gate and up:

    act = swiglu(gate, up)    ...    dgate, dup = swiglu_backward(dact, gate, up)       becomes   swiglu_backward_

The outputs of swiglu_backward_ overwrite its inputs: act is written over dact, dgate over gate and dup over up.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

import padfree.layers.ops.swiglu  # noqa: F401 (the operators)
from padfree.layers.matmuls import is_matmul
from padfree.layers.passes.graph_nodes import KERNEL_DTYPES


def swiglu_pass(graph: fx.Graph) -> int:
    """Replace silu(gate) · up by swiglu. Returns the number of replacements."""
    count = 0
    for silu in list(graph.nodes):
        if silu.target is not torch.nn.functional.silu or len(silu.users) != 1:
            continue
        gate, (gated,) = silu.args[0], silu.users
        others = [arg for arg in gated.args if arg is not silu]
        if gated.target is not operator.mul or len(others) != 1:
            continue
        (up,) = others
        if not all(isinstance(node, fx.Node) and is_matmul(node.target, "before autograd") for node in (gate, up)):
            continue
        values = [node.meta.get("example_value") for node in (gate, up)]
        if any(value is None or value.dtype not in KERNEL_DTYPES for value in values):
            continue
        if values[0].dtype != values[1].dtype:
            continue
        with graph.inserting_before(gated):
            act = graph.call_function(torch.ops.padfree.swiglu.default, (gate, up))
        act.meta = dict(gated.meta)
        gated.replace_all_uses_with(act)
        graph.erase_node(gated)
        graph.erase_node(silu)
        count += 1
    return count


def swiglu_overwrite_pass(graph: fx.Graph) -> int:
    """Let the backward of SwiGLU overwrite its inputs dact, gate and up, if no other node reads them."""
    count = 0
    for backward in graph.find_nodes(op="call_function", target=torch.ops.padfree.swiglu_backward.default):
        dact, gate, up = backward.args
        forward = graph.find_nodes(op="call_function", target=torch.ops.padfree.swiglu.default)
        recomputed = [node for node in forward if node.args == (gate, up)]
        if len(recomputed) != 1 or not (_is_free(dact, 1) and _is_free(gate, 2) and _is_free(up, 2)):
            continue
        (act,) = recomputed
        readers = _dependents(graph, act, backward)
        if backward in readers:
            continue
        with graph.inserting_before(backward):
            call = graph.call_function(torch.ops.padfree.swiglu_backward_.default, (dact, gate, up))
        call.meta["val"] = None
        call.meta["eager_input_vals"] = (tuple(arg.meta["val"] for arg in (dact, gate, up)), {})
        previous = call
        for node in readers:
            previous.append(node)
            previous = node
        act.replace_all_uses_with(dact)
        for part in list(backward.users):
            part.replace_all_uses_with((gate, up)[part.args[1]])
            graph.erase_node(part)
        graph.erase_node(backward)
        graph.erase_node(act)
        count += 1
    return count


def _is_free(node: fx.Node, num_users: int) -> bool:
    """Return whether the tensor of `node` may be overwritten: this graph computes it, and exactly `num_users` nodes
    read it.
    """
    if len(node.users) != num_users:
        return False
    while node.target in (torch.ops.aten.view.default, torch.ops.aten.reshape.default):
        node = node.args[0]  # type: ignore[assignment]
        if len(node.users) != 1:
            return False
    return node.op == "call_function"


def _dependents(graph: fx.Graph, first: fx.Node, last: fx.Node) -> list[fx.Node]:
    """Return the nodes up to `last` that depend on `first`, in the order of the graph."""
    found: set[fx.Node] = {first}
    nodes = list(graph.nodes)
    for node in nodes[nodes.index(first) + 1 : nodes.index(last) + 1]:
        if any(each in found for each in node.all_input_nodes):
            found.add(node)
    return [node for node in nodes if node in found and node is not first]
