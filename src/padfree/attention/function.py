"""Attention over segments, with one signature for every backend.

    q [Tq, H, d]     k [Tk, Hkv, d]     v [Tk, Hkv, dv]   ->   out [Tq, H, dv], lse [Tq, H]

There are Tq query tokens with H heads, and Tk key tokens with Hkv heads. `lse` is the log-sum-exp of the scores of each
query, without attention sinks.

The queries of segment i see only the keys of segment i. The last query is aligned with the last key of the segment. A
query that sees no key has output 0 and lse -inf.
"""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from padfree.attention.backend import AttentionBackend
from padfree.attention.selection import BACKENDS, choose_backend
from padfree.attention.sinks import apply_sinks, sinks_gradient
from padfree.attention.spec import AttentionSpec
from padfree.batch import need_tensor
from padfree.errors import UserError
from padfree.segments import Segments


@overload
def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments_q: Segments,
    segments_k: Segments,
    *,
    causal: bool = ...,
    scale: float | None = ...,
    window: int | None = ...,
    softcap: float | None = ...,
    sinks: Tensor | None = ...,
    return_lse: Literal[False] = ...,
    backend: str = ...,
) -> Tensor: ...
@overload
def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments_q: Segments,
    segments_k: Segments,
    *,
    causal: bool = ...,
    scale: float | None = ...,
    window: int | None = ...,
    softcap: float | None = ...,
    sinks: Tensor | None = ...,
    return_lse: Literal[True],
    backend: str = ...,
) -> tuple[Tensor, Tensor]: ...
def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments_q: Segments,
    segments_k: Segments,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute attention of q [Tq, H, d] to k [Tk, Hkv, d] and v [Tk, Hkv, dv] within each segment.

    Returns out [Tq, H, dv] or (out, lse), with lse [Tq, H]. `scale` (default d ** -0.5), `window` and `softcap` are
    those of `AttentionSpec`. `sinks` [H] are learned extra scores. Only `out` is differentiable, once.
    """
    spec = _checked_spec(q, k, v, segments_q, segments_k, causal, scale, window, softcap)
    if sinks is not None:
        need_tensor("sinks", sinks)
        sinks = sinks if sinks.is_floating_point() else sinks.float()
        if sinks.shape != q.shape[1:2]:
            raise UserError(
                "sinks", f"has shape {tuple(sinks.shape)}, but q has {q.shape[1]} heads", "give one number per head"
            )
    chosen = _chosen(q, k, v, softcap, backend, raw_backward=False)
    if chosen.capabilities.raw_backward:
        out, lse = _VarlenAttention.apply(  # type: ignore[no-untyped-call]
            q, k, v, sinks, segments_q, segments_k, spec, chosen
        )
    else:
        out, lse = chosen.forward(q, k, v, segments_q, segments_k, spec)
        if sinks is not None:
            out, _ = apply_sinks(out, lse, sinks)
        lse = lse.detach()
    return (out, lse) if return_lse else out


class _VarlenAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        segments_q: Segments,
        segments_k: Segments,
        spec: AttentionSpec,
        backend: AttentionBackend,
    ) -> tuple[Tensor, Tensor]:
        out, lse = backend.forward(q, k, v, segments_q, segments_k, spec)
        softmax_lse = lse
        if sinks is not None:
            out, softmax_lse = apply_sinks(out, lse, sinks)
        ctx.save_for_backward(q, k, v, sinks, out, softmax_lse)
        ctx.mark_non_differentiable(lse)
        ctx.call = (segments_q, segments_k, spec, backend)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        segments_q, segments_k, spec, backend = ctx.call
        dq, dk, dv = backend.backward(dout, q, k, v, out, lse, segments_q, segments_k, spec)
        dsinks = None if sinks is None else sinks_gradient(dout, out, lse, sinks)
        return dq, dk, dv, dsinks, None, None, None, None


@torch.no_grad()
def varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments_q: Segments,
    segments_k: Segments,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Compute attention without autograd: return out [Tq, H, dv] and the log-sum-exp lse [Tq, H].

    q is [Tq, H, d], k is [Tk, Hkv, d] and v is [Tk, Hkv, dv]. The other arguments are those of `varlen_attention`.
    """
    spec = _checked_spec(q, k, v, segments_q, segments_k, causal, scale, window, softcap)
    return _chosen(q, k, v, softcap, backend, raw_backward=True).forward(q, k, v, segments_q, segments_k, spec)


