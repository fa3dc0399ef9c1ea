"""Divide the samples of a step into packs, and build each pack on the device.

A pack is the input of one micro-batch: samples laid end to end on one token axis. Samples 5, 9 and 12 may form the pack
`5 5 5 9 9 12 12 12` (one number per token). Each context rank gets a part of the pack.

A micro-batch without samples becomes a filler: a pack with one unscored token. The filler lets the rank take part in
every collective of the step.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray

from padfree.batch import IGNORE, LocalBatch, PackedBatch
from padfree.choices import LayoutKind, PackOverlong, SharePrefixes
from padfree.cp import shard
from padfree.data.image_loader import ImageLoader, PacksAhead
from padfree.distributed import Mesh
from padfree.errors import UserError
from padfree.model.vision.tower_cost import TowerCost
from padfree.packing import CostModel, PrefixTree, StepPlan, collate, plan_shared_step, plan_step
from padfree.packing.collate import prefixes_of, with_shared_prefixes
from padfree.packing.fill import Indices
from padfree.rollout.collect.sample_exchange import arrived
from padfree.sample import Sample
from padfree.warning import PadfreeWarning

Floats = NDArray[np.floating[Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class PackSettings:
    """Settings of packs: how context ranks divide a pack, whether prefixes are shared, and which tokens are scored."""

    layout: LayoutKind = "balanced"
    method: str = "allgather"
    share_prefixes: SharePrefixes = False
    ends: bool = False  # score only the end of each sample, not every token (`at_ends`)
    routes: bool = False  # the model replays the experts that are recorded for each token, so packs contain them
    pad_token: int | None = None  # padding token id, which does not count as the end of a sample
    min_tokens: int = 0  # shorter packs are padded to this number of tokens per context rank
    multiple: int = 1  # the number of tokens per context rank is padded to a multiple of this


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MicroBatch:
    """A pack, and the part of its tokens that this context rank computes."""

    packed: PackedBatch  # on the host, including padding
    local: LocalBatch

    @property
    def is_filler(self) -> bool:
        return self.local.is_filler

    @property
    def num_labels(self) -> int:
        assert self.local.num_labels is not None
        return self.local.num_labels


class LazyPacks(Sequence[tuple[MicroBatch, Indices]]):
    """Micro-batches that are built on first access: the host builds one while the device computes the previous one."""

    def __init__(self, number: int, packs: Iterator[tuple[MicroBatch, Indices]]) -> None:
        """`packs`: an iterator that builds the micro-batches. `number`: the number of micro-batches."""
        self._number, self._left = number, packs
        self._built: list[tuple[MicroBatch, Indices]] = []

    def __len__(self) -> int:
        return self._number

    @overload
    def __getitem__(self, index: int) -> tuple[MicroBatch, Indices]: ...

    @overload
    def __getitem__(self, index: slice) -> list[tuple[MicroBatch, Indices]]: ...

    def __getitem__(self, index: int | slice) -> Any:
        last = len(self) if isinstance(index, slice) else index % len(self) + 1 if index < len(self) else len(self)
        self._built += islice(self._left, max(last - len(self._built), 0))
        return self._built[index]


class Packer:
    """Divides samples over ranks and micro-batches, and builds the packs of this rank.

    Training, scoring and evaluation of a model share one packer.
    """

    def __init__(
        self,
        mesh: Mesh,
        *,
        max_tokens: int,
        pack_settings: PackSettings,
        overlong: PackOverlong,
        cost: CostModel,
        unshared_reason: str | None,
        image_cost: TowerCost | None = None,
    ) -> None:
        """`cost`: the cost of a sample of n tokens, which balances packs and ranks.

        `image_cost`: the cost of an image, in the same unit. `unshared_reason`: why the model cannot share prefixes;
        None if it can.
        """
        self.image_cost = image_cost
        self.mesh, self.max_tokens, self.pack_settings, self.overlong, self.cost = (
            mesh,
            max_tokens,
            pack_settings,
            overlong,
            cost,
        )
        self.unshared_reason, self._warned_unshared = unshared_reason, False
        self._loader = ImageLoader()
        self._check_sharing()

    def plan(self, samples: Sequence[Sample], *, keep_groups: bool = False) -> StepPlan:
        """Decide which samples form which pack on which rank. A pack has up to `max_tokens` tokens per context rank.

        With `keep_groups`, samples with the same field `group` (e.g. a preference pair) are in one pack.
        """
        if not len(samples):
            return StepPlan.empty(ranks=self.mesh.data.size, max_tokens=self.max_tokens * self.mesh.context.size)
        return plan_samples(
            samples,
            self._prefixes(samples),
            added=self._image_costs(samples),
            keep_groups=keep_groups,
            ranks=self.mesh.data.size,
            max_tokens=self.max_tokens * self.mesh.context.size,
            cost=self.cost,
            overlong=self.overlong,
            contexts=tuple(self.mesh.contexts) or (1,),
        )

    def lay_out(self, samples: Sequence[Sample], plan: StepPlan, weights: Sequence[Floats] | None = None) -> LazyPacks:
        """Return this rank's packs of a plan. A pack is built at the first access and then stays in memory.

        `weights[i]` [n]: the token weights of sample i, i.e. the factors of its token losses in the batch loss.
        """
        return LazyPacks(plan.num_micro_batches, self.packs(samples, plan, weights=weights))

    def packs(
        self,
        samples: Sequence[Sample],
        plan: StepPlan,
        pack_settings: PackSettings | None = None,
        *,
        weights: Sequence[Floats] | None = None,
    ) -> Iterator[tuple[MicroBatch, Indices]]:
        """Yield this rank's packs of a plan, each with the indices of its samples. Packs are built when requested.

        `weights[i]` [n]: the token weights of sample i in the batch loss. `pack_settings` replace the packer's own.
        """
        here, slots = arrived(samples, plan.micro_batches), plan.packs_of(self.mesh.data.rank)
        settings, ahead = pack_settings or self.pack_settings, None
        in_packs = [[here[index] for index in indices] for indices, _ in slots]
        if any(sample.images for pack in in_packs for sample in pack):
            ahead = PacksAhead(self._loader, in_packs)

        def built(indices: Indices, width: int | None) -> MicroBatch:
            return make_micro_batch(
                here,
                indices,
                self.mesh,
                settings,
                weights=weights,
                prefixes=plan.prefixes,
                width=width,
                chosen=None if ahead is None else ahead.take(),
            )

        return ((built(indices, width), indices) for indices, width in slots)

    def _image_costs(self, samples: Sequence[Sample]) -> NDArray[np.float64] | None:
        """Return the cost of encoding each sample's images, in the unit of `self.cost`; None without images."""
        if self.image_cost is None or not any(sample.images for sample in samples):
            return None
        return self.image_cost.of_samples(sample.images for sample in samples)

    def _check_sharing(self) -> None:
        if self.pack_settings.share_prefixes is True and self.unshared_reason is not None:
            raise UserError(
                "batch.share_prefixes", f"true, but {self.unshared_reason}", "set batch.share_prefixes=false"
            )

    def _prefixes(self, samples: Sequence[Sample]) -> PrefixTree | None:
        """Return the tree of the prefixes that samples of a step share.

        Return None if sharing is off. If the model does not support sharing, warn once and return None.
        """
        self._check_sharing()
        if self.pack_settings.share_prefixes is False or not len(samples):
            return None
        if self.unshared_reason is None:
            return prefixes_of(samples, self.pack_settings.share_prefixes, self.cost)
        if not self._warned_unshared and prefixes_of(samples, self.pack_settings.share_prefixes, self.cost).is_shared:
            self._warned_unshared = True
            if self.mesh.loss.rank == 0:
                message = (
                    "batch.share_prefixes: samples share prefixes, but each sample computes its own prefix: "
                    f"{self.unshared_reason}"
                )
                warnings.warn(message, PadfreeWarning, stacklevel=2)
        return None


