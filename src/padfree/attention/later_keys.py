"""Causal attention in which the tokens of an image also see later keys: the keys of tokens that follow in the image.

The results of two attention calls are merged by their log-sum-exp. For an image with the tokens a b c d:

    query    keys in the causal call    keys in the second call
    a        a                          b c d
    b        a b                        c d
    c        a b c                      d
    d        a b c d                    none

The second call gets reversed queries (c b a) and keys (d c b), so it needs only a causal mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from padfree.attention.function import varlen_backward, varlen_forward
from padfree.segments import Segments


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LaterKeys:
    """The queries that also see later keys, i.e. keys of tokens that follow the query's token in the same image.

    Query segment i attends to key segment i. Within a segment, tokens are in reversed order, so that a causal mask
    shows the later keys.
    """

    queries: Tensor  # [n] int64, indices of the queries; each segment in reversed order
    segments_q: Segments
    segments_k: Segments


def attend_with_later_keys(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments_q: Segments,
    segments_k: Segments,
    later: LaterKeys,
    later_k: Tensor,
    later_v: Tensor,
    *,
    window: int | None,
    **options: Any,
) -> Tensor:
    """Compute causal attention [Tq, H, dv] of q [Tq, H, d] to k [Tk, Hkv, d] and v [Tk, Hkv, dv], where some queries
    also see later keys (keys after their own).

    `later` lists these queries. `later_k` and `later_v` are the later keys and their values. Differentiable once.
    """
    calls = ((segments_q, segments_k, {**options, "window": window}), (later.segments_q, later.segments_k, options))
    out: Tensor = _WithLaterKeys.apply(q, k, v, later_k, later_v, later.queries, calls)  # type: ignore[no-untyped-call]
    return out


class _WithLaterKeys(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, later_k: Tensor, later_v: Tensor, queries: Tensor, calls: Any
    ) -> Tensor:
        (segments_q, segments_k, options), (later_q, later_segments, later_options) = calls
        out, lse = varlen_forward(q, k, v, segments_q, segments_k, **options)
        part, part_lse = varlen_forward(
            q.index_select(0, queries), later_k, later_v, later_q, later_segments, **later_options
        )
        first_lse = lse.index_select(0, queries)
        total = torch.logaddexp(first_lse, part_lse)
        wide = out.index_select(0, queries).to(total.dtype) * (first_lse - total).exp()[..., None]
        wide += part.to(total.dtype) * (part_lse - total).exp()[..., None]
        out.index_copy_(0, queries, wide.to(out.dtype))
        lse = lse.index_copy(0, queries, total)
        ctx.save_for_backward(q, k, v, later_k, later_v, queries, out, lse)
        ctx.calls = calls
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, later_k, later_v, queries, out, lse = ctx.saved_tensors
        (segments_q, segments_k, options), (later_q, later_segments, later_options) = ctx.calls
        dout = dout.contiguous()
        dq, dk, dv = varlen_backward(dout, q, k, v, out, lse, segments_q, segments_k, **options)
        chosen = [tensor.index_select(0, queries) for tensor in (dout, q, out, lse)]
        part, later_dk, later_dv = varlen_backward(
            chosen[0], chosen[1], later_k, later_v, chosen[2], chosen[3], later_q, later_segments, **later_options
        )
        total = dq.index_select(0, queries).to(lse.dtype) + part.to(lse.dtype)
        dq = dq.index_copy(0, queries, total.to(dq.dtype))
        return dq, dk, dv, later_dk, later_dv, None, None
