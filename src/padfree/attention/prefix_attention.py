"""Attention over a pack whose samples share prefixes. The samples form a tree, whose nodes are ranges of the pack.

In this example, the nodes a and b continue the prefix p. The queries of a node attend to copies of the keys of its
*path* (its ancestors and the node itself):

    queries    p p p | a a       | b b b
    keys       p p p | p p p a a | p p p b b b

The usual kernels work unchanged. The backward pass sums the gradients of the copies.

A long node that many nodes continue is a *long prefix*, whose keys the backward pass does not copy. A separate call
computes the gradients between these keys and the queries of all descendants.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from padfree.arrays import concatenated_ranges
from padfree.attention.backend import PAGE_SIZE, AttentionBackend, Pages
from padfree.attention.copies import group_copies, sum_copies
from padfree.attention.operator import backward_shapes, forward_shapes, recomputed_gradients
from padfree.attention.selection import BACKENDS, choose_backend
from padfree.attention.sinks import apply_sinks, sinks_gradient
from padfree.attention.spec import AttentionSpec
from padfree.batch import PrefixKeys
from padfree.prefix_tree import (
    Indices,
    first_positions,
    page_counts,
    path_copies,
    prefix_pages,
    prefix_ranges,
    subtree_ends,
)
from padfree.segments import Segments

PREFIX_ATTENTION = "padfree::prefix_attention"
BACKWARD = "padfree::prefix_attention_backward"

COSTS = {"cuda": (1.0, 16_384.0), "cpu": (0.0, 0.0)}
"""By device type: the cost of a separate attention call for the keys of one shared prefix, in the backward pass.

