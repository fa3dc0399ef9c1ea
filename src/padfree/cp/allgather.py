"""Context parallelism by gathering keys: each rank receives all keys and values that its queries see.

A rank calls the attention kernel once, so no partial results are merged. A rank receives keys only for documents
(segments of the pack) that are divided over ranks.

In the backward pass, the gradients of received keys and values return to the rank that owns the keys. This rank sums
the gradients in float32 and in rank order, so the sums are deterministic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from padfree.attention import varlen_attention
from padfree.attention.later_keys import attend_with_later_keys
from padfree.attention.selection import key_block
from padfree.cp.context_plan import ContextPlan
from padfree.cp.image_blocks import ImageBlocks, checked, receive_later_keys
from padfree.cp.keys import KeyPlan, prepare_keys
from padfree.distributed import exchange_rows

__all__ = ["attend_allgather", "local_attention", "prepare_keys"]


def attend_allgather(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: ContextPlan,
    group: ProcessGroup,
    *,
    causal: bool,
    window: int | None,
    image_blocks: ImageBlocks | None = None,
    **options: Any,
) -> Tensor:
    """Compute attention of this rank's queries q [T/world, H, d] to all keys that they see, on any rank of `group`.

    k [T/world, Hkv, d] and v [T/world, Hkv, dv] are this rank's keys and values. Returns [T/world, H, dv].
    """
    keys = _keys_of(plan, causal, window, options)
    if image_blocks is not None:
        options = checked({**options, "causal": causal})
        later = receive_later_keys(k, v, image_blocks, plan, group)
        k, v = _GatherKeys.apply(keys, group, k, v)  # type: ignore[no-untyped-call]
        return attend_with_later_keys(q, k, v, plan.queries, keys.segments, *later, window=window, **options)
    if keys.quiet:
        return local_attention(q, k, v, plan, causal=causal, window=window, **options)
    k, v = _GatherKeys.apply(keys, group, k, v)  # type: ignore[no-untyped-call]
    out: Tensor = varlen_attention(q, k, v, plan.queries, keys.segments, causal=causal, window=window, **options)
    return out


def local_attention(
    q: Tensor,
    k_pool: Tensor | tuple[Tensor, Tensor],
    v_pool: Tensor | tuple[Tensor, Tensor],
    plan: ContextPlan,
    *,
    causal: bool = True,
    window: int | None = None,
    **options: Any,
) -> Tensor:
    """Compute attention of one rank's queries q [T/world, H, d] to N keys, without communication; differentiable.

    `k_pool` [N, Hkv, d] and `v_pool` [N, Hkv, dv] hold the rank's own keys and values, then the received ones. Each may
    also be a tuple (own, received). Returns [T/world, H, dv].
    """
    keys = _keys_of(plan, causal, window, options)
    k, v = (_selected(keys, pool) for pool in (k_pool, v_pool))
    out: Tensor = varlen_attention(q, k, v, plan.queries, keys.segments, causal=causal, window=window, **options)
    return out


def _keys_of(plan: ContextPlan, causal: bool, window: int | None, options: Mapping[str, Any]) -> KeyPlan:
    block = key_block(options.get("backend", "auto"))
    return prepare_keys(plan, causal=causal, window=window, key_block=block)


def _selected(keys: KeyPlan, pool: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    parts = pool if isinstance(pool, tuple) else (pool,)
    if keys.selection.is_everything:
        return parts[0]
    selected: Tensor = _SelectKeys.apply(keys, *parts)  # type: ignore[no-untyped-call]
    return selected


class _SelectKeys(torch.autograd.Function):
    """Select, from a pool of N keys, the K keys that this rank's queries read.

    The pool is one tensor, or two: the rank's own keys and the keys received from other ranks.
    """

    @staticmethod
    def forward(ctx: Any, keys: KeyPlan, *pool: Tensor) -> Tensor:
        ctx.keys, ctx.sizes = keys, [len(part) for part in pool]
        own, *sizes = keys.selection.sizes
        if len(pool) == 1:
            return keys.selection.take(*torch.split_with_sizes(pool[0], [own, *sizes]))
        return keys.selection.take(pool[0], *torch.split_with_sizes(pool[1], sizes))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        parts = ctx.keys.selection.summed_apart(gradient)
        return None, *(parts if len(ctx.sizes) == 2 else (torch.cat(parts),))


class _GatherKeys(torch.autograd.Function):
    """Exchange keys and values between ranks: [T/world, ...] -> [K, ...].

    The inputs are the keys and values of this rank's tokens. The outputs are the K keys and values that this rank's
    queries see.
    """

    @staticmethod
    def forward(ctx: Any, keys: KeyPlan, group: ProcessGroup, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        ctx.keys, ctx.group = keys, group
        k, v = k.contiguous(), v.contiguous()
        leaving = [tensor.narrow(0, *run) for runs in keys.leaving for tensor in (k, v) for run in runs]
        k_received, v_received = _exchanged(leaving, (k, v), keys.send, keys.receive, group)
        return keys.selection.take(k, *k_received), keys.selection.take(v, *v_received)

    @staticmethod
    def backward(ctx: Any, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        keys: KeyPlan = ctx.keys
        totals = [keys.selection.summed_apart(gradient) for gradient in (dk, dv)]
        by_owner = [torch.split_with_sizes(others, keys.receive) for _, others in totals]
        leaving = [part for parts in zip(*by_owner, strict=True) for part in parts]
        returned = _exchanged(leaving, (dk, dv), keys.receive, keys.send, ctx.group)
        for (own, _), others in zip(totals, returned, strict=True):
            total = own.index_select(0, keys.read_elsewhere)
            total = total.to(torch.promote_types(own.dtype, torch.float32))
            for places, other in zip(keys.returning, others, strict=True):
                if len(places):
                    total.index_add_(0, places, other.to(total.dtype))
            own.index_copy_(0, keys.read_elsewhere, total.to(own.dtype))
        return None, None, totals[0][0], totals[1][0]


def _exchanged(
    leaving: Sequence[Tensor], like: Sequence[Tensor], send: Sequence[int], receive: Sequence[int], group: ProcessGroup
) -> list[tuple[Tensor, ...]]:
    """Exchange slices of several tensors with all ranks in one all-to-all. Return, for each tensor, the slices received
    from rank 0, rank 1, and so on.

    `leaving` holds the slices to send, sorted by receiving rank and then by tensor. `send` and `receive` [world] are
    the numbers of tokens per rank.
    """
    shapes = [tensor.shape[1:] for tensor in like]
    width = sum(shape.numel() for shape in shapes)
    flat = torch.cat([part.reshape(-1) for part in leaving]) if leaving else like[0].new_empty(0)
    arrived = exchange_rows(flat, [count * width for count in send], [count * width for count in receive], group)
    parts = torch.split_with_sizes(arrived, [count * shape.numel() for count in receive for shape in shapes])
    return [
        tuple(part.view(-1, *shape) for part in parts[number :: len(shapes)]) for number, shape in enumerate(shapes)
    ]
