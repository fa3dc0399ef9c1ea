"""The reference implementation of attention: a loop over segments with every step written out.

For a segment of Lq queries and Lk keys, the forward pass computes:

    scores [H, Lq, Lk] = scale · q·k, soft-capped, -inf where the key is not visible
    lse    [H, Lq]     = log Σ exp(scores)
    out    [Lq, H, dv] = exp(scores - lse) · v

The reference computes in float32, or in float64 if its inputs are float64. The scores of a whole segment are in memory
at once. Use the reference to check results, not to train.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from padfree.attention.backend import FLOAT_TYPES, AttentionBackend, Capabilities
from padfree.attention.spec import AttentionSpec
from padfree.segments import Segments


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which attention is computed: float64 for float64 inputs, float32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def visible_keys(
    num_queries: int, num_keys: int, spec: AttentionSpec, device: torch.device, *, diagonal: int | None = None
) -> Tensor:
    """Return the mask [num_queries, num_keys]: True if the query sees the key.

    With causal attention, the last key that the first query sees is key `diagonal`. If `diagonal` is None, the last
    query sees all keys, unless a window limits them.
    """
    if not spec.causal:
        return torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
    first = num_keys - num_queries if diagonal is None else diagonal
    own = torch.arange(first, first + num_queries, device=device)[:, None]
    key = torch.arange(num_keys, device=device)
    visible = key <= own
    return visible if spec.window is None else visible & (key > own - spec.window)


class ReferenceAttention(AttentionBackend):
    name = "reference"
    capabilities = Capabilities(
        devices=("cpu", "cuda", "mps", "xpu"),
        dtypes=FLOAT_TYPES,
        any_value_dim=True,
        lengths_on_host=True,
        # `auto` chooses the reference only for float64, because the reference is too slow for training
        auto_dtypes=(torch.float64,),
    )

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, segments_q: Segments, segments_k: Segments, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        out = q.new_zeros(len(q), q.shape[1], v.shape[2])
        lse = q.new_full(q.shape[:2], -torch.inf, dtype=compute_dtype(q.dtype))
        for queries, keys in _segment_slices(segments_q, segments_k):
            visible = visible_keys(queries.stop - queries.start, keys.stop - keys.start, spec, q.device)
            out[queries], lse[queries] = block_forward(q[queries], k[keys], v[keys], visible, spec)
        return out, lse

    def reads_pages(self, q: Tensor, spec: AttentionSpec) -> bool:
        return True

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
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for queries, keys in _segment_slices(segments_q, segments_k):
            visible = visible_keys(queries.stop - queries.start, keys.stop - keys.start, spec, q.device)
            dq[queries], dk[keys], dv[keys] = block_backward(
                dout[queries], q[queries], k[keys], v[keys], out[queries], lse[queries], visible, spec
            )
        return dq, dk, dv


def _segment_slices(segments_q: Segments, segments_k: Segments) -> Iterator[tuple[slice, slice]]:
    bounds = zip(segments_q.offsets, segments_q.offsets[1:], segments_k.offsets, segments_k.offsets[1:], strict=False)
    for first_q, end_q, first_k, end_k in bounds:
        yield slice(int(first_q), int(end_q)), slice(int(first_k), int(end_k))


def block_forward(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Compute attention over one block of keys.

    q [Lq, H, d], k [Lk, Hkv, d], v [Lk, Hkv, dv] -> out [Lq, H, dv], lse [Lq, H]

    `visible` [Lq, Lk] is True if the query sees the key.
    """
    scores = _scores(q, _per_query_head(k, q), visible, spec)
    lse = scores.logsumexp(dim=-1)  # [H, Lq], -inf if no key is visible
    p = _probabilities(scores, lse, visible)
    out = torch.einsum("hqk,khd->qhd", p, _per_query_head(v, q))
    return out.to(q.dtype), lse.T


def block_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, visible: Tensor, spec: AttentionSpec
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients (dq, dk, dv) for one block of keys k and values v.

    `out` [Lq, H, dv] and `lse` [Lq, H] are the results of attention to all keys, of which k may be a part.
    """
    q_, k_, v_ = q.to(compute_dtype(q.dtype)), _per_query_head(k, q), _per_query_head(v, q)
    dout_, out_ = dout.to(q_.dtype), out.to(q_.dtype)
    scores = _scores(q, k_, visible, spec)
    p = _probabilities(scores, lse.T.to(q_.dtype), visible)
    dv = torch.einsum("hqk,qhd->khd", p, dout_)
    dp = torch.einsum("qhd,khd->hqk", dout_, v_)
    delta = (dout_ * out_).sum(dim=-1).T[..., None]  # [H, Lq, 1]
    ds = p * (dp - delta) * spec.scale
    if spec.softcap is not None:
        ds = ds * (1 - (scores.masked_fill(~visible, 0) / spec.softcap) ** 2)
    dq = torch.einsum("hqk,khd->qhd", ds, k_)
    dk = torch.einsum("hqk,qhd->khd", ds, q_)
    return dq.to(q.dtype), _sum_over_group(dk, k), _sum_over_group(dv, v)


def _per_query_head(keys: Tensor, q: Tensor) -> Tensor:
    """Repeat each of the Hkv key heads for the query heads that share it: [Lk, Hkv, d] -> [Lk, H, d]. q has H query
    heads.
    """
    return keys.to(compute_dtype(q.dtype)).repeat_interleave(q.shape[1] // keys.shape[1], dim=1)


def _sum_over_group(gradient: Tensor, keys: Tensor) -> Tensor:
    """Sum a gradient over the query heads that share each key head: [Lk, H, d] -> [Lk, Hkv, d]."""
    grouped = gradient.reshape(*keys.shape[:2], gradient.shape[1] // keys.shape[1], keys.shape[2])
    return grouped.sum(dim=2).to(keys.dtype)


def _scores(q: Tensor, k: Tensor, visible: Tensor, spec: AttentionSpec) -> Tensor:
    scores = torch.einsum("qhd,khd->hqk", q.to(k.dtype), k) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    return scores.masked_fill(~visible, -torch.inf)


def _probabilities(scores: Tensor, lse: Tensor, visible: Tensor) -> Tensor:
    # If a query sees no key, lse is -inf and scores - lse is NaN. Its probabilities are 0 by definition.
    return torch.exp(scores - lse[..., None]).masked_fill(~visible, 0)


BACKEND = ReferenceAttention()
