"""Replace sums and means in a layer's forward graph by operators that always call PyTorch's own kernels.

The compiler may sum in a different order in each graph. PyTorch's kernels do not. Example:

    weights / weights.sum(-1)     becomes   weights / row_sum(weights, -1)

`row_sums_pass` runs after autograd, and only with `rollout.exact`. It leaves out maxima, and sums of integers: their
results do not depend on the order.
"""

from __future__ import annotations

import torch
from torch import fx

import padfree.layers.ops.row_sums  # noqa: F401 (the operators)


def row_sums_pass(graph: fx.Graph) -> int:
    """Replace each sum and mean of floating-point numbers by padfree's operator. Return the number of changes."""
    operators = {
        torch.ops.aten.sum.dim_IntList: torch.ops.padfree.row_sum.default,
        torch.ops.aten.mean.dim: torch.ops.padfree.row_mean.default,
    }
    count = 0
    for node in list(graph.nodes):
        if node.target not in operators or not node.meta["val"].dtype.is_floating_point:
            continue
        x, *rest = node.args
        dims = rest[0] if rest and rest[0] else list(range(x.meta["val"].ndim))
        keepdim = rest[1] if len(rest) > 1 else node.kwargs.get("keepdim", False)
        with graph.inserting_before(node):
            new = graph.call_function(operators[node.target], (x, list(dims), keepdim, node.kwargs.get("dtype")))
        new.meta.update(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        count += 1
    return count
