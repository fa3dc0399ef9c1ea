"""Ring context parallelism: keys and values travel from rank to rank, and no rank ever holds all of them.

For example, rank 1 of 4 computes with the keys of ranks 1, 0, 3 and 2, in this order. It skips a step in which its
queries see no keys. The results of the steps are merged in float32.

In the backward pass, keys and values go round once more, together with their gradients in float32. Each rank adds its
contribution. After `world` steps, the gradients are back on the rank that owns the keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from padfree.arrays import concatenated_ranges
from padfree.attention import apply_sinks, sinks_gradient, varlen_backward, varlen_forward
from padfree.cp.context_plan import ContextPlan
from padfree.cp.ranges import Indices, Selection, segments_of, select_ranges, to_device
from padfree.distributed import Ring
from padfree.errors import UserError
from padfree.segments import Segments


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RingStep:
    """One step of ring attention on one rank: which of the rank's queries see which keys.

    The keys are those of the *block* (the keys and values of one rank) that the rank holds in this step.
    """

    queries: Tensor | None  # the queries that see a key of the block; None if all do
    segments_q: Segments
    segments_k: Segments
    keys: Selection  # the selected keys of the block
    causal: bool


def prepare_steps(plan: ContextPlan, *, causal: bool = True) -> tuple[RingStep | None, ...]:
    """Return what this rank computes in each step of the ring, or None for a step in which it computes nothing."""
    return plan.prepared(
        ("ring", causal), lambda: tuple(_ring_step(plan, distance, causal) for distance in range(plan.world))
    )


def _ring_step(plan: ContextPlan, distance: int, causal: bool) -> RingStep | None:
    pieces, share = plan.pieces, plan.pieces.share
    mine, theirs = pieces.of(plan.rank), pieces.of((plan.rank - distance) % plan.world)
    document, start = pieces.document[mine], pieces.start[mine]
    # `border[i]` is the index in the block at which its i-th piece begins.
    border = np.concatenate([[0], np.cumsum(pieces.length[theirs])])
    in_pack_order = np.argsort(pieces.start[theirs])
    documents, starts = pieces.document[theirs][in_pack_order], pieces.start[theirs][in_pack_order]
    if pieces.ancestors is not None:
        assert causal
        return _path_step(plan, distance, border, in_pack_order)
    # The queries of a piece see all earlier pieces of their document, which are adjacent in a block.
    first = np.searchsorted(documents, document, side="left")
    if not causal:
        behind = np.searchsorted(documents, document, side="right")
    else:
        behind = np.searchsorted(starts, start, side="right" if distance == 0 else "left")  # right: includes this piece
    seen = behind > first
    if not seen.any():
        return None
    low = in_pack_order[first[seen]]
    begin, end = border[low], border[low + (behind - first)[seen]]
    length = pieces.length[mine]
    place = np.cumsum(length) - length
    return RingStep(
        queries=None if seen.all() else to_device(concatenated_ranges(place[seen], length[seen]), plan.device),
        segments_q=segments_of(length[seen], plan.device),
        segments_k=segments_of(end - begin, plan.device),
        keys=select_ranges(begin, end, [share], plan.device),
        causal=causal and distance == 0,
    )


def _path_step(plan: ContextPlan, distance: int, border: Indices, in_pack_order: Indices) -> RingStep | None:
    """Return the result of `_ring_step` for a pack in which samples share prefixes.

    `border[i]` is the index in the block at which its i-th piece (a range of one document) begins. `in_pack_order`
    sorts the pieces by pack index.
    """
    pieces, share = plan.pieces, plan.pieces.share
    mine, theirs = pieces.of(plan.rank), pieces.of((plan.rank - distance) % plan.world)
    assert pieces.ancestors is not None
    starts, lengths = pieces.start[theirs][in_pack_order], pieces.length[theirs]
    number: list[int] = []
    ranges: list[tuple[int, int]] = []
    for query, (node, start) in enumerate(zip(pieces.document[mine].tolist(), pieces.start[mine], strict=True)):
        # A piece sees all of its node's ancestors, and its own node up to itself. It sees itself only in the rank's own
        # block.
        seen = [(pieces.offsets[above], pieces.offsets[above + 1]) for above in pieces.ancestors[node]]
        seen.append((pieces.offsets[node], start + (distance == 0)))
        for begin, end in seen:
            low, high = np.searchsorted(starts, [begin, end], side="left")
            if low < high:
                first, last = in_pack_order[low], in_pack_order[high - 1]
                number.append(query)
                ranges.append((int(border[first]), int(border[last] + lengths[last])))
    if not ranges:
        return None
    begin, end = np.array(ranges, dtype=np.int64).T
    counts = np.bincount(number, end - begin, minlength=mine.stop - mine.start).astype(np.int64)
    seeing, length = counts > 0, pieces.length[mine]
    place = np.cumsum(length) - length
    queries = None if seeing.all() else to_device(concatenated_ranges(place[seeing], length[seeing]), plan.device)
    return RingStep(
        queries=queries,
        segments_q=segments_of(length[seeing], plan.device),
        segments_k=segments_of(counts[seeing], plan.device),
        keys=select_ranges(begin, end, [share], plan.device),
        causal=distance == 0,
    )


class RingLike(Protocol):
    """The interface of a ring of ranks: `post` sends tensors to the next rank, `collect` returns those of the previous
    rank.

    `padfree.distributed.Ring` implements this interface.
    """

    def post(self, *tensors: Tensor) -> None: ...
    def collect(self) -> tuple[Tensor, ...]: ...


class PlayedRing:
    """Simulates a ring for one rank, without a process group. The list `posted` keeps what the rank posts.

    `collect` returns the `blocks` (the keys and values of each rank) in the order in which they would arrive. Without
    `blocks`, it returns zeros in place of other ranks' gradients.
    """

    def __init__(self, rank: int, blocks: Sequence[tuple[Tensor, ...]] | None = None) -> None:
        self.rank, self.blocks = rank, blocks
        self.posted: list[tuple[Tensor, ...]] = []

    def post(self, *tensors: Tensor) -> None:
        self.posted.append(tensors)

    def collect(self) -> tuple[Tensor, ...]:
        if self.blocks is None:
            # `posted[i]` is then what this rank alone adds to the gradients of the keys of rank `rank - i`.
            return tuple(torch.zeros_like(tensor) for tensor in self.posted[-1])
        return self.blocks[(self.rank - len(self.posted)) % len(self.blocks)]


def ring_forward(
    q: Tensor, k: Tensor, v: Tensor, steps: Sequence[RingStep | None], ring: RingLike, **options: Any
) -> tuple[Tensor, Tensor]:
    """Compute attention of this rank's queries q [T/world, H, d] to the keys of all ranks, without attention sinks.

    `ring` passes the keys and values from rank to rank. Returns the output [T/world, H, dv] and the log-sum-exp
    [T/world, H] in float32.
    """
    block: tuple[Tensor, ...] = (k, v)
    out: Tensor | None = None
    lse: Tensor | None = None
    for number, step in enumerate(steps):
        last = number + 1 == len(steps)
        if not last:
            ring.post(*block)
        if step is not None:
            queries = q if step.queries is None else q.index_select(0, step.queries)
            k_step, v_step = (step.keys.take(tensor) for tensor in block)
            part, part_lse = varlen_forward(
                queries, k_step, v_step, step.segments_q, step.segments_k, causal=step.causal, window=None, **options
            )
            if out is None or lse is None:  # the first step includes every query
                out, lse = part.to(torch.promote_types(part.dtype, torch.float32)), part_lse
            else:
                out, lse = _merged(out, lse, part, part_lse, step.queries)
        if not last:
            block = ring.collect()
    assert out is not None
    assert lse is not None
    return out, lse


def _merged(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, queries: Tensor | None) -> tuple[Tensor, Tensor]:
    """Merge attention to one more block (the keys and values of one rank) into `out` and `lse`.

    `part` and `part_lse` are the output and the log-sum-exp for this block. They cover only the queries with the
    indices `queries`; None means all queries.
    """
    old, old_lse = (out, lse) if queries is None else (out.index_select(0, queries), lse.index_select(0, queries))
    new_lse = torch.logaddexp(old_lse, part_lse)
    new = old * (old_lse - new_lse).exp()[..., None] + part * (part_lse - new_lse).exp()[..., None]
    if queries is None:
        return new, new_lse
    return out.index_copy_(0, queries, new), lse.index_copy_(0, queries, new_lse)


def ring_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    steps: Sequence[RingStep | None],
    ring: RingLike,
    gradient_ring: RingLike,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of this rank's q, k and v in float32.

    `ring` passes keys and values from rank to rank, and `gradient_ring` their gradients. `dout` is the gradient of
    `out`. `out` and the log-sum-exp `lse` include the attention sinks.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    dq: Tensor | None = None
    block: tuple[Tensor, ...] = (k, v)
    for number, step in enumerate(steps):
        last = number + 1 == len(steps)
        if not last:
            ring.post(*block)
        added: list[Tensor] = []
        if step is not None:
            seen = [t if step.queries is None else t.index_select(0, step.queries) for t in (dout, q, out, lse)]
            k_step, v_step = (step.keys.take(tensor) for tensor in block)
            dq_step, *added = varlen_backward(
                seen[0],
                seen[1],
                k_step,
                v_step,
                seen[2],
                seen[3],
                step.segments_q,
                step.segments_k,
                causal=step.causal,
                window=None,
                **options,
            )
            if dq is None:  # the first step includes every query
                dq = dq_step.to(wide)
            elif step.queries is None:
                dq += dq_step
            else:
                dq.index_add_(0, step.queries, dq_step.to(wide))
        if number == 0:
            gradients = tuple(torch.zeros_like(tensor, dtype=wide) for tensor in block)
        else:
            gradients = gradient_ring.collect()  # the gradient of this block, summed over the ranks that had it before
        if step is not None:
            gradients = tuple(step.keys.add_to(total, part) for total, part in zip(gradients, added, strict=True))
        gradient_ring.post(*gradients)
        if not last:
            block = ring.collect()
    dk, dv = gradient_ring.collect()
    assert dq is not None
    return dq, dk, dv


def attend_ring(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: ContextPlan,
    group: ProcessGroup,
    *,
    causal: bool,
    window: int | None,
    sinks: Tensor | None,
    image_blocks: Any = None,
    **options: Any,
) -> Tensor:
    """Compute attention of this rank's queries q [T/world, H, d] to all keys that they see, on any rank of `group`.

    k [T/world, Hkv, d] and v [T/world, Hkv, dv] are this rank's keys and values. Returns [T/world, H, dv].
    """
    if image_blocks is not None:
        raise UserError(
            "method",
            "'ring' does not support image tokens that attend to each other",
            "use method='allgather' or 'ulysses'",
        )
    if window is not None:
        raise UserError(
            "method",
            f"'ring' does not support a window ({window} keys)",
            "use method='allgather', which sends only the keys inside the window",
        )
    steps = prepare_steps(plan, causal=causal)
    out: Tensor = _RingAttention.apply(q, k, v, sinks, steps, group, options)  # type: ignore[no-untyped-call]
    return out


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        steps: Sequence[RingStep | None],
        group: ProcessGroup,
        options: dict[str, Any],
    ) -> Tensor:
        out, lse = ring_forward(q, k, v, steps, Ring(group), **options)
        if sinks is not None:
            out, lse = apply_sinks(out, lse, sinks)
        out = out.to(q.dtype)
        ctx.steps, ctx.group, ctx.options = steps, group, options
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        rings = Ring(ctx.group), Ring(ctx.group, tag=1)
        dq, dk, dv = ring_backward(dout, q, k, v, out, lse, ctx.steps, *rings, **ctx.options)
        dsinks = None if sinks is None else sinks_gradient(dout, out, lse, sinks)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks, None, None, None