The first value is the cost per query, and the second the cost per call. The unit is the cost of copying one key.
"""
MOST_LONG_PREFIXES = 8

PAGES_PAY = 16_384
"""Pages (blocks of keys that samples share) are used if at least this number of keys then need not be copied. On an
H200, copying this number of keys takes 0.03 ms per layer (8 key heads of size 128).
"""

# Where each group of arrays begins in `PrefixKeys`. WHOLE: the four arrays cu_seqlens, index, copy_index and offsets
# for the keys of whole paths. BELOW: the same four arrays for paths without their long prefixes. LONG_PREFIXES: one
# array, cu_seqlens of the long prefixes. PAGES: the three arrays tokens, table and lengths.
WHOLE, BELOW, LONG_PREFIXES, PAGES, NUM_ARRAYS = 0, 4, 8, 9, 12

_NOTHING: Indices = np.zeros(0, dtype=np.int64)

_OPTIONS = (
    "Tensor cu_seqlens, Tensor max_seqlen, Tensor numbers, Tensor sizes, float scale, int? window, float? softcap, "
    "str backend"
)
_NUM_OPTIONS = 8

torch.library.define(PREFIX_ATTENTION, f"(Tensor q, Tensor k, Tensor v, Tensor? sinks, {_OPTIONS}) -> (Tensor, Tensor)")
torch.library.define(
    BACKWARD,
    f"(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor out, Tensor lse, {_OPTIONS}) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
)


def prepare_prefix_keys(
    segments: Segments, long_prefixes: Indices | None = None, *, paged: bool | None = None
) -> PrefixKeys | None:
    """Return arrays that say which keys each node of a prefix tree sees, or None if the samples share no prefix.

    `long_prefixes`: indices of at most 8 nodes whose keys the backward pass does not copy. `paged`: whether to prepare
    pages (blocks of keys that samples share). None: chosen automatically.
    """
    if segments.parents is None:
        return None
    parents, offsets, device = segments.parents, segments.offsets, segments.cu_seqlens.device
    if long_prefixes is None:
        long_prefixes = choose_long_prefixes(parents, offsets, *COSTS[device.type])
    whole, longest = _key_arrays(parents, offsets)
    below, longest_below = _key_arrays(parents, offsets, long_prefixes.tolist()) if len(long_prefixes) else ([], 0)
    ends = subtree_ends(parents)[long_prefixes]
    # For each long prefix, begin and end of two token ranges: the queries below the prefix, and the prefix itself
    ranges = np.zeros((MOST_LONG_PREFIXES, 4), dtype=np.int64)
    ranges[: len(long_prefixes)] = np.stack(
        [offsets[long_prefixes + 1], offsets[ends], offsets[long_prefixes], offsets[long_prefixes + 1]], axis=1
    )
    bounds = np.zeros((MOST_LONG_PREFIXES, 2, 2), dtype=np.int64)
    bounds[:, :, 1] = ranges[:, 1::2] - ranges[:, ::2]
    if paged is None:
        paged = device.type == "cuda" and pages_pay(parents, offsets)
    pages = [*prefix_pages(parents, offsets, PAGE_SIZE), np.diff(whole[0])] if paged else [_NOTHING] * 3
    arrays = [*whole, *(below or [_NOTHING] * len(whole)), bounds.ravel(), *(array.ravel() for array in pages)]
    sizes = [*(len(array) for array in arrays), longest, longest_below, *ranges.ravel().tolist()]
    return PrefixKeys(numbers=_concatenated(arrays, device), sizes=torch.tensor(sizes))


def choose_long_prefixes(parents: Indices, offsets: Indices, query_cost: float, call_cost: float) -> Indices:
    """Return the nodes of a prefix tree for which a separate attention call is cheaper than copying their keys.

    A call costs `call_cost`, plus `query_cost` for each query below the node. The unit is the cost of copying one key.
    """
    ends = subtree_ends(parents)
    copies = np.diff(offsets) * (ends - np.arange(len(parents)) - 1)
    gain = copies - query_cost * (offsets[ends] - offsets[1:]) - call_cost
    best = np.argsort(-gain, kind="stable")[:MOST_LONG_PREFIXES]
    chosen: Indices = np.sort(best[gain[best] > 0])
    return chosen


def pages_pay(parents: Indices, offsets: Indices) -> bool:
    lengths = np.diff(offsets)
    first = first_positions(parents, lengths)
    in_pages = PAGE_SIZE * page_counts(first, lengths, PAGE_SIZE)
    return int((first + lengths - in_pages).sum()) >= PAGES_PAY


def _key_arrays(parents: Indices, offsets: Indices, without: Sequence[int] = ()) -> tuple[list[Indices], int]:
    """Return four arrays that describe the path of each node, and the length of the longest path.

    A path is a node and its ancestors, without those in `without`. The arrays are the cu_seqlens of the paths, and the
    arrays of `Copies` that gather the paths.
    """
    ranges = prefix_ranges(parents, offsets, without)
    lengths = ranges.lengths(len(parents))
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)])
    longest = int(lengths.max(initial=0))
    if cu_seqlens[-1] == offsets[-1]:  # each token occurs once, so every node sees only its own tokens
        return [cu_seqlens, *[_NOTHING] * 3], longest
    index = concatenated_ranges(ranges.begin, ranges.end - ranges.begin)
    found = group_copies(index, int(offsets[-1])) if without else path_copies(parents, offsets)
    return [cu_seqlens, index, *found], longest


ALIGNED = 32
"""`_concatenated` joins several arrays in one tensor. Each array starts at a multiple of this number, because kernels
read several numbers at once.
"""


def _concatenated(arrays: Sequence[Indices], device: torch.device) -> Tensor:
    """Concatenate arrays into one int32 tensor on the device, without synchronising with the device."""
    starts = _array_starts([len(array) for array in arrays])
    numbers: NDArray[np.int32] = np.zeros(starts[-1], dtype=np.int32)
    for array, start in zip(arrays, starts[:-1], strict=True):
        numbers[start : start + len(array)] = array
    tensor = torch.from_numpy(numbers)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def _array_starts(sizes: Sequence[int]) -> list[int]:
    """Return the start of each array in a concatenation of arrays with the given sizes, and the end of the last one."""
    return [0, *np.cumsum([-(-size // ALIGNED) * ALIGNED for size in sizes]).tolist()]


def prefix_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Segments,
    keys: PrefixKeys,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Compute causal attention in a pack with shared prefixes: each query sees the keys on its path in the prefix tree.

    q [T, H, d], k [T, Hkv, d], v [T, Hkv, dv] -> [T, H, dv]. `segments` are the nodes of the tree. `keys` comes from
    `prepare_prefix_keys`. Differentiable once.
    """
    scale = q.shape[2] ** -0.5 if scale is None else scale
    out, _ = torch.ops.padfree.prefix_attention(
        q.contiguous(), k.contiguous(), v.contiguous(), sinks, segments.cu_seqlens, segments.longest, keys.numbers,
        keys.sizes, scale, window, softcap, backend,
    )  # fmt: skip
    result: Tensor = out
    return result


