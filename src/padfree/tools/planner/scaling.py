"""Estimate how the time of a step changes with the number of devices.

The time of a micro-batch is a sum of these parts:

    compute    the time of the slowest rank, from the cost model
    weights    the first all-gather, the last reduce-scatter, and the time by which weight transfers exceed compute
    context    sending keys and values, if it does not overlap with compute

The time of a collective is its bytes divided by the bandwidth of the busiest link, plus a latency. The bytes are
counted (see `traffic`). Bandwidths, latencies and overlap are assumptions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from padfree.config import ParallelConfig
from padfree.errors import UserError
from padfree.packing import StepPlan, plan_step
from padfree.sizes import ModelSizes
from padfree.tools.planner.epoch import PlanShape
from padfree.tools.planner.memory_plan import DeviceMemory
from padfree.tools.planner.steps import Lengths, spread
from padfree.tools.planner.time_model import TimeModel
from padfree.tools.planner.traffic import NUMBER_BYTES, Placement, Traffic, context_traffic, fsdp_units, weights_traffic

BASELINE_DEVICES = 8
"""The smallest number of devices for which a step time is estimated, unless --ranks is smaller or --cp is larger. The
smallest number of devices is the baseline: its efficiency is 1."""

INSIDE = {"nvlink3": 300.0, "nvlink4": 450.0, "nvlink5": 900.0, "pcie4": 32.0, "pcie5": 64.0}
BETWEEN = {"hdr": 25.0, "ndr": 50.0, "xdr": 100.0, "ethernet-100": 12.5, "ethernet-400": 50.0}
"""Nominal bandwidth in GB/s with which a device sends: `INSIDE` its own host by NVLink or PCIe, and `BETWEEN` hosts by
InfiniBand or Ethernet, with one network card per device."""

LINK_OF = {"A100": "nvlink3", "H100": "nvlink4", "H200": "nvlink4", "B200": "nvlink5"}
LINK_EFFICIENCY = 0.8
"""The fraction of the nominal bandwidth that large collectives reach."""

LATENCY_INSIDE, LATENCY_BETWEEN = 1e-6, 5e-6
"""Assumed latency in seconds of one pass around a ring of devices: `LATENCY_INSIDE` per device plus `LATENCY_BETWEEN`
per host."""

PLANNED_STEPS, CONTEXT_PACKS = 2, 16
"""`PLANNED_STEPS`: the number of steps of the epoch that are planned to estimate the mean step time.
`CONTEXT_PACKS`: the maximum number of packs per micro-batch that are examined to estimate the traffic between context
ranks."""

WORTHWHILE_SPEEDUP = 1.5
"""Doubling the number of devices is worthwhile if steps get at least this many times as fast."""


PARTS = ("even", "waiting", "fixed", "weights", "context")


@dataclass(frozen=True, kw_only=True, slots=True)
class Links:
    """Bandwidth with which a device sends, in bytes per second: to devices on the same host, and to other hosts."""

    inside: float
    between: float
    names: tuple[str, str]

    @staticmethod
    def of(inside: str | None, between: str | None, gpu: str | None) -> Links:
        """Return the bandwidths inside a host and between hosts.

        `inside` and `between` are the name of a link or a number of GB/s. By default, NVLink of the GPU's generation
        connects the devices of a host, and InfiniBand NDR connects hosts.
        """
        default = next((link for name, link in LINK_OF.items() if name.lower() in (gpu or "").lower()), "nvlink4")
        return Links(
            inside=_speed("--link-inside", inside or default, INSIDE),
            between=_speed("--link-between", between or "ndr", BETWEEN),
            names=(inside or default, between or "ndr"),
        )


def _speed(flag: str, given: str, named: dict[str, float]) -> float:
    try:
        speed = named[given] if given in named else float(given)
    except ValueError:
        speed = 0.0
    if not 0 < speed < float("inf"):
        raise UserError(
            f"{flag}", "is not a bandwidth", f"give GB/s as a number, or one of {', '.join(named)}", value=given
        )
    return speed * 1e9


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """The average duration of a step on `ranks` devices, in seconds, and its parts, e.g. compute and communication."""

    ranks: int
    hosts: int
    replicate: int
    micro_batches: float
    even: float  # seconds of compute if all ranks had equal work
    waiting: float  # seconds of waiting for the slowest rank
    fixed: float  # seconds that every micro-batch and every step costs, whatever its number of tokens
    weights: float  # seconds of FSDP's communication that do not overlap with compute
    context: float  # seconds of sending keys and values that do not overlap with compute
    weights_out: float  # bytes of weights and gradients that a host sends to other hosts
    fits: bool | None  # whether the run fits in the memory of a device

    @property
    def seconds(self) -> float:
        return self.even + self.waiting + self.fixed + self.weights + self.context

    def losses(self) -> dict[str, float]:
        """Return the seconds that a step loses to each cause, keyed by a description of the cause.

        Without these losses, a step would take only its compute time, divided evenly over the ranks.
        """
        return {
            f"ranks wait for the slowest rank ({self.micro_batches:.1f} micro-batches per rank)": self.waiting,
            "the fixed cost of each micro-batch and step dominates": self.fixed,
            "gathering weights and reducing gradients takes longer than computing a micro-batch": self.weights,
            "ranks wait for keys and values of other context ranks": self.context,
        }


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Scaling:
    """Estimated step times for growing numbers of devices.

    Every step time is estimated twice: with weights sharded over all ranks, and with one replica of the weights per
    host.
    """

    links: Links
    compute: TimeModel
    sharded: list[StepTime]
    replicated: list[StepTime]

    @property
    def ways(self) -> dict[str, list[StepTime]]:
        """Return the step times by name: "weights sharded over all ranks" and "weights replicated per host".

        The second name is missing if there is only one host.
        """
        ways = {"weights sharded over all ranks": self.sharded, "weights replicated per host": self.replicated}
        return {name: times for name, times in ways.items() if times}

    def efficiency(self, times: Sequence[StepTime]) -> list[float]:
        first = self.sharded[0]
        return [first.seconds * first.ranks / (time.seconds * time.ranks) for time in times]

    @staticmethod
    def limit(times: Sequence[StepTime]) -> tuple[int, str] | None:
        """Return the largest worthwhile number of devices, and why more are not worthwhile; None if all numbers are.

        The reason is the cause in `StepTime.losses` that exceeds perfect scaling the most on the next larger number of
        devices.
        """
        for before, after in pairwise(times):
            if before.seconds / after.seconds < WORTHWHILE_SPEEDUP ** float(np.log2(after.ranks / before.ranks)):
                scale = before.ranks / after.ranks
                grown = {
                    name: lost - scale * was
                    for (name, lost), was in zip(after.losses().items(), before.losses().values(), strict=True)
                }
                return before.ranks, max(grown, key=lambda name: grown[name])
        return None

    def summary(self) -> dict[str, Any]:
        short = {"weights over all ranks": self.sharded, "weights on each host": self.replicated}
        return {
            name: [
                {
                    "ranks": time.ranks,
                    "hosts": time.hosts,
                    "step_seconds": time.seconds,
                    "efficiency": efficiency,
                    "parts": {part: getattr(time, part) for part in PARTS},
                    "weights_bytes_out": time.weights_out,
                    "fits": time.fits,
                }
                for time, efficiency in zip(times, self.efficiency(times), strict=True)
            ]
            for name, times in short.items()
            if times
        }

    def lines(self) -> Iterator[str]:
        yield (
            f"{'scaling':<12}{'ranks':>6}{'hosts':>6}{'step s':>10}{'compute':>10}{'waiting':>10}{'fixed':>10}"
            f"{'weights':>10}{'context':>10}{'GB of weights out':>18}{'efficiency':>12}"
        )
        for times, note in ((self.sharded, ""), (self.replicated, "  replicate = hosts")):
            for time, efficiency in zip(times, self.efficiency(times), strict=True):
                fits = "  does not fit" if time.fits is False else ""
                yield (
                    f"{'':<12}{time.ranks:>6}{time.hosts:>6}{time.seconds:>10.4f}{time.even:>10.4f}"
                    f"{time.waiting:>10.4f}{time.fixed:>10.4f}{time.weights:>10.4f}{time.context:>10.4f}"
                    f"{time.weights_out / 1e9:>18.2f}{efficiency:>12.1%}{note}{fits}"
                )
        for name, times in self.ways.items():
            found = self.limit(times)
            if found is None:
                yield (
                    f"{'':<12}{name}: each doubling up to {times[-1].ranks} ranks makes steps at least "
                    f"{WORTHWHILE_SPEEDUP} times as fast"
                )
            else:
                yield f"{'':<12}{name}: stops scaling after {found[0]} ranks: {found[1]}"
        inside, between = self.links.names
        speeds = self.links.inside / 1e9, self.links.between / 1e9
        yield (
            f"{'assumed':<12}{inside} inside a host, {speeds[0]:g} GB/s per device; {between} between hosts, "
            f"{speeds[1]:g} GB/s per device; collectives reach {LINK_EFFICIENCY:.0%} of these bandwidths"
        )
        yield (
            f"{'':<12}ring latency: {LATENCY_INSIDE * 1e6:g} us per device and {LATENCY_BETWEEN * 1e6:g} us per host; "
            "weight transfers overlap with compute,"
        )
        yield f"{'':<12}except the first gather and the last reduce; context ranks have equal work"
        yield f"{'measured' if self.compute.measured else 'assumed':<12}compute: {self.compute.source}"
        yield f"{'counted':<12}bytes sent, from the shapes of the model and the plan"


def plan_scaling(
    steps: Sequence[Lengths],
    shape: PlanShape,
    time_model: TimeModel,
    parallel: ParallelConfig,
    dtype: str,
    *,
    hosts: int,
    links: Links,
    need: DeviceMemory,
    memory: float,
) -> Scaling:
    """Estimate the step times on 8 devices, 16, 32 and so on, up to `shape.ranks` devices on `hosts` hosts.

    `steps`: sample lengths of each step. `need`: estimates the memory that a device needs. `memory`: the bytes of
    memory of a device.
    """
    Placement(ranks=shape.ranks, hosts=hosts)  # raises a `UserError` if the hosts cannot have equally many ranks
    if time_model.per_second is None:
        raise UserError(
            "--hosts",
            f"{hosts} needs step times in seconds, which this cost model does not give",
            "give --gpu with model.dtype=bfloat16, or set batch.cost to the file of a measured cost model",
        )
    each = shape.ranks // hosts
    first = max(BASELINE_DEVICES, shape.context)
    counts = [first << doubling for doubling in range(32) if first << doubling < shape.ranks] + [shape.ranks]
    counts = [count for count in counts if not count % shape.context and (count <= each or not count % each)]
    chosen = [steps[step] for step in spread(len(steps), PLANNED_STEPS).tolist()]
    sharded, replicated = [], []
    for ranks in counts:
        plans = [
            plan_step(
                step, ranks=ranks // shape.context, max_tokens=shape.pack_tokens, cost=time_model.cost, overlong="alone"
            )
            for step in chosen
        ]
        on_hosts = max(1, ranks // each)

        def timed(replicate: int, ranks: int = ranks, on_hosts: int = on_hosts, plans: Any = plans) -> StepTime:
            placement = Placement(ranks=ranks, hosts=on_hosts, context=shape.context, replicate=replicate)
            estimate = need.estimate(replace(shape, ranks=ranks, replicate=replicate))
            return _step_time(
                plans, placement, time_model, parallel, dtype, links, need, fits=estimate.device <= memory
            )

        sharded.append(timed(1))
        if on_hosts > 1 and each % shape.context == 0:
            replicated.append(timed(on_hosts))
    return Scaling(links=links, compute=time_model, sharded=sharded, replicated=replicated)


def _step_time(
    plans: Sequence[StepPlan],
    placement: Placement,
    time_model: TimeModel,
    parallel: ParallelConfig,
    dtype: str,
    links: Links,
    need: DeviceMemory,
    *,
    fits: bool,
) -> StepTime:
    assert time_model.per_second is not None
    cost, rate = time_model.cost, time_model.per_second
    size = NUMBER_BYTES[dtype]
    assert parallel.reshard != "auto", "must be resolved by the caller"
    sent = weights_traffic(need.model, placement, size=size, reshard=parallel.reshard, backend="nccl", micro_batches=1)
    units = fsdp_units(need.model, placement.ranks // placement.replicate)
    collectives = (3 if parallel.reshard else 2) * len(units) + (placement.replicate > 1) * len(units)
    moving = _seconds(sent, links) + collectives * _latency(placement)
    exposed = moving / len(units)  # the first gather and the last reduce do not overlap with compute
    parts = dict.fromkeys(PARTS, 0.0)
    for plan in plans:
        compute = (plan.cost - cost.constant) / placement.context / rate  # [data ranks, J]
        slowest = compute.max(0)
        parts["even"] += float(compute.mean(0).sum())
        parts["waiting"] += float((slowest - compute.mean(0)).sum())
        parts["fixed"] += (plan.num_micro_batches * cost.constant + cost.step) / rate
        context = _context_seconds(plan, placement, parallel, need, links, size)
        hidden_by = slowest + cost.constant / rate
        if parallel.method == "ring":
            parts["weights"] += float(np.maximum(moving + context - hidden_by, 0.0).sum()) + exposed
        else:
            parts["context"] += float(context.sum())
            parts["weights"] += float(np.maximum(moving - hidden_by, 0.0).sum()) + exposed
    micro_batches = sum(plan.num_micro_batches for plan in plans) / len(plans)
    return StepTime(
        ranks=placement.ranks,
        hosts=placement.hosts,
        replicate=placement.replicate,
        micro_batches=micro_batches,
        weights_out=micro_batches * sent.of_host(0)[1],
        fits=fits,
        **{name: total / len(plans) for name, total in parts.items()},
    )


def _context_seconds(
    plan: StepPlan, placement: Placement, parallel: ParallelConfig, need: DeviceMemory, links: Links, size: int
) -> Any:
    """Return the seconds that context ranks need to send each other keys and values in each of J micro-batches, [J].

    The seconds of a micro-batch are estimated from its first `CONTEXT_PACKS` packs. `size`: bytes of an element.
    """
    found = np.zeros(plan.num_micro_batches)
    if placement.context == 1:
        return found
    packs = min(plan.ranks, CONTEXT_PACKS)
    few = replace(placement, ranks=packs * placement.context, hosts=1)
    crosses = placement.hosts_of(placement.context_groups) > 1
    sizes = ModelSizes.of(need.model.config)
    for j in range(plan.num_micro_batches):
        micro_batch = replace(plan, micro_batches=tuple((of_rank[j],) for of_rank in plan.micro_batches[:packs]))
        sent = context_traffic(micro_batch, sizes, few, parallel, size=size)
        most = max((float(each.max()) for each in sent.inside.values()), default=0.0)
        found[j] = most / LINK_EFFICIENCY / (links.between if crosses else links.inside)
    return found


def _seconds(sent: Traffic, links: Links) -> float:
    """Return the seconds that the traffic takes: inside hosts or between hosts, whichever takes longer.

    All devices of a host share its bandwidth to other hosts.
    """
    placement = sent.placement
    inside = float(sum(sent.inside.values(), np.zeros(placement.ranks)).max())
    host = placement.host(np.arange(placement.ranks))
    outside = float(np.bincount(host, weights=sum(sent.between.values(), np.zeros(placement.ranks))).max())
    return max(inside / links.inside, outside / (links.between * placement.ranks_per_host)) / LINK_EFFICIENCY


def _latency(placement: Placement) -> float:
    """Return the latency in seconds of one pass around the ring of devices that shard the weights."""
    shards = placement.ranks // placement.replicate
    passed = placement.hosts_of(placement.shard_groups)
    return shards * LATENCY_INSIDE + (passed if passed > 1 else 0) * LATENCY_BETWEEN