def plan_samples(
    samples: Sequence[Sample], prefixes: PrefixTree | None, *, keep_groups: bool = False, **options: Any
) -> StepPlan:
    """Decide which samples form which micro-batch on which rank. `prefixes`: the prefixes that samples share.

    With `keep_groups`, samples with the same field `group` (e.g. a preference pair) are in one micro-batch. `options`:
    see `plan_step`.
    """
    lengths = np.array([len(sample) for sample in samples], dtype=np.int64)
    plan = partial(plan_shared_step, prefixes) if prefixes is not None and prefixes.is_shared else plan_step
    return plan(lengths, groups=[sample.group for sample in samples] if keep_groups else None, **options)


def make_micro_batch(
    samples: Sequence[Sample],
    indices: NDArray[np.int64],
    mesh: Mesh,
    settings: PackSettings,
    *,
    weights: Sequence[Floats] | None = None,
    prefixes: PrefixTree | None = None,
    width: int | None = None,
    chosen: Sequence[Sample] | None = None,
) -> MicroBatch:
    """Build the pack of `samples[indices]`. `weights[i]` [n]: the token weights of sample i in the batch loss.

    `prefixes`: the prefix tree of all `samples`. `width`: the number of context ranks, if it varies. `chosen`:
    `samples[indices]` with images loaded.
    """
    context = mesh.sharing(width)
    chosen = [samples[i] for i in indices] if chosen is None else chosen
    is_filler = not sum(len(sample) for sample in chosen)
    if is_filler:
        packed = collate([filler(samples)])
    else:
        packed = collate(chosen, weights=None if weights is None else [weights[i] for i in indices])
        if settings.ends:
            packed = at_ends(packed, settings.pad_token)
        if prefixes is not None:
            packed = with_shared_prefixes(packed, chosen, prefixes.restricted(indices))
    if is_filler or not settings.routes:
        packed = replace(packed, routes=None)
    share = max(-(-packed.num_tokens // context.size), settings.min_tokens)
    share += -share % settings.multiple
    packed = packed.padded_to(share * context.size)
    on_cuda = mesh.device.type == "cuda"  # copies from pinned memory are asynchronous
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
    """Return the pack with one label per sample, at the sample's last token that is not `pad_token`.

        samples   a b c | d e <pad>        labels  - - c | - e -

    A reward model reads the scores of the samples at these labels.
    """
    ids, offsets = packed.input_ids.numpy(), packed.segments.offsets
    places = np.arange(len(ids)) if pad_token is None else np.where(ids != pad_token, np.arange(len(ids)), -1)
    starts = offsets[:-1][np.diff(offsets) > 0]
    # A sample that consists only of padding is labelled at its first token.
    ends = np.maximum(np.maximum.reduceat(places, starts), starts)
    labels = np.full(len(ids), IGNORE, dtype=np.int64)
    labels[ends] = ids[ends]
    return replace(packed, labels=torch.from_numpy(labels), kept=None)


def filler(samples: Sequence[Sample]) -> Sample:
    """Return a filler: one unscored token, with the same optional arrays (e.g. `advantages`) that `samples` have."""
    for sample in samples:
        if len(sample):
            text = replace(sample, images=(), rotary_positions=None)
            return replace(text.truncated(1), loss_mask=np.zeros(1, dtype=np.bool_), uid=None)
    raise UserError(
        "samples", f"none of the {len(samples)} samples of this step has a token", "give samples that are not empty"
    )


def _num_labels(packed: PackedBatch, local: LocalBatch) -> int:
    """Return the number of labels on this rank. The CPU counts them, so that it need not synchronise with the GPU."""
    if local.entries is not None:
        return len(local.entries.numbers)
    scored = packed.labels.numpy() != IGNORE
    layout, rank = local.context.layout, local.context.rank
    if layout is None:
        return int(scored.sum())
    before = np.concatenate([[0], np.cumsum(scored)])
    return int((before[layout.ends[rank]] - before[layout.starts[rank]]).sum())
