"""What the processes of a run send each other in a step: bytes by kind, inside a host and between hosts.

    rank                  0 1 2 3 | 4 5 6 7        two hosts of four; launchers number the processes of a host in a row
    shards of weights     one ring of 8            0 > 1 > 2 > 3 >> 4 > 5 > 6 > 7 >> 0        leaves each host once
    replicate 2           two rings of 4           0 > 1 > 2 > 3 > 0   4 > 5 > 6 > 7 > 4      leaves no host
                          and four rings of 2      0 >> 4 >> 0   1 >> 5 >> 1   ...            with a fourth of the bytes
    context 2             0 1 | 2 3 | 4 5 | 6 7    neighbours

What a collective of P processes over n bytes makes each of them send to the next one of its ring:

    all-gather        (P - 1)/P n          n: what everybody has afterwards
    reduce-scatter    (P - 1)/P n          n: what everybody has before; gloo sends twice that, it reduces all of it
    all-reduce        2 (P - 1)/P n

FSDP gathers every unit (a layer; the embeddings, the last norm and the head) once for a micro-batch, layers once more
for backward with `parallel.reshard`, and reduces gradients after every micro-batch. Context parallelism sends what
`padfree.cp.communication_bytes` counts, rank by rank. Frames and headers are not counted, nor are rollouts, scoring
without gradients, evaluations and checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import nn
from transformers import PreTrainedModel

from padfree.batch import Segments
from padfree.config import Config
from padfree.cp import communication_bytes, make_layout
from padfree.distributed.mesh import rank_groups
from padfree.errors import UserError
from padfree.model.structure import layers_of
from padfree.packing import StepPlan
from padfree.sizes import AttentionSizes, ModelSizes

Backend = Literal["gloo", "nccl"]
Floats = NDArray[np.float64]
Ranks = NDArray[np.int64]

GATHER, REDUCE, REPLICAS = "all-gather of weights", "reduce-scatter of gradients", "all-reduce between replicas"
METRICS = "metrics"
FLOAT32, FLOAT64 = 4, 8
NUMBER_BYTES = {"float32": 4, "bfloat16": 2}
STATISTICS = 16
"""About how many numbers of a step are summed over all processes, besides one for each process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Which process is on which host, and with whom it talks."""

    ranks: int
    hosts: int = 1
    context: int = 1
    replicate: int = 1

    def __post_init__(self) -> None:
        if self.hosts < 1 or self.ranks % self.hosts:
            raise UserError("--hosts", f"{self.hosts} does not divide {self.ranks} ranks", "give as many ranks to each")

    @property
    def ranks_per_host(self) -> int:
        return self.ranks // self.hosts

    def host(self, ranks: ArrayLike) -> Ranks:
        return np.asarray(ranks) // self.ranks_per_host

    @property
    def context_groups(self) -> Ranks:
        """[rows, context]"""
        return rank_groups(self.ranks, self.context, self.replicate).context

    @property
    def shard_groups(self) -> Ranks:
        """[replicate, shards]"""
        return rank_groups(self.ranks, self.context, self.replicate).shards

    @property
    def replica_groups(self) -> Ranks:
        """[shards, replicate]"""
        return self.shard_groups.T

    def hosts_of(self, groups: Ranks) -> int:
        """Over how many hosts the widest of these groups goes."""
        return max(len(np.unique(group)) for group in self.host(groups))

    def lines(self) -> Iterator[str]:
        """In words, for a dry run."""
        each = self.ranks_per_host
        named = [f"host {host}: {_range(host * each, host * each + each - 1)}" for host in range(min(self.hosts, 4))]
        more = f", and {self.hosts - 4} more" if self.hosts > 4 else ""
        yield f"hosts: {self.hosts} of {each} processes; {', '.join(named)}{more}"
        shards, rows = self.hosts_of(self.shard_groups), self.hosts_of(self.context_groups)
        inside = {True: "inside a host", False: "over {} hosts"}
        weights = inside[shards == 1].format(shards)
        if self.replicate > 1:
            weights += f", gradients of {self.replicate} replicas over {self.hosts_of(self.replica_groups)} hosts"
        yield f"  weights are gathered {weights}"
        if self.context > 1:
            yield f"  the {self.context} ranks that share a row are {inside[rows == 1].format(rows)}"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Traffic:
    """Bytes that each rank sends, by kind: to processes of its own host and to others."""

    placement: Placement
    inside: dict[str, Floats] = field(default_factory=dict)  # [ranks]
    between: dict[str, Floats] = field(default_factory=dict)  # [ranks]

    def send(self, kind: str, source: ArrayLike, target: ArrayLike, size: ArrayLike) -> None:
        """`size[i]` bytes from rank `source[i]` to rank `target[i]`."""
        source, target, size = np.broadcast_arrays(source, target, np.asarray(size, dtype=np.float64))
        near = self.placement.host(source) == self.placement.host(target)
        for links, chosen in ((self.inside, near), (self.between, ~near)):
            sent = links.setdefault(kind, np.zeros(self.placement.ranks))
            np.add.at(sent, source[chosen], size[chosen])

    def rings(self, kind: str, groups: Ranks, size: float) -> None:
        """Each group [P] of [number, P] passes `size` bytes round its ring, (P - 1)/P of them over each link."""
        world = groups.shape[1]
        if world > 1:
            self.send(kind, groups, np.roll(groups, -1, axis=1), size * (world - 1) / world)

    def add(self, other: Traffic) -> None:
        for own, others in ((self.inside, other.inside), (self.between, other.between)):
            for kind, sent in others.items():
                own[kind] = own.get(kind, np.zeros(self.placement.ranks)) + sent

    def of_host(self, host: int) -> tuple[float, float]:
        """Bytes that the processes of a host send each other, and to other hosts."""
        own = self.placement.host(np.arange(self.placement.ranks)) == host
        inside, between = (
            float(sum(sent[own].sum() for sent in links.values())) for links in (self.inside, self.between)
        )
        return inside, between

    def table(self) -> dict[str, tuple[float, float]]:
        """By kind: the bytes of the host that sends the most of it, inside and to others."""
        hosts = self.placement.host(np.arange(self.placement.ranks))

        def busiest(sent: Floats) -> float:
            return float(np.bincount(hosts, weights=sent).max())

        return {kind: (busiest(self.inside[kind]), busiest(self.between[kind])) for kind in self.inside}

    def lines(self, backend: Backend) -> Iterator[str]:
        yield f"traffic: bytes that a host sends in the first step{'':<8}{'inside':>12}{'to others':>12}  ({backend})"
        for kind, (inside, between) in self.table().items():
            yield f"  {kind:<56}{shown_bytes(inside):>12}{shown_bytes(between):>12}"


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitSizes:
    """One FSDP unit: how many numbers all shards of it have together, pads included."""

    gathered: int
    reduced: int
    is_root: bool


def fsdp_units(model: PreTrainedModel, shards: int) -> list[UnitSizes]:
    """The units as `padfree.sharding.parallelize` makes them; FSDP2 pads the first dimension of every parameter."""

    def padded(parameter: nn.Parameter) -> int:
        if not parameter.ndim or not parameter.numel():
            return parameter.numel()
        rows = parameter.shape[0]
        return -(-rows // shards) * shards * (parameter.numel() // rows)

    def unit(parameters: list[nn.Parameter], is_root: bool) -> UnitSizes:
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        return UnitSizes(
            gathered=sum(map(padded, parameters)), reduced=sum(map(padded, trained)), is_root=is_root
        )  # fmt: skip

    layers = [list(layer.parameters()) for layer in layers_of(model)]
    in_layers = {id(parameter) for parameters in layers for parameter in parameters}
    root = [parameter for parameter in model.parameters() if id(parameter) not in in_layers]
    return [unit(root, True), *(unit(parameters, False) for parameters in layers)]


def weights_traffic(
    model: PreTrainedModel, placement: Placement, *, size: int, reshard: bool, backend: Backend, micro_batches: int
) -> Traffic:
    """What FSDP sends in a step. `size` is that of a gathered number."""
    found = Traffic(placement=placement)
    if placement.ranks == 1:
        return found
    shards = placement.ranks // placement.replicate
    units = fsdp_units(model, shards)
    gathers = sum(unit.gathered * (2 if reshard and not unit.is_root else 1) for unit in units)
    reduced = sum(unit.reduced for unit in units) * FLOAT32
    rounds = 2 if backend == "gloo" else 1
    found.rings(GATHER, placement.shard_groups, micro_batches * size * gathers)
    found.rings(REDUCE, placement.shard_groups, micro_batches * rounds * reduced)
    found.rings(REPLICAS, placement.replica_groups, micro_batches * 2 * reduced / shards)
    found.rings(METRICS, np.arange(placement.ranks)[None], 2 * FLOAT64 * (placement.ranks + STATISTICS))
    return found


def context_traffic(
    plan: StepPlan, sizes: ModelSizes, placement: Placement, config: Config, *, size: int
) -> Traffic:  # fmt: skip
    """What attention sends where rows are shared: by `placement.context` ranks, or by as many as the plan says."""
    found = Traffic(placement=placement)
    if placement.context == 1 and plan.widths is None:
        return found
    parallel = config.parallel
    # A layer that is computed again for backward sends its keys again, unless the compiler has kept the attention.
    kept = parallel.compile not in ("none", "auto") and parallel.checkpointing == "selective"
    forwards = 1 if parallel.checkpointing == "none" or kept else 2
    kind = f"context, {parallel.method}"
    for row in range(plan.ranks):
        for (indices, width), is_first in zip(plan.packs_of(row), plan.is_first[row], strict=True):
            if width is not None and (width == 1 or not is_first):
                continue
            group = placement.context_groups[row] if width is None else row + np.arange(width)
            lengths = plan.lengths[indices]
            lengths = lengths[lengths > 0] if lengths.sum() else np.ones(1, dtype=np.int64)
            segments = Segments.from_lengths(lengths, pad_length=-int(lengths.sum()) % len(group))
            layout = make_layout(segments, len(group), parallel.layout)
            for layers, attention, window in (
                (sizes.full_layers, sizes.attention, None),
                (sizes.windowed_layers, sizes.windowed_attention, sizes.window),
            ):
                if not layers:
                    continue
                if window is not None and window >= segments.max_seqlen:
                    window = None
                moved = communication_bytes(
                    parallel.method, layout, segments, window=window, **_heads(sizes, attention), element_size=size
                )
                for links, times in ((moved.forward_links, forwards), (moved.backward_links, 1)):
                    source, target = np.nonzero(links)
                    found.send(kind, group[source], group[target], times * layers * links[source, target])
    return found


def _heads(sizes: ModelSizes, attention: AttentionSizes) -> dict[str, int]:
    key_heads = attention.key // attention.head
    return {
        "num_heads": sizes.heads,
        "num_key_heads": key_heads,
        "head_dim": attention.head,
        "value_dim": attention.value // key_heads,
    }


def step_traffic(
    config: Config, model: PreTrainedModel, plan: StepPlan, placement: Placement, backend: Backend
) -> Traffic:  # fmt: skip
    """Of one training step with this plan. The settings must be settled; `model` may be a skeleton."""
    size = NUMBER_BYTES[config.model.dtype]
    assert config.parallel.reshard != "auto", "settled before"
    found = weights_traffic(
        model,
        placement,
        size=size,
        reshard=config.parallel.reshard,
        backend=backend,
        micro_batches=plan.num_micro_batches,
    )
    found.add(context_traffic(plan, ModelSizes.of(model.config), placement, config, size=size))
    return found


def shown_bytes(count: float) -> str:
    for name, unit in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count:.0f} B"


def _range(first: int, last: int) -> str:
    return f"rank {first}" if first == last else f"ranks {first} to {last}"
