"""The `torch` backend: the variable-length flash attention that PyTorch includes for CUDA. The backend needs no extra
package.

The backend calls the two operators that `torch.nn.attention.varlen` itself calls, because the arguments of that module
changed between PyTorch 2.11 and 2.13. The operators support grouped key heads and return the log-sum-exp.

    out [Tq, H, d], lse [H, Tq]   for a query that sees no key: out 0 and lse +inf, which padfree replaces by -inf
"""

from __future__ import annotations

import torch
from torch import Tensor

from padfree.attention.backend import HALF_TYPES, MULTIPLES_OF_8, AttentionBackend, Capabilities
from padfree.attention.flash import fill_blind_queries, flash_inputs, lse_for_kernel, window_left
from padfree.attention.spec import AttentionSpec
from padfree.segments import Segments


class TorchVarlen(AttentionBackend):
    name = "torch"
    capabilities = Capabilities(
        devices=("cuda",),
        majors=range(8, 100),
        dtypes=HALF_TYPES,
        head_dims=MULTIPLES_OF_8,
        softcap=False,
    )

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, segments_q: Segments, segments_k: Segments, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._flash_attention_forward.default(
            *flash_inputs(q, k, v),
            segments_q.cu_seqlens,
            segments_k.cu_seqlens,
            *_max_lengths(segments_q, segments_k),
            0.0,
            spec.causal,
            False,
            scale=spec.scale,
            window_size_left=window_left(spec, segments_k),
            window_size_right=0 if spec.causal else -1,
        )
        return fill_blind_queries(out, lse.T, segments_q, segments_k, spec)

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        segments_q: Segments,
        segments_k: Segments,
        spec: AttentionSpec,
    ) -> tuple[Tensor, Tensor, Tensor]:
        unused = lse.new_empty(0)  # the dropout state
        dq, dk, dv = torch.ops.aten._flash_attention_backward.default(
            dout.to(q.dtype),
            *flash_inputs(q, k, v),
            out.to(q.dtype),
            lse_for_kernel(lse, segments_q, segments_k),
            segments_q.cu_seqlens,
            segments_k.cu_seqlens,
            *_max_lengths(segments_q, segments_k),
            0.0,
            spec.causal,
            unused,
            unused,
            scale=spec.scale,
            window_size_left=window_left(spec, segments_k),
            window_size_right=0 if spec.causal else -1,
        )
        return dq, dk, dv


def _max_lengths(segments_q: Segments, segments_k: Segments) -> tuple[int, int]:
    # If the longest query segment has 1 token, the operator switches to a decoding mode that does not allow empty
    # segments.
    return max(segments_q.max_seqlen, 2), segments_k.max_seqlen


BACKEND = TorchVarlen()
