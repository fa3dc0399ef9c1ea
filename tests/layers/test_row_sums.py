"""Sums of forward graphs with `rollout.exact` are PyTorch's own; the graphs compute the same otherwise."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from padfree.layers.compile import InductorPass
from padfree.layers.passes.row_sums import row_sums_pass

OPS = torch.ops.padfree


def route(logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The operators of a router, and other reductions."""
    weights, choices = logits.softmax(-1, dtype=torch.float32).topk(2)
    weights = weights / weights.sum(-1, keepdim=True)
    counts = (choices[..., None] == torch.arange(4)).sum((0, 1))
    return weights.to(logits.dtype), choices, counts, logits.mean(0) + logits.sum((0, 1))


def aten_graph(logits: Tensor) -> fx.GraphModule:
    """The graph as the compiler decomposes it."""
    return make_fx(route, decomposition_table=select_decomp_table(), tracing_mode="fake")(logits)


def targets(graph: fx.Graph) -> list[str]:
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_sum_of_rounded_numbers_is_left_to_the_compiler(dtype: torch.dtype) -> None:
    logits = torch.randn(13, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    module = aten_graph(logits)
    before = module(logits)
    assert row_sums_pass(module.graph) == 4  # softmax, weights, mean, sum
    module.graph.lint()
    module.recompile()
    after = targets(module.graph)
    assert sum(target.startswith("padfree.row_sum") for target in after) == 3
    assert sum(target.startswith("padfree.row_mean") for target in after) == 1
    assert sum(target.startswith("aten.sum") for target in after) == 1  # the counts are integers
    for found, expected in zip(module(logits), before, strict=True):
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("exact", "backward", "replaced"), [(True, False, 3), (True, True, 0), (False, False, 0)])
def test_only_forward_graphs_of_exact_layers_are_changed(exact: bool, backward: bool, replaced: int) -> None:
    module = aten_graph(torch.randn(13, 4))
    if backward:
        next(iter(module.graph.nodes)).name = "tangents_1"
    InductorPass("after autograd", epilogues=False, exact=exact)(module.graph)
    assert sum(target.startswith("padfree.row_sum") for target in targets(module.graph)) == replaced


@pytest.mark.parametrize("operator", [OPS.row_sum.default, OPS.row_mean.default])
@pytest.mark.parametrize("keepdim", [False, True])
def test_the_operators_are_what_the_compiler_requires(operator: torch._ops.OpOverload, keepdim: bool) -> None:
    x = torch.randn(5, 3, 7).transpose(0, 1).bfloat16()
    for dims, dtype in (([-1], None), ([0, 2], torch.float32)):
        torch.library.opcheck(operator, (x, dims, keepdim, dtype))
        name = str(operator).split("_")[1].split(".")[0]
        expected = getattr(x, name)(dims, keepdim=keepdim, dtype=dtype)
        torch.testing.assert_close(operator(x, dims, keepdim, dtype), expected)
