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
from torch import Tensor

from padfree.batch import IGNORE, LocalBatch, PackedBatch, Sample, at_predictions
from padfree.config.choices import LayoutKind, SharePrefixes
from padfree.cp import shard
from padfree.cp.ranges import to_device
from padfree.distributed import Mesh
from padfree.errors import UserError
from padfree.losses import preference_pairs
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
    """A row, this rank's share of it, and what the host knows of that."""

    packed: PackedBatch  # on the host, the pad included
    local: LocalBatch
    num_labels: int  # of `local`
    old_logprobs: Tensor | None  # [T/cp]
    is_filler: bool
    pairs: Tensor | None = None  # [P, 2] (chosen, rejected): places among the samples of the row
    pair_weights: Tensor | None = None  # [P] float64
    margins: Tensor | None = None  # [P] float64, where samples have them


def make_micro_batch(
    samples: Sequence[Sample],
    indices: NDArray[np.int64],
    mesh: Mesh,
    settings: RowSettings,
    *,
    weights: Sequence[Floats] | None = None,
    old_logprobs: Sequence[Floats] | None = None,
    pair_weight: float | None = None,
    prefixes: PrefixTree | None = None,
    width: int | None = None,
) -> MicroBatch:
    """The row of `samples[indices]`. `weights[i]` [n] weighs predictions, `old_logprobs[i]` [n] belongs to tokens.

    With `pair_weight`, what each pair weighs, its samples are pairs (`preference_pairs`). `prefixes` is what all
    `samples` share, as the step's plan has it, and `width` how many ranks share this row, where the plan says it.
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
    old_row = None
    if old_logprobs is not None:
        old_row = torch.zeros(packed.num_tokens)
        own = [] if is_filler else [old_logprobs[i] for i in indices]
        if not is_filler:
            _check_lengths(chosen, own)
        if packed.entries is not None:
            old_row = torch.from_numpy(np.concatenate(own)[packed.entries.tokens]).float()
        elif not is_filler:
            end = packed.num_tokens - packed.pad_length
            offsets = packed.segments.offsets[: len(chosen) + 1]
            old_row[:end] = torch.from_numpy(at_predictions(np.concatenate(own), offsets))
    on_cuda = mesh.device.type == "cuda"  # page-locked memory is what a copy need not wait for
    local = shard(
        (packed.pin_memory() if on_cuda else packed).to(mesh.device),
        world=context.size,
        rank=context.rank,
        group=context.group if context.size > 1 else None,
        kind=settings.layout,
        method=settings.method,
    )
    if old_row is not None:
        old_row = (old_row.pin_memory() if on_cuda else old_row).to(mesh.device, non_blocking=True)
        if local.context.layout is not None and local.entries is None:
            old_row = old_row.index_select(0, local.context.plan.own)
        elif local.context.layout is not None and local.entries is not None:
            old_row = old_row.index_select(0, to_device(local.entries.numbers, mesh.device))
    pairs = pair_weights = margins = None
    if pair_weight is not None:
        infos = () if is_filler else packed.samples
        found = torch.from_numpy(preference_pairs(infos))
        pairs = (found.pin_memory() if on_cuda else found).to(mesh.device, non_blocking=True)
        wanted = torch.tensor([infos[place].raw_reward or 0.0 for place in found[:, 0].tolist()], dtype=torch.float64)
        margins = (wanted.pin_memory() if on_cuda else wanted).to(mesh.device, non_blocking=True)
        pair_weights = torch.full((len(found),), pair_weight, dtype=torch.float64, device=mesh.device)
    return MicroBatch(
        packed=packed,
        local=local,
        num_labels=_num_labels(packed, local),
        old_logprobs=old_row,
        is_filler=is_filler,
        pairs=pairs,
        pair_weights=pair_weights,
        margins=margins,
    )


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
    raise UserError(
        "samples", f"none of the {len(samples)} of this step has a token", "give samples that are not empty"
    )


def _check_lengths(samples: Sequence[Sample], values: Sequence[Floats]) -> None:
    for sample, array in zip(samples, values, strict=True):
        if np.shape(array) != (len(sample),):
            raise UserError(
                "old_logprobs",
                f"shape {np.shape(array)} for the {len(sample)} tokens of sample {sample.uid!r}",
                "give one number per token",
            )


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
