"""The graph passes of a compiled layer, in order. The passes insert `padfree.layers.ops` into the graphs.

    the layer's graph                      silu(gate) · up      mean, rsqrt, ·      t · cos + rotate(t) · sin
      │  before autograd
      │    rms_norm_pass                   RMSNorm before a matmul             →  rms_norm, add_rms_norm
      │    qk_norm_rope_pass               QK-norm and RoPE of heads           →  qk_norm_rope
      │    swiglu_pass                     silu(gate) · up                     →  swiglu
      ▼
    autograd: a forward graph, and a backward graph in which op_backward computes the gradient of the operator op;
      │       `parallel.checkpointing` decides what is recomputed in backward
      │  after autograd (Inductor only), in both graphs
      │    row_sums_pass                   sum, mean (forward, `rollout.exact`) →  row_sum, row_mean
      │    rms_norm_backward_pass          adds around rms_norm_backward       →  its arguments dys and residual
      │    matmul_epilogues_pass           a·b -> swiglu, swiglu_backward, +   →  matmul_swiglu, .._backward, matmul_add
      ▼
    Inductor's own passes
      │  after Inductor's passes, which do not allow in-place operators
      │    swiglu_overwrite_pass           swiglu_backward                     →  swiglu_backward_, in place
      │    matmul_epilogues_overwrite_pass matmul_swiglu_backward              →  matmul_swiglu_backward_, in place
      ▼
    kernels

Later passes match the results of earlier ones: matmul_swiglu is inserted only where swiglu was inserted before. A pass
changes a graph in place and returns the number of changes. To add a pass, write a file here and add the pass to
`PASSES`.
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