class _LongPrefix(NamedTuple):
    queries: slice
    keys: slice
    segments_q: Segments
    segments_k: Segments


class _Pack(NamedTuple):
    """The arguments of an attention call other than q, k, v and sinks, such as which keys to copy for each node of the
    prefix tree.
    """

    backend: AttentionBackend
    queries: Segments
    keys: Segments
    copies: tuple[Tensor, ...]  # index, copy_index and offsets of `Copies`; () if each token occurs once
    long_prefixes: tuple[_LongPrefix, ...]
    pages: tuple[Tensor, Pages] | None  # the tokens that fill the pages, and the page table
    spec: AttentionSpec

    def take(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if not self.copies:
            return k, v
        return k.index_select(0, self.copies[0]), v.index_select(0, self.copies[0])

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if self.pages is None:
            return self.backend.forward(q, *self.take(k, v), self.queries, self.keys, self.spec)
        tokens, pages = self.pages
        k, v = (tensor.index_select(0, tokens).view(-1, PAGE_SIZE, *tensor.shape[1:]) for tensor in (k, v))
        return self.backend.paged_forward(q, k, v, self.queries, pages, self.spec)

    def sum(self, gradient: Tensor) -> Tensor:
        return sum_copies(gradient.contiguous(), *self.copies) if self.copies else gradient


def _prepare_pack(
    q: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: Tensor, numbers: Tensor, sizes: Tensor, scale: float,
    window: int | None, softcap: float | None, backend: str, *, backward: bool,
) -> _Pack:  # fmt: skip
    name = choose_backend(
        q.device, q.dtype, q.shape[2], value_dim=v.shape[2], softcap=softcap is not None, requested=backend
    )
    chosen = BACKENDS[name]

    def segments(cu_seqlens: Tensor, longest: int) -> Segments:
        # The offsets on the host stay empty for flash kernels, which read cu_seqlens on the device.
        offsets = np.zeros(0, np.int64)
        if chosen.capabilities.lengths_on_host:
            offsets = cu_seqlens.cpu().numpy().astype(np.int64)
        return Segments(cu_seqlens=cu_seqlens, offsets=offsets, max_seqlen=longest)

    lengths, longest, ranges = np.split(sizes.numpy(), [NUM_ARRAYS, NUM_ARRAYS + 2])
    starts = _array_starts(lengths.tolist())

    def array(number: int) -> Tensor:
        return numbers[starts[number] : starts[number] + int(lengths[number])]

    if window is not None and window >= longest[0]:
        window = None  # no path is longer than the window
    with_long_prefixes = backward and window is None and chosen.capabilities.raw_backward and bool(lengths[BELOW])
    first = BELOW if with_long_prefixes else WHOLE
    copies = tuple(array(first + number) for number in (1, 2, 3)) if lengths[first + 1] else ()
    queries = segments(cu_seqlens, int(max_seqlen))
    long_prefixes: list[_LongPrefix] = []
    if with_long_prefixes:
        for (q0, q1, k0, k1), cu_long_prefix in zip(
            ranges.reshape(-1, 4).tolist(), array(LONG_PREFIXES).view(-1, 2, 2), strict=True
        ):
            if k1 > k0:
                parts = segments(cu_long_prefix[0], q1 - q0), segments(cu_long_prefix[1], k1 - k0)
                long_prefixes.append(_LongPrefix(slice(q0, q1), slice(k0, k1), *parts))
    spec = AttentionSpec(scale=scale, causal=True, window=window, softcap=softcap)
    pages = None
    if not backward and lengths[PAGES] and chosen.reads_pages(q, spec):
        table = array(PAGES + 1).view(int(lengths[PAGES + 2]), -1)
        pages = array(PAGES), Pages(table, array(PAGES + 2), int(longest[0]))
    return _Pack(
        backend=chosen,
        queries=queries,
        keys=segments(array(first), int(longest[int(with_long_prefixes)])) if copies else queries,
        copies=copies,
        long_prefixes=tuple(long_prefixes),
        pages=pages,
        spec=spec,
    )


def _attended(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, pack: _Pack) -> tuple[Tensor, Tensor]:
    out, lse = pack.forward(q, k, v)
    return (out, lse) if sinks is None else apply_sinks(out, lse, sinks)


@torch.library.impl(PREFIX_ATTENTION, ("cpu", "cuda"))
def _forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, cu_seqlens: Tensor, max_seqlen: Tensor, numbers: Tensor,
    sizes: Tensor, scale: float, window: int | None, softcap: float | None, backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    pack = _prepare_pack(
        q, v, cu_seqlens, max_seqlen, numbers, sizes, scale, window, softcap, backend, backward=False
    )  # fmt: skip
    out, lse = _attended(q, k, v, sinks, pack)
    return out.contiguous(), lse.T.contiguous()


@torch.library.impl(BACKWARD, ("cpu", "cuda"))
def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, out: Tensor, lse: Tensor, cu_seqlens: Tensor,
    max_seqlen: Tensor, numbers: Tensor, sizes: Tensor, scale: float, window: int | None, softcap: float | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    pack = _prepare_pack(
        q, v, cu_seqlens, max_seqlen, numbers, sizes, scale, window, softcap, backend, backward=True
    )  # fmt: skip
    dout, lse = dout.contiguous(), lse.T
    # A backend without a raw backward runs its forward pass again under autograd.
    if not pack.backend.capabilities.raw_backward:
        dq, dk, dv, dsinks = recomputed_gradients(partial(_attended, pack=pack), dout, q, k, v, sinks)
    else:
        taken = pack.take(k, v)
        dq, *gradients = pack.backend.backward(dout, q, *taken, out, lse, pack.queries, pack.keys, pack.spec)
        dk, dv = (pack.sum(gradient) for gradient in gradients)
        # Descendants directly follow a long prefix in the pack and see all of its keys: no copies and no mask.
        wholly = replace(pack.spec, causal=False, window=None)
        for below, above, segments_q, segments_k in pack.long_prefixes:
            parts = pack.backend.backward(
                dout[below], q[below], k[above], v[above], out[below], lse[below], segments_q, segments_k, wholly
            )
            for total, tokens, part in zip((dq, dk, dv), (below, above, above), parts, strict=True):
                total[tokens] += part
        dsinks = q.new_empty(0) if sinks is None else sinks_gradient(dout, out, lse, sinks)
    return dq.to(q.dtype).contiguous(), dk.to(k.dtype).contiguous(), dv.to(v.dtype).contiguous(), dsinks


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks, *rest = inputs
    tensors, ctx.options = rest[:4], rest[4:]
    ctx.save_for_backward(q, k, v, sinks, *output, *tensors)


def _gradients(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, sinks, *rest = ctx.saved_tensors
    *gradients, dsinks = torch.ops.padfree.prefix_attention_backward(dout, q, k, v, sinks, *rest, *ctx.options)
    return *gradients, None if sinks is None else dsinks, *([None] * _NUM_OPTIONS)


torch.library.register_fake(PREFIX_ATTENTION, forward_shapes)
torch.library.register_fake(BACKWARD, backward_shapes)
torch.library.register_autograd(PREFIX_ATTENTION, _gradients, setup_context=_save)
