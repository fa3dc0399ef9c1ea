"""The result of `padfree plan`, as numbers and as printed lines.

The numbers are computed once and shown in two ways:

    step lengths, shape, time model -> make_plan -> RunPlan -> summary()   plain numbers by name, for --json
                                                            -> lines()     the same numbers as text
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from padfree.choices import LayoutKind
from padfree.estimate.memory import MemoryEstimate
from padfree.tools.planner.context import BALANCE_PACKS, KINDS, ContextBalance, context_balance, long_pack
from padfree.tools.planner.epoch import EXACT_STEPS, EpochPlan, OnPlannedStep, PlanShape, plan_epoch
from padfree.tools.planner.memory_plan import GIBIBYTE, DeviceMemory
from padfree.tools.planner.padding import PADDED_SIZES, USUAL_SIZE, Padded, padded
from padfree.tools.planner.steps import Lengths, StepLengths
from padfree.tools.planner.time_model import TimeModel
from padfree.train.batcher import SourceShare

OTHER_CONTEXTS = (2, 4, 8)
"""The HTML page of `padfree plan` compares layouts (how context ranks divide a pack) for these numbers of context
ranks, whatever --cp is."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RunPlan:
    """A planned epoch, with its estimated time and memory, and how evenly ranks are loaded."""

    lengths: Lengths
    over_budget: int  # samples longer than `batch.tokens`
    shared_tokens: int | None  # tokens saved if a group or a data row shares its prefixes; None: unknown
    plans_sharing: bool  # whether the planned steps share prefixes
    rows: int | None  # number of data rows, if a row can have several samples
    sources: tuple[SourceShare, ...]  # the sources of a mixture
    longest_responses: bool  # each length is a prompt plus the longest response that the settings allow
    epoch: EpochPlan
    layout: LayoutKind
    balances: list[ContextBalance]  # one per layout, over some planned packs; empty for one context rank
    long_pack_balances: dict[
        int, list[ContextBalance]
    ]  # by number of context ranks, one balance per layout of a long pack
    padded: list[Padded]
    time_model: TimeModel
    memory: MemoryEstimate | None  # memory of a device with its largest micro-batch
    dtype: str | None  # dtype that the memory estimate assumes

    @property
    def shape(self) -> PlanShape:
        return self.epoch.shape

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens in one pass over the data."""
        return int(self.lengths.sum())

    @property
    def sharing(self) -> float | None:
        """Return the number of tokens, divided by the number that remains if each shared prefix is computed only once.

        The result is None if it is unknown which samples share prefixes.
        """
        return None if self.shared_tokens is None else self.num_tokens / (self.num_tokens - self.shared_tokens)

    @property
    def packed_cost(self) -> float:
        """Return the total cost of all samples without padding, in the unit of the cost model (e.g. seconds)."""
        return float(self.epoch.costs.sum())

    @property
    def context_imbalance(self) -> float:
        """Return how unevenly this plan's layout loads the context ranks (the ranks that share a pack).

        The result is the cost of the slowest context rank divided by the mean cost. It is 1 if a single rank has the
        whole pack.
        """
        return next((each.mean for each in self.balances if each.kind == self.layout), 1.0)

    @property
    def usual_padding(self) -> Padded:
        return next(each for each in self.padded if each.size == USUAL_SIZE and not each.grouped)

    @property
    def device_tokens(self) -> int:
        return device_tokens(self.epoch.steps, self.shape)

    def summary(self) -> dict[str, Any]:
        """Return the plan as a dict of plain numbers, for `--json`. A number that is unknown is None."""
        epoch, shape, steps = self.epoch, self.shape, len(self.epoch.steps)
        time = epoch.time(self.context_imbalance)
        seconds = self.time_model.seconds(time)
        return {
            "samples": len(self.lengths),
            "rows": self.rows,
            "sources": [asdict(source) for source in self.sources],
            "tokens": self.num_tokens,
            "length": {
                "shortest": int(self.lengths.min()),
                "median": float(np.median(self.lengths)),
                "mean": float(self.lengths.mean()),
                "longest": int(self.lengths.max()),
            },
            "sharing": self.sharing,
            "longest_responses": self.longest_responses,
            "pack_tokens": shape.pack_tokens,
            "overlong": int(np.count_nonzero(self.lengths > shape.pack_tokens)),
            "over_budget": self.over_budget,
            "ranks": shape.ranks,
            "data_ranks": shape.data_ranks,
            "context": shape.context,
            "max_tokens": shape.max_tokens,
            "layout": self.layout,
            "steps": steps,
            "steps_planned": len(epoch.plans),
            "samples_per_step": sum(map(len, epoch.steps)) / steps,
            "tokens_per_step": float(epoch.tokens.mean()),
            "micro_batches_per_step": epoch.micro_batches,
            "fill": epoch.fill,
            "imbalance": epoch.imbalance,
            "imbalance_worst": max(epoch.imbalances),
            "context_balance": {
                each.kind: {"mean": each.mean, "worst": each.worst, "key_tokens": each.key_tokens}
                for each in self.balances
            },
            "padded": [
                {
                    "rows": each.size,
                    "grouped": each.grouped,
                    "tokens": each.tokens,
                    "tokens_over_packed": each.tokens / int(epoch.tokens.sum()),
                    "cost_over_packed": each.cost / self.packed_cost,
                }
                for each in self.padded
            ],
            "padding_avoided": 1 - int(epoch.tokens.sum()) / self.usual_padding.tokens,
            "cost": self.packed_cost,
            "cost_from": self.time_model.source,
            "step_seconds": None if seconds is None else seconds / steps,
            "epoch_seconds": seconds,
            "memory_gib": self._memory(),
        }

    def _memory(self) -> dict[str, float] | None:
        if self.memory is None:
            return None
        names = ("states", "gathered", "activations", "working", "reference", "sampler", "cache", "device", "host")
        return {name: getattr(self.memory, name) / GIBIBYTE for name in names}

    def lines(self) -> Iterator[str]:
        """Yield the summary as lines of text."""
        found, shape = self.summary(), self.shape
        length = found["length"]
        rows = "" if self.rows is None else f"{self.rows:,} rows, "
        yield (
            f"data        {rows}{found['samples']:,} samples, {found['tokens']:,} tokens; "
            f"lengths {length['shortest']:,} to {length['longest']:,}, median {length['median']:,.0f}, mean "
            f"{length['mean']:,.1f}"
        )
        for source in self.sources:
            yield f"            {source.line()}"
        if self.longest_responses:
            yield "            responses are not generated yet: each counts as rollout.max_new_tokens tokens"
        if self.shared_tokens is not None:
            computed = self.num_tokens - self.shared_tokens
            unit, counted = ("data row", f"{computed:,}") if self.plans_sharing else ("group", f"{self.num_tokens:,}")
            yield (
                f"sharing     with batch.share_prefixes, a prefix that samples of a {unit} share is computed once: "
                f"{computed:,} tokens, {found['sharing']:.2f} times fewer; the numbers below are for {counted} tokens"
            )
        limit = f"a pack of {shape.pack_tokens:,} tokens"
        if shape.context > 1:
            limit += f" ({shape.context} x {shape.max_tokens:,})"
        if found["overlong"]:
            yield (
                f"overlong    {found['overlong']:,} samples do not fit in {limit}; the plan gives each its own pack, "
                "but a run stops with an error unless batch.overlong=alone or data.max_length shortens them"
            )
        else:
            yield f"overlong    0 samples; all fit in {limit}"
        if self.over_budget:
            yield (
                f"budget      {self.over_budget:,} samples are longer than batch.tokens; the plan gives each its own "
                "step, but a run stops with an error unless batch.overlong=alone"
            )
        yield (
            f"layout      {shape.ranks} ranks = {shape.data_ranks} data x {shape.context} context"
            + (f", {self.layout}" if shape.context > 1 else "")
        )
        yield (
            f"steps       {found['steps']:,} in an epoch, {found['samples_per_step']:,.1f} samples and "
            f"{found['tokens_per_step']:,.0f} tokens each, {found['micro_batches_per_step']:.1f} micro-batches per rank"
        )
        if found["steps_planned"] < found["steps"]:
            yield (
                f"            fill, imbalance and time are estimated from {found['steps_planned']:,} steps spread over "
                "the epoch; --exact-steps all plans every step"
            )
        yield f"fill        {found['fill']:.2%} of the capacity of the micro-batches"
        yield (
            f"padding     padded batches of {USUAL_SIZE} samples would be {found['padding_avoided']:.1%} padding and "
            f"cost {self.usual_padding.cost / self.packed_cost:.2f} times as much"
        )
        yield (
            f"data ranks  slowest rank {found['imbalance']:.3f} times the mean cost, worst step "
            f"{found['imbalance_worst']:.3f} (1 is perfect)"
        )
        for each in self.balances:
            chosen = "  <- parallel.layout" if each.kind == self.layout else ""
            numbers = f"slowest rank {each.mean:.3f} times the mean cost, worst pack {each.worst:.3f}"
            yield f"context     {each.kind:<10}  {numbers}{chosen}"
        yield self._time_line(found)
        if self.memory is not None:
            yield self._memory_line(self.memory)

    def _memory_line(self, memory: MemoryEstimate) -> str:
        parts = [
            f"{_size(memory.states)} weights, gradients and optimizer" + (" on the CPU" if memory.offloaded else ""),
            f"{_size(memory.gathered)} gathered weights",
            f"{_size(memory.activations)} activations of {self.device_tokens:,} tokens",
            f"{_size(memory.working)} working space",
        ]
        if memory.reference:
            where = " on the CPU" if memory.reference_offloaded else ""
            parts.append(f"{_size(memory.reference)} reference model{where}")
        return f"memory      about {_size(memory.device)} per device in {self.dtype}: {', '.join(parts)}"

    def _time_line(self, found: dict[str, Any]) -> str:
        seconds = found["step_seconds"]
        if seconds is not None:
            left_out = "communication" if self.time_model.cost.step else "optimizer and communication"
            return (
                f"time        about {_duration(seconds)} per step, {_duration(found['epoch_seconds'])} per epoch, "
                f"without {left_out} ({self.time_model.source})"
            )
        if self.time_model.source.startswith("FLOPs"):
            teras = found["cost"] / found["steps"] / 1e12
            shown = f"{teras:,.0f}" if teras >= 100 else f"{teras:.3g}"
            return f"time        {shown} TFLOP per step ({self.time_model.source})"
        return f"time        unknown, because costs are counted in {self.time_model.source}"


def make_plan(
    data: StepLengths,
    shape: PlanShape,
    time_model: TimeModel,
    *,
    layout: LayoutKind = "balanced",
    need: DeviceMemory | None = None,
    exact_steps: int | None = EXACT_STEPS,
    progress: OnPlannedStep | None = None,
) -> RunPlan:
    """Plan the steps of `data`, and estimate their time, their memory and the balance of the ranks.

    `layout`: how context ranks divide a pack. `need`: estimates memory; None: no memory estimate. `exact_steps`: the
    number of steps to plan; None: all steps.
    """
    epoch = plan_epoch(
        data.steps, shape, time_model.cost, exact_steps=exact_steps, progress=progress, prefixes=data.prefixes
    )
    packs = epoch.packs(BALANCE_PACKS)
    return RunPlan(
        lengths=data.lengths,
        over_budget=data.over_budget,
        shared_tokens=data.shared_tokens,
        plans_sharing=data.prefixes is not None,
        rows=data.rows,
        sources=data.sources,
        longest_responses=data.longest_responses,
        epoch=epoch,
        layout=layout,
        balances=[context_balance(packs, shape.context, kind) for kind in KINDS] if shape.context > 1 else [],
        long_pack_balances={
            world: [context_balance([long_pack(data.lengths, shape.max_tokens * world)], world, kind) for kind in KINDS]
            for world in OTHER_CONTEXTS
        },
        padded=[
            padded(data.steps, time_model.cost, size=size, grouped=grouped)
            for grouped in (False, True)
            for size in PADDED_SIZES
        ],
        time_model=time_model,
        memory=None if need is None else need.estimate(replace(shape, max_tokens=device_tokens(data.steps, shape))),
        dtype=None if need is None else need.config.model.dtype,
    )


def device_tokens(steps: Sequence[Lengths], shape: PlanShape) -> int:
    """Return the largest number of tokens that one device holds in a micro-batch.

    Context ranks hold equal parts of a pack. A sample longer than `shape.pack_tokens` has a pack of its own.
    """
    longest, largest = max(int(step.max()) for step in steps), max(int(step.sum()) for step in steps)
    return -(-max(longest, min(shape.pack_tokens, largest)) // shape.context)


def _size(count: float) -> str:
    return f"{count / GIBIBYTE:.1f} GiB" if count >= GIBIBYTE / 10 else f"{count / 2**20:.1f} MiB"


def _duration(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
