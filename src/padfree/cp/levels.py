"""Attention of a row whose samples share prefixes by merging: the other way, without copies of keys.

    nodes      0: p p p     1: a a     2: b b     3: c     4: d            3 and 4 hang on 2
    own        every query, causally to its own node
    level 0    a a b b c d       see p p p wholly
    level 1    c d               see b b wholly

The nodes below a node lie side by side behind it, so that all their queries are one segment and its keys are read once,
however many nodes read them. The parts are softmaxes over different keys, merged by their log-sum-exp exactly as the
blocks of a ring are: this is a ring whose block stands still, one step a level.

`path_attention` is what models use: it needs one kernel call, and is right for windows. This one is here to be measured
against it (`bench/shared_prefixes.py --attention`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from padfree.arrays import concatenated_ranges
from padfree.attention import apply_sinks, sinks_gradient
from padfree.batch import Segments
from padfree.cp.ranges import segments_of, select_ranges, to_device
from padfree.cp.ring import RingStep, ring_backward, ring_forward
from padfree.nodes import paths, subtree_ends


def prepare_levels(segments: Segments) -> tuple[RingStep, ...]:
    """The parts: own nodes first, then one for each level that has nodes below it."""
    assert segments.parents is not None
    device, offsets, total = segments.cu_seqlens.device, segments.offsets, segments.num_tokens
    own = segments_of(segments.lengths, device)
    everything = select_ranges(np.array([0]), np.array([total]), [total], device)
    steps = [RingStep(queries=None, segments_q=own, segments_k=own, keys=everything, causal=True)]
    ends = subtree_ends(segments.parents)
    depth = np.array([len(path) for path in paths(segments.parents)], dtype=np.int64)
    for level in range(1, int(depth.max(initial=0))):
        nodes = np.flatnonzero((depth == level) & (ends > np.arange(len(ends)) + 1))
        below = offsets[ends[nodes]] - offsets[nodes + 1]
        steps.append(
            RingStep(
                queries=to_device(concatenated_ranges(offsets[nodes + 1], below), device),
                segments_q=segments_of(below, device),
                segments_k=segments_of(offsets[nodes + 1] - offsets[nodes], device),
                keys=select_ranges(offsets[nodes], offsets[nodes + 1], [total], device),
                causal=False,
            )
        )
    return tuple(steps)


def attend_levels(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    steps: Sequence[RingStep],
    *,
    window: int | None = None,
    sinks: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """[T, H, d], [T, Hkv, d], [T, Hkv, dv] -> [T, H, dv]; differentiable once. `options`: scale, softcap, backend."""
    if window is not None:
        raise ValueError(f"window: {window} for prefixes that are merged; use path_attention, which has windows")
    out: Tensor = _LevelAttention.apply(q, k, v, sinks, steps, options)  # type: ignore[no-untyped-call]
    return out


class _Standing:
    """A ring of one: what is posted is what comes."""

    def post(self, *tensors: Tensor) -> None:
        self._tensors = tensors

    def collect(self) -> tuple[Tensor, ...]:
        return self._tensors


class _LevelAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        steps: Sequence[RingStep],
        options: dict[str, Any],
    ) -> Tensor:
        out, lse = ring_forward(q, k, v, steps, _Standing(), **options)
        if sinks is not None:
            out, lse = apply_sinks(out, lse, sinks)
        out = out.to(q.dtype)
        ctx.steps, ctx.options = steps, options
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        dq, dk, dv = ring_backward(dout, q, k, v, out, lse, ctx.steps, _Standing(), _Standing(), **ctx.options)
        dsinks = None if sinks is None else sinks_gradient(dout, out, lse, sinks)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks, None, None
