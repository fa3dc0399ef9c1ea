"""The `fa4` backend: the `flash-attn-4` wheel, pure Python that compiles its kernels on first use. Hopper and newer.

Its public function hides the backward, so the two functions beneath it are called: they give and take the lse.
Compiling takes some seconds per head size and mask. The package can keep what it compiled on disk and does so if this
variable is 1 when it is imported; we set it, unless the user has set it to something else.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from padfree.attention.flash import blind_rows_fixed, lse_for_kernel, window_left
from padfree.attention.spec import AttentionSpec
from padfree.batch import Segments

os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")


def forward(
    q: Tensor, k: Tensor, v: Tensor, segments_q: Segments, segments_k: Segments, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """q [Tq, H, d], k [Tk, Hkv, d], v [Tk, Hkv, dv] -> out [Tq, H, dv], lse [Tq, H]"""
    from flash_attn.cute.interface import _flash_attn_fwd

    left, right = _window(spec, segments_k)
    out, lse = _flash_attn_fwd(
        q,
        k,
        v,
        cu_seqlens_q=segments_q.cu_seqlens,
        cu_seqlens_k=segments_k.cu_seqlens,
        max_seqlen_q=segments_q.max_seqlen,
        max_seqlen_k=segments_k.max_seqlen,
        softmax_scale=spec.scale,
        causal=spec.causal,
        softcap=spec.softcap,
        window_size_left=left,
        window_size_right=right,
        return_lse=True,
    )[:2]
    return blind_rows_fixed(out, lse.T, segments_q, segments_k, spec)


def backward(
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
    """dq, dk, dv; `out` and `lse` may be those of a larger softmax"""
    from flash_attn.cute.interface import _flash_attn_bwd

    left, right = _window(spec, segments_k)
    dq, dk, dv = _flash_attn_bwd(
        q,
        k,
        v,
        out.to(q.dtype),
        dout.to(q.dtype),
        lse_for_kernel(lse, segments_q, segments_k),
        softmax_scale=spec.scale,
        causal=spec.causal,
        softcap=spec.softcap or 0.0,
        window_size_left=left,
        window_size_right=right,
        cu_seqlens_q=segments_q.cu_seqlens,
        cu_seqlens_k=segments_k.cu_seqlens,
        max_seqlen_q=segments_q.max_seqlen,
        max_seqlen_k=segments_k.max_seqlen,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return dq, dk, dv


def _window(spec: AttentionSpec, segments_k: Segments) -> tuple[int | None, int | None]:
    left = window_left(spec, segments_k)
    return (None, None) if left < 0 else (left, 0)
