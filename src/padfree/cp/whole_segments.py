"""Move all tokens of a segment (sample) to one rank for a recurrent layer, and move the results back.

In this example, two ranks share a pack. A digit is a token of the segment with this number:

    before and after the layer     rank 0: 0 0 0 2 2 2 2     rank 1: 0 0 1 1 1 3 3
    inside the layer               rank 0: 0 0 0 0 0 3 3     rank 1: 1 1 1 2 2 2 2

A segment must not be longer than the number of tokens per rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from padfree.arrays import concatenated_ranges
from padfree.batch import AttnContext, Layout
from padfree.cp.context_plan import ContextPlan
from padfree.cp.layout import document_index
from padfree.cp.ranges import Indices, to_device
from padfree.cp.shard import need_group
from padfree.distributed import exchange_rows
from padfree.errors import UserError
from padfree.segments import Segments


def assign_segments(layout: Layout, segments: Segments) -> Indices:
    """Return the rank that gets each of the B samples of a pack, as an array [B]. Padding tokens are not a sample.

    Raises `UserError` if a sample is longer than a rank's share of the tokens (T / world).
    """
    lengths = segments.lengths[: segments.num_samples]
    share = layout.num_tokens // layout.world
    if lengths.max(initial=0) > share:
        raise UserError(
            "parallel.context",
            f"a recurrent layer needs each sample on one rank, but a sample has {lengths.max()} tokens, more than "
            f"the {share} of a rank ({layout.num_tokens} tokens over {layout.world} ranks)",
            "use fewer context ranks, more tokens per micro-batch, or shorter samples",
        )
    held = np.zeros((len(lengths), layout.world), dtype=np.int64)
    for rank in range(layout.world):
        document = document_index(layout.starts[rank], segments.offsets)
        real = document < len(lengths)
        np.add.at(held[:, rank], document[real], (layout.ends[rank] - layout.starts[rank])[real])
    ranks = np.zeros(len(lengths), dtype=np.int64)
    loads = np.zeros(layout.world, dtype=np.int64)
    # The longest sample comes first. It goes to the rank with the fewest tokens or, among several such ranks, to the
    # rank that holds most of the sample.
    for sample in np.argsort(-lengths, kind="stable"):
        fewest = np.flatnonzero(loads == loads.min())
        ranks[sample] = fewest[np.argmax(held[sample, fewest])]
        loads[ranks[sample]] += lengths[sample]
    return ranks


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Moves:
    """The tokens that one rank sends and receives, so that each segment (sample) is whole on one rank."""

    lengths: tuple[int, ...]  # lengths of the segments assigned to this rank, in pack order
    leaving: Indices  # indices of this rank's tokens to send: tokens for rank 0 first, then for rank 1, ...
    arriving: Indices  # for each received token, by sender: its index among the tokens of this rank's segments
    send: tuple[int, ...]  # [world] number of tokens sent to each rank
    receive: tuple[int, ...]  # [world] number of tokens received from each rank


def plan_moves(layout: Layout, segments: Segments, rank: int) -> Moves:
    ranks = assign_segments(layout, segments)
    goal = np.full(layout.num_tokens, -1, dtype=np.int64)
    real = int(segments.offsets[segments.num_samples])
    goal[:real] = np.repeat(ranks, segments.lengths[: segments.num_samples])
    held = [concatenated_ranges(starts, ends - starts) for starts, ends in zip(layout.starts, layout.ends, strict=True)]
    mine = np.flatnonzero(goal == rank)
    place = np.full(layout.num_tokens, -1, dtype=np.int64)
    place[mine] = np.arange(len(mine))
    leaving = [np.flatnonzero(goal[held[rank]] == other) for other in range(layout.world)]
    arriving = [place[tokens[goal[tokens] == rank]] for tokens in held]
    return Moves(
        lengths=tuple(segments.lengths[: segments.num_samples][ranks == rank].tolist()),
        leaving=np.concatenate(leaving),
        arriving=np.concatenate(arriving),
        send=tuple(len(places) for places in leaving),
        receive=tuple(len(places) for places in arriving),
    )


def mixer_bytes(layout: Layout, segments: Segments, *, width: int, element_size: int = 2) -> Indices:
    """Return the bytes [world] that each rank sends in the forward pass of one recurrent layer.

    The backward pass sends the same number of bytes. `width`: the number of values per token.
    """
    sent = np.zeros(layout.world, dtype=np.int64)
    for rank in range(layout.world):
        moves = plan_moves(layout, segments, rank)
        sent[rank] = sum(moves.send) - moves.send[rank] + sum(moves.receive) - moves.receive[rank]
    return sent * width * element_size


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Prepared:
    moves: Moves
    leaving: Tensor
    arriving: Tensor
    in_place: Tensor  # for each token of this rank's segments: its index among the received tokens


def _prepared(context: AttnContext) -> _Prepared:
    plan = context.plan
    assert isinstance(plan, ContextPlan)

    def prepare() -> _Prepared:
        moves = plan_moves(plan.layout, plan.segments, plan.rank)
        return _Prepared(
            moves=moves,
            leaving=to_device(moves.leaving, plan.device),
            arriving=to_device(moves.arriving, plan.device),
            in_place=to_device(np.argsort(moves.arriving), plan.device),
        )

    return plan.prepared("whole segments", prepare)


def to_whole_segments(values: Tensor, context: AttnContext) -> tuple[Tensor, tuple[int, ...]]:
    """Move values [T/world, ...] between ranks so that each segment (sample) is whole on one rank.

    Returns the values of the segments of this rank, and the lengths of these segments.
    """
    prepared = _prepared(context)
    moved: Tensor = _ToSegments.apply(values, prepared, need_group(context))  # type: ignore[no-untyped-call]
    return moved, prepared.moves.lengths


def from_whole_segments(values: Tensor, context: AttnContext) -> Tensor:
    """Move values of whole segments (samples) back to the ranks that held their tokens.

    This is the inverse of `to_whole_segments`. Returns [T/world, ...], with zeros for padding tokens.
    """
    prepared = _prepared(context)
    share = context.segments.num_tokens // context.world
    back: Tensor = _FromSegments.apply(values, prepared, need_group(context), share)  # type: ignore[no-untyped-call]
    return back


def _gathered(values: Tensor, prepared: _Prepared, group: ProcessGroup) -> Tensor:
    moves = prepared.moves
    arrived = exchange_rows(values.index_select(0, prepared.leaving), moves.send, moves.receive, group)
    return arrived.index_select(0, prepared.in_place)


def _returned(values: Tensor, prepared: _Prepared, group: ProcessGroup, share: int) -> Tensor:
    moves = prepared.moves
    arrived = exchange_rows(values.index_select(0, prepared.arriving), moves.receive, moves.send, group)
    whole = values.new_zeros(share, *values.shape[1:])
    return whole.index_copy_(0, prepared.leaving, arrived)


class _ToSegments(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, prepared: _Prepared, group: ProcessGroup) -> Tensor:
        ctx.prepared, ctx.group, ctx.share = prepared, group, len(values)
        return _gathered(values, prepared, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _returned(gradient, ctx.prepared, ctx.group, ctx.share), None, None


class _FromSegments(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, prepared: _Prepared, group: ProcessGroup, share: int) -> Tensor:
        ctx.prepared, ctx.group = prepared, group
        return _returned(values, prepared, group, share)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _gathered(gradient, ctx.prepared, ctx.group), None, None, None
