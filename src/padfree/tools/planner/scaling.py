"""How a step's time would change with the number of devices: compute from the plan, bytes from the traffic model.

    micro-batch j    compute   ##########              the slowest rank's, from the cost model
                     weights   ====================    gathered and reduced meanwhile: what is longer than the compute
                                                       is waited for, and so are the first gather and the last reduce
                     context   ++++                    keys and values: waited for (a ring: hidden as the weights are)

    seconds of a collective    bytes over a link / what the link carries, the slower of inside and between hosts, and
                               a delay for every device that the bytes pass

The same steps are planned for 8 devices, 16, 32, ... and the number asked for; efficiency is the speed of a device over
its speed among the first. Bytes are counted (`traffic`, checked on real links by tests/hosts). Compute
is measured where the cost model is. Speeds and delays of links, the share of them that is reached, and that all of it
overlaps as drawn, are assumptions, and the output says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from padfree.config import Config
from padfree.errors import UserError
from padfree.packing import StepPlan, plan_step
from padfree.sizes import ModelSizes
from padfree.tools.planner.epoch import PlanShape
from padfree.tools.planner.memory_plan import DeviceMemory
from padfree.tools.planner.steps import Lengths, spread
from padfree.tools.planner.time_model import TimeModel
from padfree.tools.planner.traffic import NUMBER_BYTES, Placement, Traffic, context_traffic, fsdp_units, weights_traffic

FIRST = 8
"""Devices that the others are compared with."""

INSIDE = {"nvlink3": 300.0, "nvlink4": 450.0, "nvlink5": 900.0, "pcie4": 32.0, "pcie5": 64.0}
BETWEEN = {"hdr": 25.0, "ndr": 50.0, "xdr": 100.0, "ethernet-100": 12.5, "ethernet-400": 50.0}
"""GB/s that a device can send, as the makers name them: NVLink and PCIe; InfiniBand with a card for every device."""

LINK_OF = {"A100": "nvlink3", "H100": "nvlink4", "H200": "nvlink4", "B200": "nvlink5"}
REACHED = 0.8
"""Of these speeds, what large collectives reach."""

DELAY_INSIDE, DELAY_BETWEEN = 1e-6, 5e-6
"""Seconds for each device and each host that a ring passes."""

PLANNED_STEPS, CONTEXT_ROWS = 2, 16
"""So many steps are planned for every number of devices, and of so many rows the context traffic is counted."""

ENOUGH = 1.5
"""Twice the devices that are less than this much faster are not worth having."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Links:
    """What a device can send, in bytes a second: to devices of its host, and to other hosts."""

    inside: float
    between: float
    names: tuple[str, str]

    @staticmethod
    def of(inside: str | None, between: str | None, gpu: str | None) -> Links:
        """Names, or GB/s as numbers; by default those of the GPU and InfiniBand NDR."""
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
        raise UserError(f"{flag}", "", f"give GB/s, or one of {', '.join(named)}", value=given)
    return speed * 1e9


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Seconds of a step on average, part by part, on so many devices."""

    ranks: int
    hosts: int
    replicate: int
    micro_batches: float
    even: float  # compute, if all ranks had the same
    waiting: float  # for the slowest rank
    fixed: float  # what each micro-batch and each step costs besides
    weights: float  # gathering and reducing, what of it is not hidden
    context: float  # keys and values
    weights_out: float  # bytes of weights and their gradients that a host sends to others
    fits: bool | None

    @property
    def seconds(self) -> float:
        return self.even + self.waiting + self.fixed + self.weights + self.context

    def losses(self) -> dict[str, float]:
        """What keeps a step from being as short as its compute, in words."""
        return {
            f"ranks wait for the slowest, {self.micro_batches:.1f} micro-batches a rank": self.waiting,
            "each micro-batch and step costs something by itself": self.fixed,
            "weights are gathered and reduced for longer than a micro-batch computes": self.weights,
            "keys and values travel": self.context,
        }


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Scaling:
    """The same steps on more and more devices; once with the weights over all, once with a copy on each host."""

    links: Links
    compute: TimeModel
    sharded: list[StepTime]
    replicated: list[StepTime]

    def efficiency(self, times: Sequence[StepTime]) -> list[float]:
        first = self.sharded[0]
        return [first.seconds * first.ranks / (time.seconds * time.ranks) for time in times]

    @staticmethod
    def limit(times: Sequence[StepTime]) -> tuple[int, str] | None:
        """The last number of devices that was worth doubling to, and what has grown most behind it."""
        for before, after in pairwise(times):
            if before.seconds / after.seconds < ENOUGH ** float(np.log2(after.ranks / before.ranks)):
                scale = before.ranks / after.ranks
                grown = {
                    name: lost - scale * was
                    for (name, lost), was in zip(after.losses().items(), before.losses().values(), strict=True)
                }
                return before.ranks, max(grown, key=lambda name: grown[name])
        return None

    def summary(self) -> dict[str, Any]:
        ways = {"weights over all ranks": self.sharded, "weights on each host": self.replicated}
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
            for name, times in ways.items()
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
        for name, times in (("weights over all ranks", self.sharded), ("weights on each host", self.replicated)):
            if not times:
                continue
            found = self.limit(times)
            if found is None:
                yield f"{'':<12}{name}: every doubling up to {times[-1].ranks} is {ENOUGH} times as fast or more"
            else:
                yield f"{'':<12}{name}: it stops to scale after {found[0]} ranks: {found[1]}"
        inside, between = self.links.names
        speeds = self.links.inside / 1e9, self.links.between / 1e9
        yield (
            f"{'assumed':<12}{inside} inside a host, {speeds[0]:g} GB/s a device; {between} between hosts, "
            f"{speeds[1]:g} GB/s a device; {REACHED:.0%} of both is reached"
        )
        yield (
            f"{'':<12}a ring is delayed by {DELAY_INSIDE * 1e6:g} us a device and {DELAY_BETWEEN * 1e6:g} us a host; "
            "weights travel while a micro-batch computes,"
        )
        yield f"{'':<12}but for the first gather and the last reduce; context ranks have the same to do"
        yield f"{'measured' if self.compute.measured else 'assumed':<12}compute: {self.compute.source}"
        yield f"{'counted':<12}bytes, as the tests of hosts count them on links"


PARTS = ("even", "waiting", "fixed", "weights", "context")


def plan_scaling(
    steps: Sequence[Lengths],
    shape: PlanShape,
    time_model: TimeModel,
    config: Config,
    *,
    hosts: int,
    links: Links,
    need: DeviceMemory,
    memory: float,
) -> Scaling:
    """The times of 8 devices, twice as many, and so on up to `shape.ranks` on `hosts` hosts."""
    if shape.ranks % hosts:
        raise UserError("--hosts", f"{hosts} does not divide {shape.ranks} ranks", "give as many ranks to each")
    if time_model.per_second is None:
        raise UserError(
            "--hosts", f"{hosts} needs seconds", "give --gpu and bfloat16, or set batch.cost to a measurement"
        )
    each = shape.ranks // hosts
    first = max(FIRST, shape.context)
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
            return _step_time(plans, placement, time_model, config, links, need, fits=estimate.device <= memory)

        sharded.append(timed(1))
        if on_hosts > 1 and each % shape.context == 0:
            replicated.append(timed(on_hosts))
    return Scaling(links=links, compute=time_model, sharded=sharded, replicated=replicated)


def _step_time(
    plans: Sequence[StepPlan],
    placement: Placement,
    time_model: TimeModel,
    config: Config,
    links: Links,
    need: DeviceMemory,
    *,
    fits: bool,
) -> StepTime:
    assert time_model.per_second is not None
    cost, rate = time_model.cost, time_model.per_second
    size = NUMBER_BYTES[config.model.dtype]
    assert config.parallel.reshard != "auto", "settled before"
    sent = weights_traffic(
        need.model, placement, size=size, reshard=config.parallel.reshard, backend="nccl", micro_batches=1
    )
    units = fsdp_units(need.model, placement.ranks // placement.replicate)
    collectives = (3 if config.parallel.reshard else 2) * len(units) + (placement.replicate > 1) * len(units)
    moving = _seconds(sent, links) + collectives * _delay(placement)
    alone = moving / len(units)  # what nothing hides: the first gather, and the last reduce of about the same size
    parts = dict.fromkeys(PARTS, 0.0)
    for plan in plans:
        compute = (plan.cost - cost.constant) / placement.context / rate  # [rows, J]
        slowest = compute.max(0)
        parts["even"] += float(compute.mean(0).sum())
        parts["waiting"] += float((slowest - compute.mean(0)).sum())
        parts["fixed"] += (plan.num_micro_batches * cost.constant + cost.step) / rate
        context = _context_seconds(plan, placement, config, need, links, size)
        hidden_by = slowest + cost.constant / rate
        if config.parallel.method == "ring":
            parts["weights"] += float(np.maximum(moving + context - hidden_by, 0.0).sum()) + alone
        else:
            parts["context"] += float(context.sum())
            parts["weights"] += float(np.maximum(moving - hidden_by, 0.0).sum()) + alone
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
    plan: StepPlan, placement: Placement, config: Config, need: DeviceMemory, links: Links, size: int
) -> Any:
    """[J] of each micro-batch, from its first rows."""
    found = np.zeros(plan.num_micro_batches)
    if placement.context == 1:
        return found
    rows = min(plan.ranks, CONTEXT_ROWS)
    few = replace(placement, ranks=rows * placement.context, hosts=1)
    crosses = placement.hosts_of(placement.context_groups) > 1
    sizes = ModelSizes.of(need.model.config)
    for j in range(plan.num_micro_batches):
        column = replace(plan, micro_batches=tuple((row[j],) for row in plan.micro_batches[:rows]))
        sent = context_traffic(column, sizes, few, config, size=size)
        most = max((float(each.max()) for each in sent.inside.values()), default=0.0)
        found[j] = most / REACHED / (links.between if crosses else links.inside)
    return found


def _seconds(sent: Traffic, links: Links) -> float:
    """The slower of the fullest link inside a host and of a host's way out, which all of its devices share."""
    placement = sent.placement
    inside = float(sum(sent.inside.values(), np.zeros(placement.ranks)).max())
    host = placement.host(np.arange(placement.ranks))
    outside = float(np.bincount(host, weights=sum(sent.between.values(), np.zeros(placement.ranks))).max())
    return max(inside / links.inside, outside / (links.between * placement.ranks_per_host)) / REACHED


def _delay(placement: Placement) -> float:
    """Of one ring over the shards."""
    shards = placement.ranks // placement.replicate
    passed = placement.hosts_of(placement.shard_groups)
    return shards * DELAY_INSIDE + (passed if passed > 1 else 0) * DELAY_BETWEEN
