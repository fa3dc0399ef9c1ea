"""Decode attention with the same output bits as the trainer's attention, for `rollout.exact`.

The trainer's kernel reads keys in blocks of `PAGE_SIZE`. Its output bits depend on where the blocks begin. The KV cache
therefore has pages of `PAGE_SIZE` keys, and each prompt begins on a new page.

Responses to one prompt share its full pages. If the prompt's last page is not full, each response gets a copy of it.
For example, with pages of 4 keys, a prompt of 5 keys and a response of 4 keys:

    shared page     p p p p     p: key of the prompt
    own pages       p r r r     r: key of the response
                    r
"""

from __future__ import annotations

import functools
import importlib.util
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from padfree.attention.backend import PAGE_SIZE, Pages
from padfree.attention.selection import BACKENDS, choose_backend
from padfree.attention.sinks import apply_sinks
from padfree.attention.spec import AttentionSpec
from padfree.rollout.engines.in_process.sampled_tokens import (
    ACTIVE,
    NUM_ATTENTION_FIELDS,
    OWN,
    PROMPT,
    STORED,
    WRITTEN,
)
from padfree.segments import Segments

COMPARED_LENGTHS = (2000, 1000, 700, 300, 95, 1)
"""Lengths of the samples in the random pack with which `has_bits_of_trainer` compares sampler and trainer."""


class StepKeys(NamedTuple):
    """The cached keys that each of L responses sees in a decode step. The KV cache has pages of `PAGE_SIZE` keys.

    `place`: the cache index of the new key. `table`: the pages that the response sees. `lengths`: the number of keys
    that the response sees, including the new key.
    """

    place: Tensor  # [L] int64
    table: Tensor  # [L, m] int32
    lengths: Tensor  # [L] int32


def step_keys(slots: Tensor, capacity: int, longest: int) -> StepKeys:
    """Return the cached keys that each response sees in a decode step. The result is the same for all layers.

    `slots`: see `decode_attention`. `capacity`: number of keys in the cache. `longest`: maximum number of keys of a
    response before the new key.
    """
    assert capacity % PAGE_SIZE == 0
    active = slots[ACTIVE] != 0
    before = torch.where(active, slots[STORED] + slots[WRITTEN], 0)
    place = torch.where(active, slots[OWN] + slots[WRITTEN], capacity - 1)  # inactive slots store in the last entry
    shared = slots[STORED] // PAGE_SIZE  # [L] whole pages of the prompt
    own = slots[OWN] // PAGE_SIZE
    page = torch.arange(longest // PAGE_SIZE + 1, device=slots.device)  # [m]
    table = torch.where(
        page < shared[:, None], slots[PROMPT][:, None] // PAGE_SIZE + page, own[:, None] + page - shared[:, None]
    )
    # Entries after a slot's last page are never read, but must be pages of the cache.
    last = capacity // PAGE_SIZE - 1
    table = torch.where(active[:, None], table.clamp(0, last), last)
    return StepKeys(place, table.int(), (before + 1).int())


@torch.library.custom_op("padfree::store_keys", mutates_args=("keys", "values"))
def store_keys(keys: Tensor, values: Tensor, indices: Tensor, k: Tensor, v: Tensor) -> None:
    """Store k and v [T, Hkv, d] at `indices` [T] of the cache [M, Hkv, d]."""
    keys.index_copy_(0, indices, k)
    values.index_copy_(0, indices, v)


@store_keys.register_fake
def _nothing(keys: Tensor, values: Tensor, indices: Tensor, k: Tensor, v: Tensor) -> None:
    return None


@torch.library.custom_op("padfree::exact_decode_attention", mutates_args=("keys", "values"))
def exact_decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    sinks: Tensor | None,
    scale: float,
    window: int | None,
    softcap: float | None,
    longest: int,
    backend: str,
) -> Tensor:
    """Return the attention output [L, H, dv] of one new token per response. Store `k` and `v` in the cache.

    The output has the same bits as that of the trainer's backend, named `backend`. Other arguments: see
    `decode_attention`.
    """
    name = choose_backend(
        q.device, q.dtype, q.shape[2], value_dim=v.shape[2], softcap=softcap is not None, requested=backend
    )
    if window is not None and window > longest:  # all keys are seen; the trainer leaves such a window out too
        window = None
    spec = AttentionSpec(scale=scale, window=window, softcap=softcap)
    simple = sinks is None and v.shape == k.shape
    # The Triton kernel repeats the arithmetic of flash-attn-4. Otherwise, the trainer's own kernel is used.
    if simple and has_bits_of_trainer(name, q.shape[1], k.shape[1:], spec, q.dtype, q.device):
        from padfree.rollout.engines.in_process.triton_exact_attention import attend

        return attend(q, k, v, keys, values, slots, scale, window)
    place, table, lengths = step_keys(slots, len(keys), longest)
    store_keys(keys, values, place, k, v)
    count = len(q)
    ends = torch.arange(count + 1, dtype=torch.int32, device=q.device)
    queries = Segments(cu_seqlens=ends, offsets=np.arange(count + 1), max_seqlen=1)
    pages = Pages(table=table, lengths=lengths, longest=longest + 1)
    paged_k, paged_v = (cached.view(-1, PAGE_SIZE, *cached.shape[1:]) for cached in (keys, values))
    out, lse = BACKENDS[name].paged_forward(q, paged_k, paged_v, queries, pages, spec)
    return (out if sinks is None else apply_sinks(out, lse, sinks)[0]).contiguous()


