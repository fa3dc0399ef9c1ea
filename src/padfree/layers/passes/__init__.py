"""Graph passes, which insert the operators of `padfree.layers.ops` into the graphs of a compiled layer.

For example, these passes replace the nodes to the left of an arrow by the operator to the right:

    swiglu_pass               before autograd    silu(gate) · up     →  swiglu
    matmul_epilogues_pass     after autograd     matmul and swiglu   →  matmul_swiglu

A pass changes a graph in place and returns the number of changes. Passes run in the order of `PASSES`, and match the
results of earlier passes. To add a pass, write a module in this folder and add the pass to `PASSES`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import fx

from padfree.layers.passes.matmul_epilogues import matmul_epilogues_overwrite_pass, matmul_epilogues_pass
from padfree.layers.passes.qk_norm_rope import qk_norm_rope_pass
from padfree.layers.passes.rms_norm import rms_norm_backward_pass, rms_norm_pass
from padfree.layers.passes.row_sums import row_sums_pass
from padfree.layers.passes.swiglu import swiglu_overwrite_pass, swiglu_pass

Stage = Literal["before autograd", "after autograd", "after inductor"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphPass:
    """One graph pass, and the stage of the compilation in which it runs."""

    stage: Stage
    run: Callable[[fx.Graph], int]
    exact_only: bool = False  # whether the pass runs only for `rollout.exact`, and only in forward graphs
    needs_epilogues: bool = False  # whether the pass runs only if there are kernels for matmuls with epilogues


PASSES: tuple[GraphPass, ...] = (
    GraphPass(stage="before autograd", run=rms_norm_pass),
    GraphPass(stage="before autograd", run=qk_norm_rope_pass),
    GraphPass(stage="before autograd", run=swiglu_pass),
    GraphPass(stage="after autograd", run=row_sums_pass, exact_only=True),
    GraphPass(stage="after autograd", run=rms_norm_backward_pass),
    GraphPass(stage="after autograd", run=matmul_epilogues_pass, needs_epilogues=True),
    # The following passes insert in-place operators, which Inductor's own passes do not allow.
    GraphPass(stage="after inductor", run=swiglu_overwrite_pass),
    GraphPass(stage="after inductor", run=matmul_epilogues_overwrite_pass),
)
