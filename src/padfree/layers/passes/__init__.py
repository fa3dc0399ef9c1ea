"""The graph passes of a compiled layer, which insert the operators of `padfree.layers.ops` into the layer's graphs.

The passes are listed in the order in which they run. To the left of an arrow are the nodes that a pass replaces, and to
the right the operators that it inserts. The operator op_backward computes the gradient of the operator op, and
op_backward_ writes the results over the inputs.

    before autograd
        rms_norm_pass                     RMSNorm before a matmul                →  rms_norm or add_rms_norm
        qk_norm_rope_pass                 QK-norm and RoPE                       →  qk_norm_rope
        swiglu_pass                       silu(gate) · up                        →  swiglu

    after autograd, in forward and backward graphs, only with Inductor
        row_sums_pass                     sum                                    →  row_sum
                                          mean                                   →  row_mean
        rms_norm_backward_pass            additions and rms_norm_backward        →  rms_norm_backward
        matmul_epilogues_pass             matmul and swiglu                      →  matmul_swiglu
                                          matmul and swiglu_backward             →  matmul_swiglu_backward
                                          matmul and addition                    →  matmul_add

    after Inductor's own passes, which do not allow in-place operators
        swiglu_overwrite_pass             swiglu_backward                        →  swiglu_backward_
        matmul_epilogues_overwrite_pass   matmul_swiglu_backward                 →  matmul_swiglu_backward_

`row_sums_pass` runs only with `rollout.exact`, and only in forward graphs.

Later passes match the results of earlier ones: matmul_swiglu is inserted only where swiglu was inserted before. A pass
changes a graph in place and returns the number of changes. To add a pass, write a module in this folder and add the
pass to `PASSES`.
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
    GraphPass(stage="after inductor", run=swiglu_overwrite_pass),
    GraphPass(stage="after inductor", run=matmul_epilogues_overwrite_pass),
)
