"""The registry of the functions that count as matmuls in a layer's graphs.

    before autograd   a linear layer is one node: `linear`, or `float8_linear` with `parallel.linear = "float8"`
    after autograd    a matmul is one node: aten's, `float8_matmul`, or a matmul with an epilogue

Graph passes and recompute rules call `is_matmul`. A new kind of matmul is added only here;
`tests/layers/test_matmuls.py` fails if one is missing.
"""

from __future__ import annotations

import operator
from typing import Any, Literal

import torch
from torch import fx, nn

import padfree.layers.ops.float8_linear
import padfree.layers.ops.matmul_epilogues  # noqa: F401 (the operators)

Stage = Literal["before autograd", "after autograd"]

_ATEN, _PADFREE = torch.ops.aten, torch.ops.padfree

MATMULS: dict[Stage, tuple[Any, ...]] = {
    "before autograd": (
        nn.functional.linear,
        torch._C._nn.linear,
        torch.addmm,
        torch.mm,
        torch.matmul,
        operator.matmul,
        _PADFREE.float8_linear.default,
    ),
    "after autograd": (
        _ATEN.mm.default,
        _ATEN.addmm.default,
        _ATEN.bmm.default,
        _PADFREE.float8_matmul.default,
        _PADFREE.matmul_add.default,
        _PADFREE.matmul_swiglu.default,
        _PADFREE.matmul_swiglu_backward.default,
        _PADFREE.matmul_swiglu_backward_.default,
    ),
}


def is_matmul(target: Any, stage: Stage) -> bool:
    """Return whether the function `target` of a graph node is a matmul. `stage` says if the graph is before or after
    autograd.
    """
    return target in MATMULS[stage]


def matmuls_of(graph: fx.Graph, stage: Stage) -> list[fx.Node]:
    """Return the nodes of a graph that are matmuls, in the order of the graph."""
    return [node for node in graph.nodes if node.op == "call_function" and is_matmul(node.target, stage)]
