"""The `fa2` backend: the compiled `flash_attn` package (2.7 or newer), where a user has it.

It is called beneath its autograd function, whose backward could not be given the lse of a larger softmax.
"""

from __future__ import annotations

import torch
from torch import Tensor

from padfree.attention.backend import HALF_TYPES, MULTIPLES_OF_8, AttentionBackend, Capabilities, has_module
from padfree.attention.flash import fill_blind_queries, flash_inputs, lse_for_kernel, window_left
from padfree.attention.spec import AttentionSpec
from padfree.batch import Segments


class FlashAttention2(AttentionBackend):
    name = "fa2"
    capabilities = Capabilities(
        devices=("cuda",),
        majors=range(8, 100),
        dtypes=HALF_TYPES,
        head_dims=MULTIPLES_OF_8,
        package="pip install flash-attn",
        tested=False,
    )

    def is_installed(self) -> bool:
        return has_module("flash_attn_2_cuda")

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, segments_q: Segments, segments_k: Segments, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        from flash_attn.flash_attn_interface import _flash_attn_varlen_forward

        out, lse = _flash_attn_varlen_forward(
            *flash_inputs(q, k, v),
            segments_q.cu_seqlens,
            segments_k.cu_seqlens,
            max(segments_q.max_seqlen, 2),  # at 1 it swaps to a decoding layout without room for empty segments
            segments_k.max_seqlen,
            0.0,
            spec.scale,
            spec.causal,
            window_size_left=window_left(spec, segments_k),
            window_size_right=0 if spec.causal else -1,
            softcap=spec.softcap or 0.0,
        )[:2]
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
        from flash_attn.flash_attn_interface import _flash_attn_varlen_backward

        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        _flash_attn_varlen_backward(
            *flash_inputs(dout.to(q.dtype), q, k, v, out.to(q.dtype)),
            lse_for_kernel(lse, segments_q, segments_k),
            dq,
            dk,
            dv,
            segments_q.cu_seqlens,
            segments_k.cu_seqlens,
            segments_q.max_seqlen,
            segments_k.max_seqlen,
            0.0,
            spec.scale,
            spec.causal,
            window_left(spec, segments_k),
            0 if spec.causal else -1,
            spec.softcap or 0.0,
            None,
            torch.are_deterministic_algorithms_enabled(),
        )
        return dq, dk, dv


BACKEND = FlashAttention2()
