"""Suggest `batch.max_tokens`, `parallel.context` and `parallel.layout`, with a reason for each.

- `parallel.context` (number of devices that share a pack): as few as can hold the longest sample together, or twice as
  many if steps then get faster by more than FASTER_FACTOR.
- `batch.max_tokens`: the fastest of up to three values that fit in memory, according to plans of some steps.
- `parallel.layout` (which tokens of a pack each device holds): the layout with the most even attention cost. Of equal
  layouts, the one with which devices read the fewest attention keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from padfree.choices import LayoutKind
from padfree.packing import CostModel
from padfree.tools.planner.context import BALANCE_PACKS, KINDS, ContextBalance, context_balance
from padfree.tools.planner.epoch import EpochPlan, PlanShape, plan_epoch
from padfree.tools.planner.memory_plan import GIBIBYTE, TOKEN_STEP, DeviceMemory
from padfree.tools.planner.steps import Lengths
from padfree.train.resolve_auto import USABLE_FRACTION

TRIED_STEPS = 16
"""The number of steps that are planned for each candidate, i.e. each combination of settings."""

SAME_FACTOR = 1.01
"""A step time or a layout's imbalance counts as equal to the lowest one if it is at most this many times as high."""

FASTER_FACTOR = 1.05
"""`suggest` takes twice as many context ranks as the longest sample needs if steps get faster by more than this
factor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Suggestion:
    """Suggested settings and the reasons. All settings are None if no settings let the run fit in memory."""

    max_tokens: int | None
    context: int | None
    layout: LayoutKind | None
    reasons: list[str]

    def overrides(self) -> list[str]:
        """Return the suggested settings as arguments of a training command, e.g. `batch.max_tokens=8192`."""
        named = {
            "batch.max_tokens": self.max_tokens, "parallel.context": self.context, "parallel.layout": self.layout
        }  # fmt: skip
        return [f"{name}={value}" for name, value in named.items() if value is not None]


def suggest(
    steps: Sequence[Lengths], shape: PlanShape, cost: CostModel, *, need: DeviceMemory, memory: float
) -> Suggestion:
    """Suggest settings for `shape.ranks` devices of `memory` bytes each.

    `steps`: sample lengths of each step. `shape.context` and `shape.max_tokens` are ignored.
    """
    contexts = [size for size in range(1, shape.ranks + 1) if shape.ranks % (size * shape.replicate) == 0]
    longest = max(int(step.max()) for step in steps)

    def most_of(context: int) -> int:
        return need.most_tokens(replace(shape, context=context), memory)

    if not most_of(1):
        return _nothing_fits(shape, need, memory, longest)
    context = next((size for size in contexts if size * most_of(size) >= longest), contexts[-1])
    most = most_of(context)
    fits = context * most >= longest
    reasons = [
        f"memory: a device of {memory / GIBIBYTE:.0f} GiB has room for micro-batches of about {most:,} tokens "
        f"({USABLE_FRACTION:.0%} of the memory used, {need.config.model.dtype}, checkpointing {need.checkpointing})",
        *_why_context(context, most, longest, fits),
    ]
    if not fits and need.checkpointing != "full":
        full = need.most_tokens(replace(shape, context=context), memory, checkpointing="full")
        reasons.append(f"with parallel.checkpointing=full a device would have room for about {full:,} tokens")
    tried = _tried_caps(steps, replace(shape, context=context), cost, most, longest)
    best = _fastest(tried)
    if fits and (twice := 2 * context) in contexts and (most_twice := most_of(twice)):
        wider = _tried_caps(steps, replace(shape, context=twice), cost, most_twice, longest)
        faster = _fastest(wider)
        if best.time > faster.time * FASTER_FACTOR:
            reasons.append(
                f"context {twice} instead of {context}: steps are {best.time / faster.time:.2f} times as fast, because "
                f"data ranks wait less for ranks with long samples (imbalance {best.epoch.imbalance:.3f} with "
                f"{context}, {faster.epoch.imbalance:.3f} with {twice})"
            )
            tried, best, most = wider, faster, most_twice
    reasons += _why_cap(best, tried, most)
    layout = best.balances[0].kind if best.balances else None
    reasons += _why_layout(best.balances)
    chosen = best.epoch.shape
    return Suggestion(max_tokens=chosen.max_tokens, context=chosen.context, layout=layout, reasons=reasons)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Tried:
    epoch: EpochPlan
    balances: list[ContextBalance]  # the best layout first; empty for one context rank
    time: float


def _tried(steps: Sequence[Lengths], shape: PlanShape, cost: CostModel) -> _Tried:
    epoch = plan_epoch(steps, shape, cost, exact_steps=TRIED_STEPS)
    if shape.context == 1:
        return _Tried(epoch=epoch, balances=[], time=epoch.time())
    packs = epoch.packs(BALANCE_PACKS)
    balances = sorted((context_balance(packs, shape.context, kind) for kind in KINDS), key=lambda each: each.mean)
    same = [each for each in balances if each.mean <= balances[0].mean * SAME_FACTOR]
    best = min(same, key=lambda each: each.key_tokens)
    others = [each for each in balances if each is not best]
    return _Tried(epoch=epoch, balances=[best, *others], time=epoch.time(best.mean))


def _tried_caps(steps: Sequence[Lengths], shape: PlanShape, cost: CostModel, most: int, longest: int) -> list[_Tried]:
    """Plan the steps with up to three values of `batch.max_tokens`. Return one plan per value, largest value first.

    `most`: tokens that fit in memory. `longest`: tokens of the longest sample.
    """
    useful = _rounded_up(-(-max(int(step.sum()) for step in steps) // shape.ranks))
    least = min(most, _rounded_up(-(-longest // shape.context)))
    largest = max(least, min(most, useful))
    caps = {max(least, min(largest, _rounded_up(largest // part))) for part in (1, 2, 4)}
    return [_tried(steps, replace(shape, max_tokens=cap), cost) for cap in sorted(caps, reverse=True)]


def _fastest(tried: Sequence[_Tried]) -> _Tried:
    """Return the plan with the largest `batch.max_tokens` among those that are about as fast as the fastest plan.

    These plans take at most `SAME_FACTOR` times the shortest time.
    """
    least = min(each.time for each in tried)
    return next(each for each in tried if each.time <= least * SAME_FACTOR)


def _rounded_up(tokens: int) -> int:
    return -(-tokens // TOKEN_STEP) * TOKEN_STEP if tokens > TOKEN_STEP else max(1, tokens)


def _why_context(context: int, most: int, longest: int, fits: bool) -> list[str]:
    if not fits:
        return [
            f"context {context}: even {context} context ranks hold only {context * most:,} tokens, but the longest "
            f"sample has {longest:,}; set data.max_length={context * most} and data.overlong, or use more ranks"
        ]
    if context == 1:
        return [f"context 1: the longest sample, {longest:,} tokens, fits on one device"]
    return [
        f"context {context}: the longest sample has {longest:,} tokens; {context} devices together hold "
        f"{context * most:,}, but fewer devices cannot hold the sample"
    ]


def _why_cap(best: _Tried, tried: Sequence[_Tried], most: int) -> list[str]:
    chosen = best.epoch.shape.max_tokens
    if len(tried) == 1:
        why = "the longest sample needs micro-batches of this size, and a step has too few tokens to fill larger ones"
    elif best is not tried[0]:
        why = "the fastest of the planned values"
    else:
        why = "a device's part of a step fits into one micro-batch, so a larger value has no effect"
    if chosen == most:
        why = "the most that memory allows"
    found = [f"max tokens {chosen:,}: {why}"]
    for each in tried:
        epoch = each.epoch
        found.append(
            f"with max tokens {epoch.shape.max_tokens:,}, a step takes {each.time / best.time:.3f} times as long "
            f"as with {chosen:,}; fill {epoch.fill:.1%}, imbalance {epoch.imbalance:.3f}, {epoch.micro_batches:.1f} "
            "micro-batches per step"
        )
    return found


def _why_layout(balances: Sequence[ContextBalance]) -> list[str]:
    if not balances:
        return ["layout: has no effect with one context rank"]
    best, *others = balances
    why = "lowest imbalance of the context ranks"
    if best.mean > min(each.mean for each in others):
        why = f"its imbalance is within {SAME_FACTOR - 1:.0%} of the lowest, and it reads the fewest keys"
    results = (f"{each.kind}: imbalance {each.mean:.3f}, {each.key_tokens:.2f} keys per token" for each in balances)
    return [f"layout {best.kind}: {why} ({'; '.join(results)})"]


def _nothing_fits(shape: PlanShape, need: DeviceMemory, memory: float, longest: int) -> Suggestion:
    least = need.estimate(replace(shape, context=1, max_tokens=1)).device
    reasons = [
        f"nothing fits: even with one token per micro-batch, each of {shape.ranks} devices needs about "
        f"{least / GIBIBYTE:.1f} GiB, but {USABLE_FRACTION:.0%} of {memory / GIBIBYTE:.0f} GiB can be used"
    ]
    for ranks in (shape.ranks << doublings for doublings in range(1, 11)):
        tokens = need.most_tokens(replace(shape, ranks=ranks, context=1), memory)
        if tokens * ranks >= longest:
            reasons.append(f"with {ranks} ranks a device would have room for micro-batches of about {tokens:,} tokens")
            break
    reasons.append("alternatives: parallel.offload=true, adapters (lora.rank), or devices with more memory")
    return Suggestion(max_tokens=None, context=None, layout=None, reasons=reasons)
