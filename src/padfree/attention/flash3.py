"""The `fa3` backend: the compiled `flash_attn_interface` package for Hopper, where a user has it.

It is called beneath its autograd function, whose backward could not be given the lse of a larger softmax.
"""

from __future__ import annotations

import torch
from torch import Tensor

from padfree.attention.backend import HALF_TYPES, MULTIPLES_OF_8, AttentionBackend, Capabilities, has_module
from padfree.attention.flash import fill_blind_queries, flash_inputs, lse_for_kernel, window_left
from padfree.attention.spec import AttentionSpec
from padfree.batch import Segments


class FlashAttention3(AttentionBackend):
    name = "fa3"
    capabilities = Capabilities(
        devices=("cuda",),
        majors=range(9, 10),
        dtypes=HALF_TYPES,
        head_dims=MULTIPLES_OF_8,
        package="flash_attn_interface of the flash-attention project's hopper folder",
        tested=False,
    )

    def is_installed(self) -> bool:
        return has_module("flash_attn_interface")

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, segments_q: Segments, segments_k: Segments, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        from flash_attn_interface import _flash_attn_forward

        out, lse = _flash_attn_forward(
            *flash_inputs(q, k, v),
            cu_seqlens_q=segments_q.cu_seqlens,
            cu_seqlens_k=segments_k.cu_seqlens,
            max_seqlen_q=segments_q.max_seqlen,
            max_seqlen_k=segments_k.max_seqlen,
            softmax_scale=spec.scale,
            causal=spec.causal,
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
        from flash_attn_interface import _flash_attn_backward

        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        _flash_attn_backward(
            *flash_inputs(dout.to(q.dtype), q, k, v, out.to(q.dtype)),
            lse_for_kernel(lse, segments_q, segments_k),
            cu_seqlens_q=segments_q.cu_seqlens,
            cu_seqlens_k=segments_k.cu_seqlens,
            max_seqlen_q=segments_q.max_seqlen,
            max_seqlen_k=segments_k.max_seqlen,
            dq=dq,
            dk=dk,
            dv=dv,
            softmax_scale=spec.scale,
            is_causal=spec.causal,
            window_size_left=window_left(spec, segments_k),
            window_size_right=0 if spec.causal else -1,
            softcap=spec.softcap or 0.0,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return dq, dk, dv


BACKEND = FlashAttention3()
