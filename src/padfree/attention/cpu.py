"""PyTorch's fused CPU attention, called piece by piece. A piece is some queries of a segment and the keys they see.

For example, a causal segment of 300 tokens is cut into three pieces of 100 queries, with 100, 200 and 300 keys. The
kernel then computes fewer scores that the causal mask hides. This saves 18% of the time for segments of 64 to 512
tokens. Each piece can have its own mask, for example for a window.

bfloat16 inputs are computed in float32. The bfloat16 kernel takes 190 times as long as the float32 kernel (one core of
an aarch64 server).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from padfree.attention import reference
from padfree.attention.backend import FLOAT_TYPES, AttentionBackend, Capabilities
from padfree.attention.spec import AttentionSpec
from padfree.segments import Segments

PIECE_QUERIES = 128
"""The greatest number of queries in a piece.

A causal segment is cut into pieces of at most this many queries.
"""

WHOLE_KEYS = 2048
"""A causal segment of at least this many tokens is not cut into pieces, because the kernel skips most masked keys of
such a long segment.
"""

# Shared calls halve the time for 32 segments of 16 tokens.
SHARED_KEYS, SHARED_PIECES = 32, 8
"""Pieces of the same shape share a kernel call if each piece has at most SHARED_KEYS keys and there are at least
SHARED_PIECES such pieces. A piece is some queries of a segment and the keys that they see.
"""


@dataclass(frozen=True, slots=True)
class _Shape:
    """The number of queries and keys of a piece (some queries of a segment and the keys they see).

    `diagonal` is the index of the last key that the first query sees, or None if every query sees all keys.
    """

    queries: int
    keys: int
    diagonal: int | None


_Call = tuple[_Shape, list[int], list[int]]
"""One kernel call, which computes several pieces of equal shape (a piece is some queries and the keys that they see).

