"""Count the bytes that processes send each other in a step, by kind, inside a host and between hosts.

In a collective among P processes on a tensor of n bytes, each process sends this many bytes to the next process:

    all-gather        (P - 1)/P n
    reduce-scatter    (P - 1)/P n, with gloo twice as much
    all-reduce        2 (P - 1)/P n

All experts are assumed to be chosen equally often. Packet headers, rollouts, scoring, evaluations and checkpoints are
not counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import nn
from transformers import PreTrainedModel

from padfree.config import ParallelConfig
from padfree.cp import communication_bytes, make_layout
from padfree.distributed.mesh import rank_groups
from padfree.errors import UserError
from padfree.model.stacked_experts import stacked_experts, undivided
from padfree.model.structure import layers_of
from padfree.packing import StepPlan
from padfree.segments import Segments
from padfree.sizes import AttentionSizes, ModelSizes

Backend = Literal["gloo", "nccl"]
Floats = NDArray[np.float64]
Ranks = NDArray[np.int64]

GATHER, REDUCE, REPLICAS = "all-gather of weights", "reduce-scatter of gradients", "all-reduce between replicas"
EXPERTS, METRICS = "all-to-all of tokens and experts", "metrics"
FLOAT32, FLOAT64, INT64 = 4, 8, 8
NUMBER_BYTES = {"float32": 4, "bfloat16": 2}
STATISTICS = 16
"""Approximate number of metrics whose values a step sums over all processes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Which rank is on which host, and which groups of ranks communicate."""

    ranks: int
    hosts: int = 1
    context: int = 1
    replicate: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        if self.hosts < 1 or self.ranks % self.hosts:
            raise UserError(
                "--hosts",
                f"{self.hosts} does not divide {self.ranks} ranks",
                "give a divisor of the number of ranks",
            )

    @property
    def ranks_per_host(self) -> int:
        return self.ranks // self.hosts

    def host(self, ranks: ArrayLike) -> Ranks:
        return np.asarray(ranks) // self.ranks_per_host

    @property
    def context_groups(self) -> Ranks:
        """Return all ranks, in an array [data ranks, context ranks]. Ranks with the same first index share a pack."""
        return rank_groups(self.ranks, self.context, self.replicate).context

    @property
    def shard_groups(self) -> Ranks:
        """Return all ranks, in an array [replicas, shards]. Ranks with the same first index divide the weights."""
        return rank_groups(self.ranks, self.context, self.replicate).shards

    @property
    def replica_groups(self) -> Ranks:
        """Return all ranks, in an array [shards, replicas]. Ranks with the same first index hold the same shard."""
        return self.shard_groups.T

    @property
    def expert_mesh(self) -> Ranks:
        """Return all ranks, in an array of shape [replicate, fsdp, expert], as in `padfree.distributed.mesh`.

        Ranks along the last axis hold different experts of a layer. Ranks along the second axis hold shards of the same
        experts.
        """
        return np.arange(self.ranks).reshape(self.replicate, -1, self.expert)

    def hosts_of(self, groups: Ranks) -> int:
        """Return the largest number of hosts that a group spans. `groups`: an array of ranks, one group per line."""
        return max(len(np.unique(group)) for group in self.host(groups))

    def lines(self) -> Iterator[str]:
        """Yield lines for a dry run: which ranks are on which host, and which communication crosses hosts."""
        each = self.ranks_per_host
        named = [f"host {host}: {_range(host * each, host * each + each - 1)}" for host in range(min(self.hosts, 4))]
        more = f", and {self.hosts - 4} more" if self.hosts > 4 else ""
        yield f"hosts: {self.hosts} with {each} processes each; {', '.join(named)}{more}"
        shards, packs = self.hosts_of(self.shard_groups), self.hosts_of(self.context_groups)
        inside = {True: "inside a host", False: "over {} hosts"}
        weights = inside[shards == 1].format(shards)
        if self.replicate > 1:
            hosts = self.hosts_of(self.replica_groups)
            weights += f", gradients of the {self.replicate} replicas are reduced over {hosts} hosts"
        yield f"  weights are gathered {weights}"
        if self.context > 1:
            yield f"  the {self.context} context ranks of a pack are {inside[packs == 1].format(packs)}"
        if self.expert > 1:
            hosts = self.hosts_of(self.expert_mesh.reshape(-1, self.expert))
            yield f"  the {self.expert} ranks that divide the experts are {inside[hosts == 1].format(hosts)}"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Traffic:
    """Bytes that each rank sends, by kind: to processes on its own host, and to other hosts."""

    placement: Placement
    inside: dict[str, Floats] = field(default_factory=dict)  # [ranks]
    between: dict[str, Floats] = field(default_factory=dict)  # [ranks]

    def send(self, kind: str, source: ArrayLike, target: ArrayLike, size: ArrayLike) -> None:
        """Add messages to the traffic: rank `source[i]` sends `size[i]` bytes to rank `target[i]`."""
        source, target, size = np.broadcast_arrays(source, target, np.asarray(size, dtype=np.float64))
        near = self.placement.host(source) == self.placement.host(target)
        for links, chosen in ((self.inside, near), (self.between, ~near)):
            sent = links.setdefault(kind, np.zeros(self.placement.ranks))
            np.add.at(sent, source[chosen], size[chosen])

    def rings(self, kind: str, groups: Ranks, size: float) -> None:
        """Add a collective to the traffic: each rank sends (P - 1)/P · `size` bytes to the next rank of its ring.

        `groups` [rings, P]: the P ranks of each ring. `size`: the bytes of the whole tensor.
        """
        world = groups.shape[1]
        if world > 1:
            self.send(kind, groups, np.roll(groups, -1, axis=1), size * (world - 1) / world)

    def add(self, other: Traffic) -> None:
        for own, others in ((self.inside, other.inside), (self.between, other.between)):
            for kind, sent in others.items():
                own[kind] = own.get(kind, np.zeros(self.placement.ranks)) + sent

    def of_host(self, host: int) -> tuple[float, float]:
        """Return the bytes that the processes of a host send inside the host, and to other hosts."""
        own = self.placement.host(np.arange(self.placement.ranks)) == host
        inside, between = (
            float(sum(sent[own].sum() for sent in links.values())) for links in (self.inside, self.between)
        )
        return inside, between

    def table(self) -> dict[str, tuple[float, float]]:
        """Return two numbers of bytes for each kind of traffic: the most that a host sends between its own processes,
        and the most that a host sends to other hosts.
        """
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
    """The numbers of elements that FSDP gathers and reduces for one unit (a layer or the root), including padding.

    If ranks divide the experts of a layer among them, the unit has only the experts of one rank.
    """

    gathered: int
    reduced: int
    is_root: bool
    is_divided: bool = False


def fsdp_units(model: PreTrainedModel, shards: int, expert: int = 1) -> list[UnitSizes]:
    """Return the FSDP units that `padfree.sharding.parallelize` makes, with their sizes.

    FSDP2 pads the first dimension of each parameter to a multiple of `shards`. `expert`: the number of ranks that
    divide the experts of a layer.
    """
    divided = stacked_experts(model) if expert > 1 and undivided(model, expert, shards // expert) is None else []
    apart = {id(parameter) for module in divided for parameter in module.parameters(recurse=False)}

    def padded(parameter: nn.Parameter) -> int:
        if not parameter.ndim or not parameter.numel():
            return parameter.numel()
        first = parameter.shape[0]
        return -(-first // shards) * shards * (parameter.numel() // first)

    def unit(parameters: list[nn.Parameter], is_root: bool) -> UnitSizes:
        parameters = [parameter for parameter in parameters if id(parameter) not in apart]
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        return UnitSizes(
            gathered=sum(map(padded, parameters)), reduced=sum(map(padded, trained)), is_root=is_root
        )  # fmt: skip

    layers = [list(layer.parameters()) for layer in layers_of(model)]
    in_layers = {id(parameter) for parameters in layers for parameter in parameters}
    root = [parameter for parameter in model.parameters() if id(parameter) not in in_layers]
    experts = [list(module.parameters(recurse=False)) for module in divided]
    parts = [
        UnitSizes(
            gathered=sum(each.numel() for each in own) // expert,
            reduced=sum(each.numel() for each in own if each.requires_grad) // expert,
            is_root=False,
            is_divided=True,
        )
        for own in experts
    ]
    return [unit(root, True), *(unit(parameters, False) for parameters in layers), *parts]


def weights_traffic(
    model: PreTrainedModel, placement: Placement, *, size: int, reshard: bool, backend: Backend, micro_batches: int
) -> Traffic:
    """Return the bytes that FSDP sends in a step of `micro_batches` micro-batches.

    `size`: bytes of an element of gathered weights. `reshard`: whether layers are gathered again for backward.
    """
    found = Traffic(placement=placement)
    if placement.ranks == 1:
        return found
    shards = placement.ranks // placement.replicate
    units = fsdp_units(model, shards, placement.expert)
    rounds = 2 if backend == "gloo" else 1
    mesh = placement.expert_mesh
    among_experts = np.moveaxis(mesh, 1, -1).reshape(-1, mesh.shape[1])
    for is_divided, groups in ((False, placement.shard_groups), (True, among_experts)):
        own = [unit for unit in units if unit.is_divided == is_divided]
        gathers = sum(unit.gathered * (2 if reshard and not unit.is_root else 1) for unit in own)
        reduced = sum(unit.reduced for unit in own) * FLOAT32
        found.rings(GATHER, groups, micro_batches * size * gathers)
        found.rings(REDUCE, groups, micro_batches * rounds * reduced)
        found.rings(REPLICAS, placement.replica_groups, micro_batches * 2 * reduced / groups.shape[1])
    found.rings(METRICS, np.arange(placement.ranks)[None], 2 * FLOAT64 * (placement.ranks + STATISTICS))
    return found


def context_traffic(
    plan: StepPlan, sizes: ModelSizes, placement: Placement, parallel: ParallelConfig, *, size: int
) -> Traffic:  # fmt: skip
    """Return the bytes that attention sends between the context ranks of each pack. `size`: bytes of an element.

    A pack is shared by `placement.context` context ranks, or by the number that the plan gives it (`plan.widths`).
    """
    found = Traffic(placement=placement)
    if placement.context == 1 and plan.widths is None:
        return found
    # A layer that is recomputed for backward sends its keys again, unless the compiler saves the attention output.
    kept = parallel.compile not in ("none", "auto") and parallel.checkpointing == "selective"
    forwards = 1 if parallel.checkpointing == "none" or kept else 2
    kind = f"context, {parallel.method}"
    for rank in range(plan.ranks):
        for (indices, width), is_first in zip(plan.packs_of(rank), plan.is_first[rank], strict=True):
            if width is not None and (width == 1 or not is_first):
                continue
            group = placement.context_groups[rank] if width is None else rank + np.arange(width)
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


def expert_traffic(
    plan: StepPlan, model: PreTrainedModel, placement: Placement, parallel: ParallelConfig, *, size: int
) -> Traffic:  # fmt: skip
    """Return the bytes that a step sends between the ranks that divide the experts of a layer (expert parallelism).

    All experts are assumed to be chosen equally often.
    """
    found, expert = Traffic(placement=placement), placement.expert
    if expert == 1:
        return found
    widths = placement.context if plan.widths is None else plan.widths
    tokens = np.maximum(
        -(-plan.computed_tokens // widths), 1
    )  # [data ranks, J] tokens on a context rank; a filler (a micro-batch without samples) has 1
    by_rank = np.repeat(tokens.sum(1), placement.ranks // plan.ranks)
    forwards = 1 if parallel.checkpointing == "none" else 2
    top, groups = ModelSizes.of(model.config).experts_per_token, placement.expert_mesh.reshape(-1, expert)
    for module in stacked_experts(model):
        down: Any = module.down_proj
        row = size * down.shape[2 if module.is_transposed else 1]
        rows = 2 * (forwards + 1) * by_rank * top / expert * row
        counts = forwards * plan.num_micro_batches * INT64 * down.shape[0] / expert
        for step in range(1, expert):
            found.send(EXPERTS, groups, np.roll(groups, step, axis=1), rows[groups] + counts)
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
    parallel: ParallelConfig, dtype: str, model: PreTrainedModel, plan: StepPlan, placement: Placement, backend: Backend
) -> Traffic:  # fmt: skip
    """Return the bytes that ranks send in one training step with this plan. No setting in `parallel` may be "auto".

    `model` can be a skeleton, i.e. without weights.
    """
    size = NUMBER_BYTES[dtype]
    assert parallel.reshard != "auto", "must be resolved by the caller"
    found = weights_traffic(
        model,
        placement,
        size=size,
        reshard=parallel.reshard,
        backend=backend,
        micro_batches=plan.num_micro_batches,
    )
    found.add(context_traffic(plan, ModelSizes.of(model.config), placement, parallel, size=size))
    found.add(expert_traffic(plan, model, placement, parallel, size=size))
    return found


def shown_bytes(count: float) -> str:
    for name, unit in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count:.0f} B"


def _range(first: int, last: int) -> str:
    return f"rank {first}" if first == last else f"ranks {first} to {last}"
