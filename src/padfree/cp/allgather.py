"""Context parallelism by gathering keys: every query sees all its keys in one kernel call, so nothing is merged.

A rank receives from other ranks the keys and values that its pieces read (see `padfree.cp.keys`), arranges these and
its own keys in the order of its pieces, and calls the kernel once. If documents are short and whole, hardly anything is
sent; if one document is as long as the pack, everything is sent, as in an all-gather. Gradients of keys return the same
way, in the dtype of the keys, and are summed in float32 in rank order, so that the sum is deterministic.

`local_attention` is the computation without the communication. It also runs in one process that simulates the ranks
one after the other: `k_pool = k.index_select(0, prepare_keys(plan).pool_tokens)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from padfree.attention import varlen_attention
from padfree.cp.context_plan import ContextPlan
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
    **options: Any,
) -> Tensor:
    """Attention of q [T/world, H, d] to all its keys: k [T/world, Hkv, d], v [T/world, Hkv, dv] -> [T/world, H, dv]."""
    keys = prepare_keys(plan, causal=causal, window=window)
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
    """The attention of one rank's queries [T/world, H, d] to the keys of its pool [N, Hkv, d]; differentiable.

    A pool may be a tuple of two parts: own keys and received keys. `options` are those of `varlen_attention`: scale,
    softcap, sinks, backend.
    """
    keys = prepare_keys(plan, causal=causal, window=window)
    k, v = (_selected(keys, pool) for pool in (k_pool, v_pool))
    out: Tensor = varlen_attention(q, k, v, plan.queries, keys.segments, causal=causal, window=window, **options)
    return out


def _selected(keys: KeyPlan, pool: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    parts = pool if isinstance(pool, tuple) else (pool,)
    if keys.selection.is_everything:
        return parts[0]
    selected: Tensor = _SelectKeys.apply(keys, *parts)  # type: ignore[no-untyped-call]
    return selected


class _SelectKeys(torch.autograd.Function):
    """Pool [N, ...], whole or in two parts -> keys of the pieces [K, ...]."""

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
    """This rank's keys and values [T/world, ...] -> all keys and values that its pieces read [K, ...], exchanged."""

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
    """Exchange keys of several tensors in one all-to-all. Returns, for each tensor, the parts received from each rank.

    `leaving` holds slices of the tensors: for rank 0 of the first tensor, for rank 0 of the second, for rank 1 of the
    first, and so on. The results have the trailing shapes of the tensors in `like`.
    """
    shapes = [tensor.shape[1:] for tensor in like]
    width = sum(shape.numel() for shape in shapes)
    flat = torch.cat([part.reshape(-1) for part in leaving]) if leaving else like[0].new_empty(0)
    arrived = exchange_rows(flat, [count * width for count in send], [count * width for count in receive], group)
    parts = torch.split_with_sizes(arrived, [count * shape.numel() for count in receive for shape in shapes])
    return [
        tuple(part.view(-1, *shape) for part in parts[number :: len(shapes)]) for number, shape in enumerate(shapes)
    ]