The entries: the shape, the first query of each piece, and the first key of each piece.
"""


def _plan(segments_q: Segments, segments_k: Segments, spec: AttentionSpec) -> list[_Call]:
    """Return the kernel calls that compute the attention of all segments.

    Each call computes one or more pieces (some queries of a segment and the keys they see). Queries that see no key are
    in no piece.
    """
    calls: list[_Call] = []
    shared: defaultdict[_Shape, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    starts = zip(segments_q.offsets[:-1].tolist(), segments_k.offsets[:-1].tolist(), strict=True)
    lengths = zip(segments_q.lengths.tolist(), segments_k.lengths.tolist(), strict=True)
    for (first_query, first_key), (num_queries, num_keys) in zip(starts, lengths, strict=True):
        for shape, query, key in _pieces(num_queries, num_keys, spec):
            if shape.keys <= SHARED_KEYS and spec.softcap is None:
                queries, keys = shared[shape]
                queries.append(first_query + query)
                keys.append(first_key + key)
            else:
                calls.append((shape, [first_query + query], [first_key + key]))
    for shape, (queries, keys) in shared.items():
        if len(queries) >= SHARED_PIECES:
            calls.append((shape, queries, keys))
        else:
            calls.extend((shape, [query], [key]) for query, key in zip(queries, keys, strict=True))
    return calls


def _pieces(num_queries: int, num_keys: int, spec: AttentionSpec) -> list[tuple[_Shape, int, int]]:
    """Cut a segment into pieces, each of which is some queries and the keys that they see.

    Returns the shape, the first query and the first key of each piece. Queries and keys are counted from the start of
    the segment.
    """
    if not num_queries or not num_keys:
        return []
    if not spec.causal:
        # The reference computes attention with a soft cap. It stores the scores of a piece, so pieces limit the memory.
        step = num_queries if spec.softcap is None else PIECE_QUERIES
        starts = range(0, num_queries, step)
        return [(_Shape(min(step, num_queries - query), num_keys, None), query, 0) for query in starts]
    first = max(0, num_queries - num_keys)  # earlier queries see no key
    seeing = num_queries - first
    whole = num_queries == num_keys >= WHOLE_KEYS and spec.window is None and spec.softcap is None
    step = seeing if whole else -(-seeing // -(-seeing // PIECE_QUERIES))
    pieces = []
    for query in range(first, num_queries, step):
        count = min(step, num_queries - query)
        own = query + num_keys - num_queries  # the key that the first query of the piece is aligned with
        key = 0 if spec.window is None else max(0, own - spec.window + 1)
        pieces.append((_Shape(count, own + count - key, own - key), query, key))
    return pieces


class FusedCPU(AttentionBackend):
    name = "cpu"
    capabilities = Capabilities(
        devices=("cpu",),
        dtypes=FLOAT_TYPES,
        any_value_dim=True,
        lengths_on_host=True,
    )

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, segments_q: Segments, segments_k: Segments, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        dtype, width = reference.compute_dtype(q.dtype), max(q.shape[2], v.shape[2])
        q_, k_, v_ = (_widened(x, dtype, width) for x in (q, k, v))
        # If all scores of a query are NaN or -inf, the kernel wrongly returns 0. The reference returns NaN, so it
        # computes all inputs that are not finite.
        if not all(torch.isfinite(x.sum()) for x in (q_, k_, v_)):
            return reference.BACKEND.forward(q, k, v, segments_q, segments_k, spec)
        out = q_.new_zeros(len(q), q.shape[1], width)
        lse = q_.new_full(q.shape[:2], -torch.inf)
        calls = _plan(segments_q, segments_k, spec)
        if spec.softcap is not None:
            for query_slice, key_slice, visible in _blocks(calls, spec):
                out[query_slice], lse[query_slice] = reference.block_forward(
                    q_[query_slice], k_[key_slice], v_[key_slice], visible, spec
                )
        else:
            heads, group = k.shape[1], q.shape[1] // k.shape[1]
            by_query, by_key = (
                _PieceTensors(_grouped(q_, heads)),
                _PieceTensors(*(_grouped(x, heads) for x in (k_, v_))),
            )
            results = _PieceTensors(_grouped(out, heads), _grouped(lse, heads))
            for shape, queries, keys in calls:
                causal, mask = _masking(shape, spec, q_)
                piece = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
                    *by_query.take(queries, shape.queries),
                    *(x.expand(-1, group, -1, -1) for x in by_key.take(keys, shape.keys)),
                    0.0,
                    causal,
                    attn_mask=mask,
                    scale=spec.scale,
                )
                results.put(piece, queries, shape.queries)
        return out[..., : v.shape[2]].to(q.dtype), lse

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
        dtype, width = reference.compute_dtype(q.dtype), max(q.shape[2], v.shape[2])
        dout_, q_, k_, v_, out_ = (_widened(x, dtype, width) for x in (dout, q, k, v, out))
        lse_ = lse.to(dtype)
        dq, dk, dv = (torch.zeros(x.shape, dtype=dtype) for x in (q_, k_, v_))
        calls = _plan(segments_q, segments_k, spec)
        if spec.softcap is not None:
            for query_slice, key_slice, visible in _blocks(calls, spec):
                saved = (
                    dout_[query_slice],
                    q_[query_slice],
                    k_[key_slice],
                    v_[key_slice],
                    out_[query_slice],
                    lse_[query_slice],
                )
                dq[query_slice], piece_dk, piece_dv = reference.block_backward(*saved, visible, spec)
                dk[key_slice] += piece_dk
                dv[key_slice] += piece_dv
        else:
            heads, group = k.shape[1], q.shape[1] // k.shape[1]
            by_query = _PieceTensors(*(_grouped(x, heads) for x in (dout_, q_, out_, lse_)))
            by_key = _PieceTensors(*(_grouped(x, heads) for x in (k_, v_)))
            query_results, key_results = (
                _PieceTensors(_grouped(dq, heads)),
                _PieceTensors(*(_grouped(x, heads) for x in (dk, dv))),
            )
            for shape, queries, keys in calls:
                causal, mask = _masking(shape, spec, q_)
                piece_dout, piece_q, piece_out, piece_lse = by_query.take(queries, shape.queries)
                piece_keys = (x.expand(-1, group, -1, -1) for x in by_key.take(keys, shape.keys))
                gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
                    piece_dout,
                    piece_q,
                    *piece_keys,
                    piece_out,
                    piece_lse,
                    0.0,
                    causal,
                    attn_mask=mask,
                    scale=spec.scale,
                )
                query_results.put(gradients[:1], queries, shape.queries)
                key_results.put([x.sum(dim=1, keepdim=True) for x in gradients[1:]], keys, shape.keys, add=True)
        return dq[..., : q.shape[2]].to(q.dtype), dk[..., : k.shape[2]].to(k.dtype), dv[..., : v.shape[2]].to(v.dtype)


def _widened(x: Tensor, dtype: torch.dtype, width: int) -> Tensor:
    """Convert a tensor [T, H, d] to `dtype`, pad its head size with zeros to `width`, and make its last dimension
    contiguous.
    """
    x = x.to(dtype)
    if x.shape[2] != width:
        return F.pad(x, (0, width - x.shape[2]))
    return x if x.stride(2) == 1 else x.contiguous()


def _grouped(x: Tensor, num_key_heads: int) -> Tensor:
    """View [T, H, ...] as [Hkv, H / Hkv, T, ...]: the kernel treats the Hkv key heads as its batch dimension."""
    return x.view(len(x), num_key_heads, x.shape[1] // num_key_heads, *x.shape[2:]).movedim(0, 2)


class _PieceTensors:
    """Tensors [Hkv, group, T, ...] whose token ranges ("pieces") are read and written.

    Hkv is the number of key heads, `group` the number of query heads per key head, and T the number of tokens.
    """

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = tensors

    def take(self, starts: list[int], length: int) -> list[Tensor]:
        """Return n token ranges of each tensor [Hkv, group, T, ...]: `length` tokens from each of n `starts` on.

        A result is [Hkv · n, group, length, ...], with `group` query heads for each of Hkv key heads; a view if n is 1.
        """
        if len(starts) == 1:
            return [x[:, :, starts[0] : starts[0] + length] for x in self.tensors]
        index, n = _token_index(starts, length), len(starts)
        return [
            x.index_select(2, index).view(*x.shape[:2], n, length, *x.shape[3:]).movedim(2, 1).flatten(0, 1)
            for x in self.tensors
        ]

    def put(self, pieces: Sequence[Tensor], starts: list[int], length: int, *, add: bool = False) -> None:
        """Write n token ranges of each tensor [Hkv, group, T, ...]: `length` tokens from each of n `starts` on.

        `pieces` holds the new values [Hkv · n, group, length, ...] for each tensor. If `add` is True, the new values
        are added to the old ones.
        """
        index = None if len(starts) == 1 else _token_index(starts, length)
        for x, piece in zip(self.tensors, pieces, strict=True):
            if index is None:
                place = x[:, :, starts[0] : starts[0] + length]
                place.add_(piece) if add else place.copy_(piece)
            else:
                values = piece.view(x.shape[0], -1, *piece.shape[1:]).movedim(1, 2).flatten(2, 3)
                x.index_add_(2, index, values) if add else x.index_copy_(2, index, values)


def _token_index(starts: list[int], length: int) -> Tensor:
    return (torch.tensor(starts)[:, None] + torch.arange(length)).flatten()


def _blocks(calls: list[_Call], spec: AttentionSpec) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield the slice of queries, the slice of keys and the mask [queries, keys] of each piece, for attention with a
    soft cap.

    A piece is some queries of a segment and the keys they see.
    """
    for shape, (query,), (key,) in calls:
        yield slice(query, query + shape.queries), slice(key, key + shape.keys), _visible(shape, spec)


def _visible(shape: _Shape, spec: AttentionSpec) -> Tensor:
    return reference.visible_keys(shape.queries, shape.keys, spec, torch.device("cpu"), diagonal=shape.diagonal)


def _masking(shape: _Shape, spec: AttentionSpec, like: Tensor) -> tuple[bool, Tensor | None]:
    """Return the kernel's arguments (causal flag, mask) for pieces of this shape.

    The flag is True if the kernel's own causal mask fits. Otherwise, the mask [queries, keys] is added to the scores.
    The mask is None if every query sees every key.
    """
    if shape.diagonal is None:
        return False, None
    if shape.diagonal == 0 and (spec.window is None or shape.queries <= spec.window):
        return True, None
    return False, like.new_zeros(shape.queries, shape.keys).masked_fill_(~_visible(shape, spec), -torch.inf)


BACKEND = FusedCPU()