@exact_decode_attention.register_fake
def _shapes(q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1], v.shape[2])


def has_bits_of_trainer(
    backend: str,
    num_heads: int,
    key_shape: tuple[int, ...],
    spec: AttentionSpec,
    dtype: torch.dtype,
    device: torch.device,
) -> bool:
    """Return whether the Triton kernel for decode steps gives the same output bits as the trainer's attention.

    `key_shape`: number and size of the key heads. The first call runs both kernels, so make it before a CUDA graph is
    captured.
    """
    heads, size = key_shape
    if backend != "fa4" or spec.softcap is not None or size & (size - 1) or dtype != torch.bfloat16:
        return False
    return importlib.util.find_spec("triton") is not None and _compared(
        backend, num_heads, heads, size, spec.scale, spec.window, device
    )


@functools.cache
@torch.no_grad()
def _compared(
    backend: str, num_heads: int, heads: int, size: int, scale: float, window: int | None, device: torch.device
) -> bool:
    """Return whether decode attention gives all tokens of a pack the same output bits as the trainer's attention.

    In the decode step, each token of the pack is the new token of a separate slot.
    """
    from padfree.rollout.engines.in_process.triton_exact_attention import attend

    generator = torch.Generator(device).manual_seed(0)
    total = sum(COMPARED_LENGTHS)
    q, k, v = (
        torch.randn(total, count, size, device=device, generator=generator).bfloat16()
        for count in (num_heads, heads, heads)
    )
    segments = Segments.from_lengths(COMPARED_LENGTHS, device=device)
    spec = AttentionSpec(scale=scale, window=window)
    expected, _ = BACKENDS[backend].forward(q, k, v, segments, segments, spec)
    starts = torch.tensor(segments.offsets[:-1], device=device).repeat_interleave(
        torch.tensor(COMPARED_LENGTHS, device=device)
    )
    slots = torch.zeros(NUM_ATTENTION_FIELDS, total, dtype=torch.int64, device=device)
    slots[PROMPT], slots[OWN], slots[ACTIVE] = starts, torch.arange(total, device=device), 1
    slots[STORED] = slots[OWN] - starts
    return torch.equal(attend(q, k, v, k.clone(), v.clone(), slots, scale, window), expected)
