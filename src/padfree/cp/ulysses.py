"""Ulysses context parallelism: exchange tokens for heads before attention, and heads for tokens after it.

For a pack of T tokens on `world` ranks, queries with H heads of size d are exchanged like this:

    [T/world, H, d] (some tokens, all heads)  ->  [T, H/world, d] (all tokens, some heads)

Each rank then computes attention as a single device does, so every mask and window is supported.

The layout `contiguous` is slightly faster than other layouts, because tokens need no permutation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from padfree.attention import varlen_attention
from padfree.attention.prefix_attention import prefix_attention, prepare_prefix_keys
from padfree.batch import PrefixKeys
from padfree.cp.context_plan import ContextPlan
from padfree.cp.image_blocks import ImageBlocks, attend_whole_pack
from padfree.distributed import exchange_rows
from padfree.errors import UserError


def check_heads(num_heads: int, num_key_heads: int, world: int) -> None:
    if num_heads % world:
        raise UserError(
            "method",
            f"'ulysses' cannot divide {num_heads} heads over {world} context ranks",
            "choose a number of ranks that divides the number of heads, or method='allgather'",
        )
    if num_key_heads % world and world % num_key_heads:
        raise UserError(
            "method",
            f"'ulysses' cannot divide {num_key_heads} key heads over {world} context ranks",
            "choose a number of ranks that divides the key heads or is a multiple of them, or method='allgather'",
        )


def prepare_prefix_attention(plan: ContextPlan) -> PrefixKeys | None:
    """Return arrays that say which keys each node of the pack's prefix tree sees, or None if the samples share no
    prefix.
    """
    return plan.prepared("prefix keys", lambda: prepare_prefix_keys(plan.segments))


def attend_ulysses(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: ContextPlan,
    group: ProcessGroup,
    *,
    sinks: Tensor | None,
    image_blocks: ImageBlocks | None = None,
    **options: Any,
) -> Tensor:
    """Compute attention of this rank's queries q [T/world, H, d] to all keys that they see, on any rank of `group`.

    k [T/world, Hkv, d] and v [T/world, Hkv, dv] are this rank's keys and values. Returns [T/world, H, dv].
    """
    world = plan.world
    check_heads(q.shape[1], k.shape[1], world)
    copies = max(1, world // k.shape[1])  # with fewer key heads than ranks, several ranks get the same key head
    if copies > 1:
        k, v = (_RepeatHeads.apply(tensor, copies) for tensor in (k, v))  # type: ignore[no-untyped-call]
    q, k, v = _ToHeads.apply(plan, group, q, k, v)  # type: ignore[no-untyped-call]
    if sinks is not None:
        sinks = sinks.view(world, -1)[plan.rank]
    if image_blocks is not None:
        out = attend_whole_pack(q, k, v, image_blocks, sinks=sinks, **options)
    elif plan.segments.parents is not None:
        options.pop("causal")
        keys = prepare_prefix_attention(plan)
        assert keys is not None
        out = prefix_attention(q, k, v, plan.segments, keys, sinks=sinks, **options)
    else:
        out = varlen_attention(q, k, v, plan.segments, plan.segments, sinks=sinks, **options)
    mine: Tensor = _ToTokens.apply(plan, group, out)  # type: ignore[no-untyped-call]
    return mine


class _RepeatHeads(torch.autograd.Function):
    """Repeat each head `copies` times: [n, h, d] -> [n, h * copies, d]. Gradients are summed in float32."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, copies: int) -> Tensor:
        ctx.copies = copies
        return tensor.repeat_interleave(copies, dim=1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        num_tokens, _, dim = gradient.shape
        wide = torch.promote_types(gradient.dtype, torch.float32)
        total = gradient.reshape(num_tokens, -1, ctx.copies, dim).sum(dim=2, dtype=wide)
        return total.to(gradient.dtype), None


def _heads_of_all_tokens(plan: ContextPlan, group: ProcessGroup, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Exchange tensors between ranks: from all heads of some tokens to some heads of all tokens.

    Each tensor [T/world, h, d] becomes [T, h/world, d] in pack order.
    """
    world = plan.world
    # Rank r gets part r of the heads. Each tensor becomes [T/world, world, h/world * d]. The tensors are concatenated,
    # so that one exchange sends them all.
    parts = [tensor.reshape(tensor.shape[0], world, -1) for tensor in tensors]
    packed = torch.cat(parts, dim=2).transpose(0, 1).flatten(0, 1)  # [world * T/world, width]
    counts = [plan.pieces.share] * world
    pack = plan.to_pack_order(exchange_rows(packed, counts, counts, group))
    split = torch.split_with_sizes(pack, [part.shape[2] for part in parts], dim=1)
    return tuple(
        part.view(-1, tensor.shape[1] // world, tensor.shape[2]) for part, tensor in zip(split, tensors, strict=True)
    )


def _tokens_of_all_heads(plan: ContextPlan, group: ProcessGroup, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Exchange tensors between ranks: from some heads of all tokens to all heads of some tokens.

    Each tensor [T, h/world, d] in pack order becomes [T/world, h, d]: the inverse of `_heads_of_all_tokens`.
    """
    world, share = plan.world, plan.pieces.share
    parts = [tensor.flatten(1) for tensor in tensors]
    packed = plan.to_rank_order(torch.cat(parts, dim=1))  # [world * T/world, width]
    counts = [share] * world
    back = exchange_rows(packed, counts, counts, group).view(world, share, -1).transpose(0, 1)
    split = torch.split_with_sizes(back, [part.shape[1] for part in parts], dim=2)  # [T/world, world, h/world * d]
    return tuple(
        part.reshape(share, world * tensor.shape[1], tensor.shape[2])
        for part, tensor in zip(split, tensors, strict=True)
    )


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: ContextPlan, group: ProcessGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.plan, ctx.group = plan, group
        return _heads_of_all_tokens(plan, group, tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *_tokens_of_all_heads(ctx.plan, ctx.group, gradients)


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: ContextPlan, group: ProcessGroup, tensor: Tensor) -> Tensor:
        ctx.plan, ctx.group = plan, group
        return _tokens_of_all_heads(plan, group, (tensor,))[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, _heads_of_all_tokens(ctx.plan, ctx.group, (gradient,))[0]
