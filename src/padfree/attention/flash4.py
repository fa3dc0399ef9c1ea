"""The `fa4` backend: the package `flash-attn-4`, which compiles its kernels on first use.

The backend needs a GPU of compute capability 9.0 (Hopper) to 11.x. It calls internal functions of flash-attn-4, because
the public functions do not give access to the backward pass.
"""

from __future__ import annotations

import functools
import os
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from padfree.attention.backend import HALF_TYPES, AttentionBackend, AttentionNeeds, Capabilities, Pages
from padfree.attention.flash import fill_blind_queries, lse_for_kernel, window_left
from padfree.attention.spec import AttentionSpec
from padfree.errors import UserError, shown_error
from padfree.segments import Segments

# Cache compiled kernels on disk, because each head size and mask takes some seconds to compile.
os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")

HEAD_DIMS = (64, 96, 128, 192, 256)
"""The head sizes that the backend supports. Kernels for other sizes compile, but some give wrong gradients (sizes
16, 40 and 80 with flash-attn-4 4.0.0b36 on an H200).
"""
PAGED_HEAD_DIMS = (64, 96, 128)
"""The head sizes for which the backend reads keys in pages on a Hopper GPU. With these sizes, the kernel reads a page
with one load.
"""
# Packing makes attention 20% faster for segments of 300 tokens, and 6% slower for segments of 9,216 tokens.
UNPACKED_FROM = 1024
"""On Hopper, the query heads that share a key head are packed into one tile only if segments have fewer queries than
this on average.
"""


class FlashAttention4(AttentionBackend):
    name = "fa4"
    capabilities = Capabilities(
        devices=("cuda",),
        majors=range(9, 12),
        dtypes=HALF_TYPES,
        head_dims=HEAD_DIMS,
        package="pip install 'padfree[fa4]'",
    )

    def is_installed(self) -> bool:
        return _is_installed()

    def unsupported_reason(self, needs: AttentionNeeds) -> str | None:
        reason = super().unsupported_reason(needs)
        if reason is not None or needs.compute_capability[0] == 9:
            return reason
        if needs.head_dim == 192:
            return "head size 192 is not supported on Blackwell (only 64, 96, 128, 256)"
        if needs.head_dim == 256 and needs.softcap:
            return "the backend does not support softcap at head size 256 on Blackwell"
        return None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, segments_q: Segments, segments_k: Segments, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        left, right = _window(spec, segments_k)
        out, lse = _forward(
            q,
            k,
            v,
            segments_q,
            spec,
            cu_seqlens_k=segments_k.cu_seqlens,
            max_seqlen_k=segments_k.max_seqlen,
            window_size_left=left,
            window_size_right=right,
        )
        return fill_blind_queries(out, lse, segments_q, segments_k, spec)

    def reads_pages(self, q: Tensor, spec: AttentionSpec) -> bool:
        return spec.window is None and q.shape[2] in PAGED_HEAD_DIMS and _is_hopper(q.device)

    def has_decode_bits(self, q: Tensor, spec: AttentionSpec) -> bool:
        # Both calls read keys in tiles of one page. They were compared on an H200 for the head sizes 64 and 128.
        return self.reads_pages(q, spec) and q.shape[2] in (64, 128)

    def paged_forward(
        self, q: Tensor, k: Tensor, v: Tensor, segments_q: Segments, pages: Pages, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        keys = {"seqused_k": pages.lengths, "page_table": pages.table, "max_seqlen_k": pages.longest}
        return _forward(q, k, v, segments_q, spec, **keys)

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
        left, right = _window(spec, segments_k)
        dq, dk, dv = _kernels()._flash_attn_bwd(
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


@functools.cache
def _is_installed() -> bool:
    # flash-attn 2 and 4 share the package name `flash_attn`, and `find_spec` of a submodule imports the package. That
    # may be flash-attn 2.
    spec = find_spec("flash_attn")
    folders = (spec.submodule_search_locations or []) if spec is not None else []
    there = any(Path(folder, "cute", "interface.py").is_file() for folder in folders)
    return there and find_spec("cutlass") is not None


def _forward(
    q: Tensor, k: Tensor, v: Tensor, segments_q: Segments, spec: AttentionSpec, **keys: Any
) -> tuple[Tensor, Tensor]:
    """Run the kernel of flash-attn-4 and return (out, lse).

    `keys` are the kernel's keyword arguments that describe the segments or pages of k and v.
    """
    out, lse = _kernels()._flash_attn_fwd(
        q,
        k,
        v,
        cu_seqlens_q=segments_q.cu_seqlens,
        max_seqlen_q=segments_q.max_seqlen,
        softmax_scale=spec.scale,
        causal=spec.causal,
        softcap=spec.softcap,
        pack_gqa=_packed(q, segments_q),
        return_lse=True,
        **keys,
    )[:2]
    return out, lse.T


@functools.cache
def _kernels() -> Any:
    try:
        return import_module("flash_attn.cute.interface")
    except Exception as error:  # a dependency may have an incompatible version
        raise UserError(
            "backend",
            f"'fa4' is not usable: flash-attn-4 cannot be imported ({shown_error(error)})",
            "reinstall it with pip install 'padfree[fa4]', or use 'torch'",
        ) from error


def _packed(q: Tensor, segments_q: Segments) -> bool | None:
    """Return whether to pack the query heads that share a key head into one tile. None lets flash-attn-4 decide."""
    long = len(q) >= UNPACKED_FROM * (len(segments_q.cu_seqlens) - 1)
    return False if long and _is_hopper(q.device) else None


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] == 9


def _window(spec: AttentionSpec, segments_k: Segments) -> tuple[int | None, int | None]:
    left = window_left(spec, segments_k)
    return (None, None) if left < 0 else (left, 0)


BACKEND = FlashAttention4()
