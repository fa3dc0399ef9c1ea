"""Packed self-attention as a custom operator for `torch.compile`, so that a layer stays one graph.

The operator calls the same kernels as `varlen_attention`. All data about the pack are arguments and not global state.
Recomputation and a second model in the process therefore get the right data.

The length of the longest segment is a tensor on the host. The compiler does not see its value, so another length causes
no recompilation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from padfree.attention.backend import AttentionBackend
from padfree.attention.selection import BACKENDS, choose_backend
from padfree.attention.sinks import apply_sinks, sinks_gradient
from padfree.attention.spec import AttentionSpec
from padfree.segments import Segments

SELF_ATTENTION = "padfree::self_attention"
BACKWARD = "padfree::self_attention_backward"

_OPTIONS = "Tensor cu_seqlens, Tensor max_seqlen, float scale, int? window, float? softcap, str backend"

# `self_attention` returns out [T, H, dv] and lse [H, T]; its backward returns dq, dk, dv and dsinks.
torch.library.define(SELF_ATTENTION, f"(Tensor q, Tensor k, Tensor v, Tensor? sinks, {_OPTIONS}) -> (Tensor, Tensor)")
torch.library.define(
    BACKWARD,
    f"(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor out, Tensor lse, {_OPTIONS}) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
)


def self_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Segments,
    *,
    scale: float | None,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    backend: str,
) -> Tensor:
    """Compute causal self-attention within each segment of a pack, for use inside a compiled region.

    q [T, H, d], k [T, Hkv, d], v [T, Hkv, dv] -> [T, H, dv]. The arguments are those of `varlen_attention`.
    """
    scale = q.shape[2] ** -0.5 if scale is None else scale
    out, _ = torch.ops.padfree.self_attention(
        q.contiguous(), k.contiguous(), v.contiguous(), sinks, segments.cu_seqlens, segments.longest, scale, window,
        softcap, backend,
    )  # fmt: skip
    result: Tensor = out
    return result


class _AttentionCall(NamedTuple):
    """What an attention call needs besides q, k, v and sinks: a backend, segments, and options such as the window."""

    backend: AttentionBackend
    segments: Segments
    spec: AttentionSpec


def _call(
    q: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: Tensor, scale: float, window: int | None,
    softcap: float | None, backend: str,
) -> _AttentionCall:  # fmt: skip
    name = choose_backend(
        q.device, q.dtype, q.shape[2], value_dim=v.shape[2], softcap=softcap is not None, requested=backend
    )
    chosen = BACKENDS[name]
    # The offsets on the host stay empty for flash kernels, which read cu_seqlens on the device.
    offsets = np.zeros(0, np.int64)
    if chosen.capabilities.lengths_on_host:
        offsets = cu_seqlens.cpu().numpy().astype(np.int64)
    segments = Segments(cu_seqlens=cu_seqlens, offsets=offsets, max_seqlen=int(max_seqlen))
    if window is not None and window >= segments.max_seqlen:
        window = None  # no segment is longer than the window
    return _AttentionCall(chosen, segments, AttentionSpec(scale=scale, causal=True, window=window, softcap=softcap))


def _attended(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: _AttentionCall) -> tuple[Tensor, Tensor]:
    out, lse = call.backend.forward(q, k, v, call.segments, call.segments, call.spec)
    return (out, lse) if sinks is None else apply_sinks(out, lse, sinks)


@torch.library.impl(SELF_ATTENTION, ("cpu", "cuda"))
def _forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, cu_seqlens: Tensor, max_seqlen: Tensor, scale: float,
    window: int | None, softcap: float | None, backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    call = _call(q, v, cu_seqlens, max_seqlen, scale, window, softcap, backend)
    out, lse = _attended(q, k, v, sinks, call)
    return out.contiguous(), lse.T.contiguous()


@torch.library.register_fake(SELF_ATTENTION)  # type: ignore[untyped-decorator]
def forward_shapes(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(q.shape[0], q.shape[1], v.shape[2]), q.new_empty(q.shape[1], q.shape[0], dtype=lse_dtype)


@torch.library.impl(BACKWARD, ("cpu", "cuda"))
def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, out: Tensor, lse: Tensor, cu_seqlens: Tensor,
    max_seqlen: Tensor, scale: float, window: int | None, softcap: float | None, backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    call = _call(q, v, cu_seqlens, max_seqlen, scale, window, softcap, backend)
    dout = dout.contiguous()
    # A backend without a raw backward runs its forward pass again under autograd.
    if not call.backend.capabilities.raw_backward:
        dq, dk, dv, dsinks = recomputed_gradients(partial(_attended, call=call), dout, q, k, v, sinks)
    else:
        dq, dk, dv = call.backend.backward(dout, q, k, v, out, lse.T, call.segments, call.segments, call.spec)
        dsinks = q.new_empty(0) if sinks is None else sinks_gradient(dout, out, lse.T, sinks)
    return dq.to(q.dtype).contiguous(), dk.to(k.dtype).contiguous(), dv.to(v.dtype).contiguous(), dsinks


def recomputed_gradients(
    attend: Callable[..., tuple[Tensor, Tensor]], dout: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Repeat the forward pass of the attention function `attend`, and return dq, dk, dv and dsinks by autograd.

    dsinks is an empty tensor if there are no sinks.
    """
    with torch.enable_grad():
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        sinks = None if sinks is None else sinks.detach().requires_grad_()
        again, _ = attend(q, k, v, sinks)
        leaves = (q, k, v) if sinks is None else (q, k, v, sinks)
        dq, dk, dv, *rest = torch.autograd.grad(again, leaves, dout)
    return dq, dk, dv, rest[0] if rest else q.new_empty(0)


@torch.library.register_fake(BACKWARD)  # type: ignore[untyped-decorator]
def backward_shapes(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dsinks = q.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks, cu_seqlens, max_seqlen, *options = inputs
    ctx.save_for_backward(q, k, v, sinks, *output, cu_seqlens, max_seqlen)
    ctx.options = options


def _gradients(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, sinks, *rest = ctx.saved_tensors
    *gradients, dsinks = torch.ops.padfree.self_attention_backward(dout, q, k, v, sinks, *rest, *ctx.options)
    return *gradients, None if sinks is None else dsinks, None, None, *(None for _ in ctx.options)


torch.library.register_autograd(SELF_ATTENTION, _gradients, setup_context=_save)
