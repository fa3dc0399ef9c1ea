"""Attention of a row whose samples share prefixes, on the kernels that there are: by gathered keys.

    nodes      p p p | a a | b b b                      queries, as they lie in the row
    keys       p p p | p p p a a | p p p b b b          the tokens of each node's path

A node's queries are a piece of a sample that ends at its last key, which is what kernels call causal, aligned
bottom-right. So windows, soft caps and sinks are right by themselves, nothing is merged, and the queries of a prefix
are computed once. What it costs is a copy of each key for every node below it, and of its gradient the sum over these.

`path_attention` is an operator, so that a compiled layer stays one graph: all that it must know of the row comes in
tensors, whose sizes may change from row to row. The copies are made again in backward, not kept.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from padfree.arrays import concatenated_ranges
from padfree.attention.backend import AttentionBackend
from padfree.attention.copies import copies_on, sum_copies
from padfree.attention.operator import backward_shapes, forward_shapes, recomputed_gradients
from padfree.attention.selection import BACKENDS, choose_backend
from padfree.attention.sinks import apply_sinks, sinks_gradient
from padfree.attention.spec import AttentionSpec
from padfree.batch import PathKeys, Segments
from padfree.nodes import path_ranges, readers

PATH_ATTENTION = "padfree::path_attention"
BACKWARD = "padfree::path_attention_backward"

_OPTIONS = (
    "Tensor cu_seqlens_q, Tensor max_seqlen_q, Tensor cu_seqlens_k, Tensor max_seqlen_k, Tensor index, Tensor places, "
    "Tensor begins, float scale, int? window, float? softcap, str backend"
)

torch.library.define(PATH_ATTENTION, f"(Tensor q, Tensor k, Tensor v, Tensor? sinks, {_OPTIONS}) -> (Tensor, Tensor)")
torch.library.define(
    BACKWARD,
    f"(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor out, Tensor lse, {_OPTIONS}) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
)


def prepare_path_keys(segments: Segments) -> PathKeys | None:
    """Which keys the nodes of a row see, on the device of `segments`; None where nothing is shared."""
    if segments.parents is None:
        return None
    device = segments.cu_seqlens.device
    ranges = path_ranges(segments.parents, segments.offsets)
    keys = Segments.from_lengths(ranges.lengths(segments.num_segments))
    cu_seqlens = keys.cu_seqlens if device.type == "cpu" else keys.cu_seqlens.pin_memory()
    assert keys.longest is not None
    return PathKeys(
        cu_seqlens=cu_seqlens.to(device, non_blocking=True),
        longest=keys.longest,
        tokens=copies_on(
            device,
            concatenated_ranges(ranges.begin, ranges.end - ranges.begin),
            *readers(segments.parents, segments.offsets),
        ),
    )


def path_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Segments,
    keys: PathKeys,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """q [T, H, d], k [T, Hkv, d], v [T, Hkv, dv] -> [T, H, dv]: every query sees its path up to itself.

    Differentiable once, in q, k, v and sinks [H]. `segments` are the nodes, `keys` what was prepared for them.
    """
    scale = q.shape[2] ** -0.5 if scale is None else scale
    copies = keys.tokens
    out, _ = torch.ops.padfree.path_attention(
        q.contiguous(), k.contiguous(), v.contiguous(), sinks, segments.cu_seqlens, segments.longest, keys.cu_seqlens,
        keys.longest, copies.index, copies.places, copies.begins, scale, window, softcap, backend,
    )  # fmt: skip
    result: Tensor = out
    return result


class _Row(NamedTuple):
    """What a kernel is called with besides tensors of heads."""

    backend: AttentionBackend
    queries: Segments
    keys: Segments
    spec: AttentionSpec


def _row(
    q: Tensor, v: Tensor, cu_q: Tensor, max_q: Tensor, cu_k: Tensor, max_k: Tensor, scale: float, window: int | None,
    softcap: float | None, backend: str,
) -> _Row:  # fmt: skip
    name = choose_backend(
        q.device, q.dtype, q.shape[2], value_dim=v.shape[2], softcap=softcap is not None, requested=backend
    )
    chosen = BACKENDS[name]

    def segments(cu_seqlens: Tensor, longest: Tensor) -> Segments:
        # Flash kernels read cu_seqlens on the device. Only the others need them on the host.
        offsets = np.zeros(0, np.int64)
        if chosen.capabilities.lengths_on_host:
            offsets = cu_seqlens.cpu().numpy().astype(np.int64)
        return Segments(cu_seqlens=cu_seqlens, offsets=offsets, max_seqlen=int(longest))

    keys = segments(cu_k, max_k)
    if window is not None and window >= keys.max_seqlen:
        window = None  # no query has as many keys
    spec = AttentionSpec(scale=scale, causal=True, window=window, softcap=softcap)
    return _Row(chosen, segments(cu_q, max_q), keys, spec)


def _attended(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, index: Tensor, row: _Row) -> tuple[Tensor, Tensor]:
    k, v = k.index_select(0, index), v.index_select(0, index)
    out, lse = row.backend.forward(q, k, v, row.queries, row.keys, row.spec)
    return (out, lse) if sinks is None else apply_sinks(out, lse, sinks)


@torch.library.impl(PATH_ATTENTION, ("cpu", "cuda"))
def _forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, cu_q: Tensor, max_q: Tensor, cu_k: Tensor, max_k: Tensor,
    index: Tensor, places: Tensor, begins: Tensor, scale: float, window: int | None, softcap: float | None,
    backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    row = _row(q, v, cu_q, max_q, cu_k, max_k, scale, window, softcap, backend)
    out, lse = _attended(q, k, v, sinks, index, row)
    return out.contiguous(), lse.T.contiguous()


@torch.library.impl(BACKWARD, ("cpu", "cuda"))
def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, out: Tensor, lse: Tensor, cu_q: Tensor,
    max_q: Tensor, cu_k: Tensor, max_k: Tensor, index: Tensor, places: Tensor, begins: Tensor, scale: float,
    window: int | None, softcap: float | None, backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    row = _row(q, v, cu_q, max_q, cu_k, max_k, scale, window, softcap, backend)
    dout = dout.contiguous()
    if not row.backend.capabilities.raw_backward:  # autograd does it, for which the forward pass is done again
        attend = partial(_attended, index=index, row=row)
        dq, dk, dv, dsinks = recomputed_gradients(attend, dout, q, k, v, sinks)
    else:
        taken = k.index_select(0, index), v.index_select(0, index)
        dq, *gradients = row.backend.backward(dout, q, *taken, out, lse.T, row.queries, row.keys, row.spec)
        dk, dv = (sum_copies(gradient.contiguous(), index, places, begins) for gradient in gradients)
        dsinks = q.new_empty(0) if sinks is None else sinks_gradient(dout, out, lse.T, sinks)
    return dq.to(q.dtype).contiguous(), dk.to(k.dtype).contiguous(), dv.to(v.dtype).contiguous(), dsinks


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks, *rest = inputs
    tensors, ctx.options = rest[:7], rest[7:]
    ctx.save_for_backward(q, k, v, sinks, *output, *tensors)


def _gradients(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, sinks, *rest = ctx.saved_tensors
    *gradients, dsinks = torch.ops.padfree.path_attention_backward(dout, q, k, v, sinks, *rest, *ctx.options)
    return *gradients, None if sinks is None else dsinks, *([None] * 11)


torch.library.register_fake(PATH_ATTENTION, forward_shapes)
torch.library.register_fake(BACKWARD, backward_shapes)
torch.library.register_autograd(PATH_ATTENTION, _gradients, setup_context=_save)