@torch.no_grad()
def varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    segments_q: Segments,
    segments_k: Segments,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q [Tq, H, d], k [Tk, Hkv, d] and v [Tk, Hkv, dv], where k and v are one block of the keys
    and values.

    `out` and `lse` are the results over all blocks. Sum the gradients of q over the blocks.
    """
    spec = _checked_spec(q, k, v, segments_q, segments_k, causal, scale, window, softcap)
    for argument, tensor, shape in (("dout", dout, (*q.shape[:2], v.shape[2])), ("lse", lse, q.shape[:2])):
        need_tensor(argument, tensor)
        if tensor.shape != shape:
            raise UserError(
                argument,
                f"has the wrong shape {tuple(tensor.shape)}",
                f"give shape {tuple(shape)}, which varlen_forward returns",
            )
    if dout.dtype != q.dtype:
        raise UserError("dout", f"is {dout.dtype} but q is {q.dtype}", "cast dout to the dtype of q")
    chosen = _chosen(q, k, v, softcap, backend, raw_backward=True)
    return chosen.backward(dout, q, k, v, out, lse, segments_q, segments_k, spec)


def _chosen(
    q: Tensor, k: Tensor, v: Tensor, softcap: float | None, requested: str, *, raw_backward: bool
) -> AttentionBackend:
    name = choose_backend(
        q.device,
        q.dtype,
        q.shape[2],
        value_dim=v.shape[2],
        softcap=softcap is not None,
        raw_backward=raw_backward,
        requested=requested,
    )
    # Use the reference for empty tensors, because kernels differ in how they handle zero tokens.
    return BACKENDS[name if len(q) and len(k) else "reference"]


def _checked_spec(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments_q: Segments,
    segments_k: Segments,
    causal: bool,
    scale: float | None,
    window: int | None,
    softcap: float | None,
) -> AttentionSpec:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        need_tensor(name, tensor)
    for name, given in (("segments_q", segments_q), ("segments_k", segments_k)):
        if not isinstance(given, Segments):
            raise UserError(name, f"got a {type(given).__name__}", "give Segments.from_lengths(...) or batch.segments")
    if q.ndim != 3 or k.ndim != 3 or v.ndim != 3 or k.shape[:2] != v.shape[:2] or q.shape[2] != k.shape[2]:
        raise UserError(
            "q, k, v",
            f"have shapes {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}, which do not fit together",
            "give q [Tq, H, d], k [Tk, Hkv, d], v [Tk, Hkv, dv] without a batch dimension",
        )
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        raise UserError(
            "q, k",
            f"have {q.shape[1]} query heads and {k.shape[1]} key heads",
            "make the number of query heads a multiple of the number of key heads",
        )
    if not q.dtype == k.dtype == v.dtype:
        raise UserError(
            "q, k, v", f"have different dtypes: {q.dtype}, {k.dtype}, {v.dtype}", "cast all three to one dtype"
        )
    if segments_q.num_segments != segments_k.num_segments:
        raise UserError(
            "segments_q, segments_k",
            f"have {segments_q.num_segments} and {segments_k.num_segments} segments",
            "give both the same number, with empty segments for samples without queries or keys",
        )
    for name, segments, tokens in (("segments_q", segments_q, len(q)), ("segments_k", segments_k, len(k))):
        if segments.num_tokens != tokens:
            raise UserError(
                name,
                f"has {segments.num_tokens} tokens, but its tensor has {tokens}",
                "give segments whose lengths add up to the length of the tensor",
            )
        if segments.cu_seqlens.device != q.device:
            raise UserError(
                name,
                f"is on {segments.cu_seqlens.device}, but q is on {q.device}",
                f"move it with .to({str(q.device)!r})",
            )
        assert segments.parents is None, "use prefix_attention for segments that are nodes"
    return AttentionSpec(
        scale=q.shape[2] ** -0.5 if scale is None else scale, causal=causal, window=window, softcap=softcap
    )
