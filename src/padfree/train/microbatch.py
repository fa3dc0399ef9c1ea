"""One slot of a step plan as a row on the device.

    samples of the global batch, plan, weights        slot [5 9 12] of data rank 1
    collate    [T]       5 5 5 9 9 12 12 12           padded to a multiple of the context ranks
    shard      [T/cp]    this context rank's tokens, labels, weights, and its AttnContext

A slot without tokens (fewer samples than slots) becomes a row of one token that is not scored: its rank must take part
in every collective of the step, and the row adds exactly 0 to the loss and to the gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from padfree.batch import IGNORE, LocalBatch, PackedBatch, Sample
from padfree.config.choices import LayoutKind, SharePrefixes
from padfree.cp import shard
from padfree.distributed import Mesh
from padfree.packing import PrefixTree, collate
from padfree.packing.collate import with_shared_prefixes

Floats = NDArray[np.floating[Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class RowSettings:
    """How a row is divided over the context ranks, and whether its samples share prefixes."""

    layout: LayoutKind = "balanced"
    method: str = "allgather"
    share_prefixes: SharePrefixes = False
    ends: bool = False  # what is scored is the end of each sample, not its tokens (`at_ends`)
    pad_token: int | None = None  # which token is no end


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MicroBatch:
    """A pack, and this rank's share of it."""

    packed: PackedBatch  # on the host, the pad included
    local: LocalBatch

    @property
    def is_filler(self) -> bool:
        return self.local.is_filler

    @property
    def num_labels(self) -> int:
        assert self.local.num_labels is not None
        return self.local.num_labels


def make_micro_batch(
    samples: Sequence[Sample],
    indices: NDArray[np.int64],
    mesh: Mesh,
    settings: RowSettings,
    *,
    weights: Sequence[Floats] | None = None,
    prefixes: PrefixTree | None = None,
    width: int | None = None,
) -> MicroBatch:
    """The pack of `samples[indices]`. `weights[i]` [n] weighs the predictions of sample i.

    `prefixes` is what all `samples` share, as the step's plan has it, and `width` how many ranks share this pack, where
    the plan says it.
    """
    context = mesh.sharing(width)
    chosen = [samples[i] for i in indices]
    is_filler = not sum(len(sample) for sample in chosen)
    if is_filler:
        packed = collate([filler(samples)])
    else:
        packed = collate(chosen, weights=None if weights is None else [weights[i] for i in indices])
        if settings.ends:
            packed = at_ends(packed, settings.pad_token)
        if prefixes is not None:
            packed = with_shared_prefixes(packed, chosen, prefixes.restricted(indices))
    packed = packed.padded_to_multiple(context.size)
    on_cuda = mesh.device.type == "cuda"  # page-locked memory is what a copy need not wait for
    local = shard(
        (packed.pin_memory() if on_cuda else packed).to(mesh.device),
        world=context.size,
        rank=context.rank,
        group=context.group if context.size > 1 else None,
        kind=settings.layout,
        method=settings.method,
    )
    local = replace(local, num_labels=_num_labels(packed, local), is_filler=is_filler, batch_samples=len(samples))
    return MicroBatch(packed=packed, local=local)


def at_ends(packed: PackedBatch, pad_token: int | None) -> PackedBatch:
    """The same row with a label at the end of each sample and nowhere else: its last token that is no padding token.

    samples   a b c | d e <pad>        labels  - - c | - e -

    It is where transformers reads the score of a text. A sample of nothing else is scored at its first token.
    """
    ids, offsets = packed.input_ids.numpy(), packed.segments.offsets
    places = np.arange(len(ids)) if pad_token is None else np.where(ids != pad_token, np.arange(len(ids)), -1)
    starts = offsets[:-1][np.diff(offsets) > 0]
    ends = np.maximum(np.maximum.reduceat(places, starts), starts)
    labels = np.full(len(ids), IGNORE, dtype=np.int64)
    labels[ends] = ids[ends]
    return replace(packed, labels=torch.from_numpy(labels))


def filler(samples: Sequence[Sample]) -> Sample:
    """One token that is not scored, with the rollout arrays that the other samples have."""
    for sample in samples:
        if len(sample):
            return replace(sample.truncated(1), loss_mask=np.zeros(1, dtype=np.bool_), uid=None)
    raise ValueError(f"samples: none of the {len(samples)} of this step has a token; give samples that are not empty")


def _num_labels(packed: PackedBatch, local: LocalBatch) -> int:
    """How many of this rank's positions have a label, counted on the host."""
    if local.entries is not None:
        return len(local.entries.numbers)
    scored = packed.labels.numpy() != IGNORE
    layout, rank = local.context.layout, local.context.rank
    if layout is None:
        return int(scored.sum())
    before = np.concatenate([[0], np.cumsum(scored)])
    return int((before[layout.ends[rank]] - before[layout.starts[rank]]).sum())
