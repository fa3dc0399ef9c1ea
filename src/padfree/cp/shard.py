"""Divide one pack over context ranks (ranks that share a pack), and gather values from the ranks again.

In this example, 4 ranks share the samples A, B and C and the padding tokens p:

    the whole pack                         A A A A A B B B C C C C C p p p
    the shard of rank 0 ("contiguous")     A A A A

Labels (the next tokens) are set before a pack is divided. A rank can therefore score its tokens alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, get_args

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from padfree.arrays import concatenated_ranges, need_whole
from padfree.attention.copies import copies_of
from padfree.attention.prefix_attention import prepare_prefix_keys
from padfree.batch import AttnContext, LocalBatch, LocalEntries, PackedBatch, need_tensor
from padfree.choices import ContextMethod, LayoutKind
from padfree.cp.context_plan import ContextPlan
from padfree.cp.image_blocks import ImageBlocks
from padfree.cp.image_owners import local_images
from padfree.cp.keys import prepare_keys
from padfree.cp.layout import make_layout
from padfree.cp.ranges import to_device
from padfree.cp.ring import prepare_steps
from padfree.cp.ulysses import prepare_prefix_attention
from padfree.distributed import all_gather_rows, reduce_scatter_rows
from padfree.errors import UserError
from padfree.kept_sets import KeptSets

METHODS: tuple[ContextMethod, ...] = get_args(ContextMethod)


def shard(
    batch: PackedBatch,
    *,
    world: int = 1,
    rank: int = 0,
    group: ProcessGroup | None = None,
    kind: LayoutKind = "balanced",
    method: str = "allgather",
    backend: str = "auto",
) -> LocalBatch:
    """Return the part of a pack that belongs to context rank `rank`.

    `group`: the process group of the context ranks. Attention needs it if `world` is more than 1. `kind`: the layout,
    which assigns tokens to ranks.
    """
    if method not in METHODS:
        raise UserError("method", "is unknown", f"choose one of {', '.join(METHODS)}", value=method)
    if not isinstance(batch, PackedBatch):
        raise UserError("batch", f"got a {type(batch).__name__}", "give a batch that padfree.pack returned")
    need_whole("world", world, 1, "give 1 or more ranks")
    need_whole("rank", rank, 0, f"give a rank from 0 to {world - 1}")
    if not rank < world:
        raise UserError(
            "rank", f"{rank} is out of range for {world} context ranks", f"give a rank from 0 to {world - 1}"
        )
    if group is not None and (group.size(), group.rank()) != (world, rank):
        raise UserError(
            "group",
            f"this process is rank {group.rank()} of {group.size()} in the group, not {rank} of {world}",
            "set rank and world to this process's rank in the context group and the size of this group",
        )
    blocks = None
    if batch.images is not None:
        blocks = ImageBlocks(batch.images.tokens, batch.segments, batch.input_ids.device)
    if world == 1:
        context = AttnContext(
            segments=batch.segments, backend=backend, method=method, group=group,
            prefix_keys=prepare_prefix_keys(batch.segments), image_blocks=blocks,
        )  # fmt: skip
        return _local(batch, context, None)
    layout = make_layout(batch.segments, world, kind)
    plan = ContextPlan(layout, batch.segments, rank, batch.input_ids.device)
    if method == "allgather":
        prepare_keys(plan)
    elif method == "ring":
        prepare_steps(plan)
    elif method == "ulysses":
        prepare_prefix_attention(plan)
    context = AttnContext(
        segments=batch.segments, backend=backend, method=method, layout=layout, rank=rank, group=group, plan=plan,
        image_blocks=blocks,
    )  # fmt: skip
    return _local(batch, context, plan.own)


def _local(batch: PackedBatch, context: AttnContext, own: Tensor | None) -> LocalBatch:
    def chosen(tensor: Tensor, index: Tensor | None) -> Tensor:
        return tensor if index is None else tensor.index_select(0, index)

    entries, labelled = None, own
    if batch.entries is not None:
        entries = _local_entries(batch, context)
        labelled = None if own is None else to_device(entries.numbers, own.device)
    fields: dict[str, Any] = {
        **{field: chosen(getattr(batch, field), own) for field in PackedBatch.PACK_FIELDS},
        **{field: chosen(getattr(batch, field), labelled) for field in PackedBatch.LABEL_FIELDS},
    }
    if batch.routes is not None:
        context = replace(context, routes=chosen(batch.routes, own))
    rotary = batch.rotary_positions
    return LocalBatch(
        **fields,
        context=context,
        images=None if batch.images is None else local_images(batch.images, context, batch.input_ids.device),
        rotary_positions=rotary if rotary is None or own is None else rotary.index_select(1, own),
        rollout=None if batch.rollout is None else batch.rollout.map(lambda values: chosen(values, labelled)),
        samples=batch.samples,
        entries=entries,
        kept=_local_kept(batch, context, entries),
    )


def _local_kept(batch: PackedBatch, context: AttnContext, entries: LocalEntries | None) -> KeptSets | None:
    """Return the kept sets of the labels on this rank, in the order of these labels.

    The kept set of a label is the part of the vocabulary that sampling could choose from.
    """
    if batch.kept is None:
        return None
    if entries is not None:
        return batch.kept.sets.take(entries.numbers)
    if context.layout is None:
        return batch.kept.sets
    starts, ends = context.layout.starts[context.rank], context.layout.ends[context.rank]
    numbers = np.full(batch.num_tokens, -1)  # for each token of the pack: the number of its label, or -1
    numbers[batch.kept.positions] = np.arange(len(batch.kept.positions))
    own = numbers[concatenated_ranges(starts, ends - starts)]
    return batch.kept.sets.take(own[own >= 0])


def _local_entries(batch: PackedBatch, context: AttnContext) -> LocalEntries:
    """Return the entries (tokens to score) of the pack that belong to this rank.

    An entry belongs to the rank that holds the position whose logits predict the token.
    """
    assert batch.entries is not None
    positions, device = batch.entries.positions, batch.input_ids.device
    if context.layout is None:
        return LocalEntries(numbers=np.arange(len(positions)), positions=copies_of(positions, batch.num_tokens, device))
    share = batch.num_tokens // context.world
    local_index = np.full(batch.num_tokens, -1)  # for each token of the pack: its index on this rank, or -1
    starts, ends = context.layout.starts[context.rank], context.layout.ends[context.rank]
    local_index[concatenated_ranges(starts, ends - starts)] = np.arange(share)
    numbers = np.flatnonzero(local_index[positions] >= 0)
    return LocalEntries(numbers=numbers, positions=copies_of(local_index[positions[numbers]], share, device))


def gather_tokens(
    values: Tensor, context: AttnContext, *, loss: Literal["replicated", "partial"] = "replicated"
) -> Tensor:
    """Gather values [T/world, ...] of all ranks to [T, ...] in pack order. Collective and differentiable.

    `loss`: "replicated" if every rank computes the same loss, "partial" if each rank computes one term of the loss.
    In both cases, the caller must sum the parameter gradients over the ranks.
    """
    if loss not in ("replicated", "partial"):
        raise UserError("loss", "is unknown", "choose 'replicated' or 'partial'", value=loss)
    need_tensor("values", values)
    expected = context.segments.num_tokens // context.world
    if values.shape[:1] != (expected,):
        raise UserError(
            "values",
            f"has shape {tuple(values.shape)}, but this rank has {expected} tokens",
            "give one value per token",
        )
    if context.layout is None:
        return values
    plan = context.plan
    assert isinstance(plan, ContextPlan)
    gathered: Tensor = _GatherTokens.apply(  # type: ignore[no-untyped-call]
        values, plan, need_group(context), loss == "partial"
    )
    return gathered


def sum_over_context(values: Tensor, context: AttnContext) -> Tensor:
    """Sum a tensor over the ranks that share a pack, without gradients."""
    if context.world == 1:
        return values
    total = values.clone()
    dist.all_reduce(total, group=context.group)
    return total


def need_group(context: AttnContext) -> ProcessGroup:
    """Return the process group of the context ranks, or raise a `UserError` if it is not set."""
    if context.group is None:
        raise UserError(
            "group",
            f"is not set for {context.world} context ranks",
            "pass the process group of the context ranks to shard()",
        )
    group: ProcessGroup = context.group
    return group


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, plan: ContextPlan, group: ProcessGroup, partial: bool) -> Tensor:
        ctx.plan, ctx.group, ctx.partial = plan, group, partial
        return plan.to_pack_order(all_gather_rows(values, group))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        plan: ContextPlan = ctx.plan
        if not ctx.partial:  # all ranks have the same gradient
            return gradient.index_select(0, plan.own), None, None, None
        # Each rank has the gradient of one term of the loss. Sum the gradients over the ranks.
        wide = plan.to_rank_order(gradient).to(torch.promote_types(gradient.dtype, torch.float32))
        return reduce_scatter_rows(wide, ctx.group).to(gradient.dtype), None, None, None
