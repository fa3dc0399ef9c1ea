"""The `flex` backend: PyTorch's flex attention on CUDA. It supports float32, and head sizes that flash kernels do not.

The attention mask of a pack is divided into blocks of 128 queries and 128 keys. Flex attention skips a block in which
no query sees a key, and reads no mask for a block in which every query sees every key. The host finds these blocks
without computing the whole mask.

The gradients come from autograd, which cannot compute the gradients of one block of keys alone. Ring attention needs
such gradients (`Capabilities.raw_backward`), so it cannot use this backend.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from padfree.attention.backend import HALF_TYPES, AttentionBackend, Capabilities, has_module
from padfree.attention.spec import AttentionSpec, key_ranges
from padfree.segments import Segments

BLOCK = 128


class Flex(AttentionBackend):
    name = "flex"
    capabilities = Capabilities(
        devices=("cuda",),
        dtypes=(*HALF_TYPES, torch.float32),
        head_dims=range(16, 257),
        any_value_dim=True,
        raw_backward=False,
        lengths_on_host=True,
        package="pip install triton",
    )

    def is_installed(self) -> bool:
        return has_module("triton")

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, segments_q: Segments, segments_k: Segments, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        from torch.nn.attention.flex_attention import AuxRequest

        out, auxiliary = _compiled()(
            *(x.transpose(0, 1)[None] for x in (q, k, v)),
            score_mod=None if spec.softcap is None else _softcapped(spec.softcap),
            block_mask=_cached_mask(_MaskKey(segments_q, segments_k, spec, q.device)),
            scale=spec.scale,
            enable_gqa=q.shape[1] != k.shape[1],
            return_aux=AuxRequest(lse=True),
            # Never use the decoding kernel, which would have to be compiled as well.
            kernel_options={"FORCE_USE_FLEX_ATTENTION": True},
        )
        return out[0].transpose(0, 1), auxiliary.lse[0].T

    def backward(self, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
        raise AssertionError("flex is differentiated by autograd")


@functools.cache
def _compiled() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    # With fullgraph, a failed compilation raises an error instead of running slowly and storing all scores [H, Tq, Tk].
    # Flex attention is compiled again for each head size and kind of mask, which exceeds PyTorch's default recompile
    # limit. A second soft cap would be compiled as a float that changes between calls, which flex attention cannot do.
    compiled = torch.compile(flex_attention, fullgraph=True)
    patched: Callable[..., Any] = torch._dynamo.config.patch(recompile_limit=64, specialize_float=True)(compiled)
    return patched


@functools.lru_cache(maxsize=16)
def _softcapped(softcap: float) -> Callable[..., Tensor]:
    def softcapped(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return softcapped


class _MaskKey:
    """The cache key of a block mask."""

    __slots__ = ("device", "hash", "segments_k", "segments_q", "spec")

    def __init__(self, segments_q: Segments, segments_k: Segments, spec: AttentionSpec, device: torch.device) -> None:
        self.segments_q, self.segments_k, self.spec, self.device = segments_q, segments_k, spec, device
        self.hash = hash((segments_q.offsets.tobytes(), segments_k.offsets.tobytes(), spec, device))

    def __hash__(self) -> int:
        return self.hash

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _MaskKey)
            and np.array_equal(self.segments_q.offsets, other.segments_q.offsets)
            and np.array_equal(self.segments_k.offsets, other.segments_k.offsets)
            and (self.spec, self.device) == (other.spec, other.device)
        )


@functools.lru_cache(maxsize=8)  # all layers of a model use the same few masks
def _cached_mask(key: _MaskKey) -> Any:
    return block_mask(key.segments_q, key.segments_k, key.spec, key.device)


def block_mask(segments_q: Segments, segments_k: Segments, spec: AttentionSpec, device: torch.device) -> Any:
    """Return the `BlockMask` for PyTorch's flex attention: each query sees the keys of its own segment that `spec`
    allows.
    """
    from torch.nn.attention.flex_attention import BlockMask

    first, end = key_ranges(segments_q, segments_k, spec)
    partial, full = block_table(first, end, segments_k.num_tokens)
    first_key, end_key = (torch.from_numpy(array.astype(np.int32)).to(device) for array in (first, end))

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key >= first_key[query]) & (key < end_key[query])

    return BlockMask.from_kv_blocks(
        *_ordered(partial, device),
        *_ordered(full, device),
        BLOCK_SIZE=BLOCK,
        mask_mod=visible,
        seq_lengths=(segments_q.num_tokens, segments_k.num_tokens),
    )


def block_table(
    first: NDArray[np.int64], end: NDArray[np.int64], num_keys: int
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return the partial and the full blocks of an attention mask, as two bool arrays [query blocks, key blocks].

    Query t sees the keys `first[t] <= key < end[t]`. A block is full if every query sees every key. It is partial if it
    is not full and some query sees a key.
    """
    num_blocks = -(-num_keys // BLOCK)
    touched = _queries_per_block(first // BLOCK, np.where(first < end, -(-end // BLOCK), first // BLOCK), num_blocks)
    covered = _queries_per_block(-(-first // BLOCK), np.maximum(end // BLOCK, -(-first // BLOCK)), num_blocks)
    full = covered == BLOCK  # an incomplete last block of queries or keys is never full
    return (touched > 0) & ~full, full


def _queries_per_block(first: NDArray[np.int64], end: NDArray[np.int64], num_blocks: int) -> NDArray[np.int64]:
    """Return an array [query blocks, key blocks]: how many queries of each query block see each key block.

    Query t sees the key blocks `first[t] <= block < end[t]`.
    """
    query_block = np.arange(len(first)) // BLOCK
    change = np.zeros((-(-len(first) // BLOCK), num_blocks + 1), dtype=np.int64)
    np.add.at(change, (query_block, first), 1)
    np.add.at(change, (query_block, end), -1)
    counts: NDArray[np.int64] = change.cumsum(axis=1)[:, :-1]
    return counts


def _ordered(table: NDArray[np.bool_], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return for each query block how many key blocks `table` marks, and the order of the key blocks: marked ones
    first.

    `table` is a mask [query blocks, key blocks].
    """
    counts = table.sum(axis=1, dtype=np.int32)
    order = np.argsort(~table, axis=1, kind="stable").astype(np.int32)
    return torch.from_numpy(counts)[None, None].to(device), torch.from_numpy(order)[None, None].to(device)


BACKEND = Flex()
