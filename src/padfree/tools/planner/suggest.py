"""Settings to start from: tokens of a micro-batch, context ranks, layout, each with the reason for it.

    memory of a device   ->  the most tokens it can hold
    longest sample       ->  the smallest context whose ranks hold it together
    plans of some steps  ->  of a few caps at or below the most, the one whose steps take least
                             twice the context, if that is faster by more than FASTER_FACTOR
    rows of these plans  ->  the layout whose slowest rank is nearest to the mean; of equals, the one that reads least

Every candidate is planned with `plan_epoch`, as a run would plan it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from padfree.config.choices import LayoutKind
from padfree.packing import CostModel
from padfree.tools.planner.context import BALANCE_PACKS, KINDS, ContextBalance, context_balance
from padfree.tools.planner.epoch import EpochPlan, PlanShape, plan_epoch
from padfree.tools.planner.memory_plan import GIBIBYTE, TOKEN_STEP, DeviceMemory
from padfree.tools.planner.steps import Lengths
from padfree.train.resolve_auto import USABLE_FRACTION

TRIED_STEPS = 16
"""So many steps are planned for each candidate."""

SAME_FACTOR = 1.01
"""Times and costs within this factor count as the same."""

FASTER_FACTOR = 1.05
"""More context ranks than the longest sample needs must be faster by this factor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Suggestion:
    """What to set, and why; nothing to set if no setting fits the memory."""

    max_tokens: int | None
    context: int | None
    layout: LayoutKind | None
    reasons: list[str]

    def overrides(self) -> list[str]:
        """As arguments of `padfree sft` and `padfree rl`."""
        named = {
            "batch.max_tokens": self.max_tokens, "parallel.context": self.context, "parallel.layout": self.layout
        }  # fmt: skip
        return [f"{name}={value}" for name, value in named.items() if value is not None]


def suggest(
    steps: Sequence[Lengths], shape: PlanShape, cost: CostModel, *, need: DeviceMemory, memory: float
) -> Suggestion:
    """Settings for `shape.ranks` devices of `memory` bytes each; `shape.context` and `shape.max_tokens` are free."""
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
        f"a device of {memory / GIBIBYTE:.0f} GiB holds about {most:,} tokens of a micro-batch beside its share of the "
        f"weights ({USABLE_FRACTION:.0%} of the memory used, {need.config.model.dtype}, checkpointing "
        f"{need.checkpointing})",
        *_why_context(context, most, longest, fits),
    ]
    if not fits and need.checkpointing != "full":
        full = need.most_tokens(replace(shape, context=context), memory, checkpointing="full")
        reasons.append(f"parallel.checkpointing=full would let a device hold about {full:,} tokens")
    tried = _tried_caps(steps, replace(shape, context=context), cost, most, longest)
    best = _fastest(tried)
    if fits and (twice := 2 * context) in contexts and (most_twice := most_of(twice)):
        wider = _tried_caps(steps, replace(shape, context=twice), cost, most_twice, longest)
        faster = _fastest(wider)
        if best.time > faster.time * FASTER_FACTOR:
            reasons.append(
                f"context {twice} instead of {context}: steps are {best.time / faster.time:.2f} times as fast, since "
                f"long samples keep other data ranks waiting (imbalance {best.epoch.imbalance:.3f} with {context}, "
                f"{faster.epoch.imbalance:.3f} with {twice})"
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
    balances: list[ContextBalance]  # the best layout first; none for one context rank
    time: float


def _tried(steps: Sequence[Lengths], shape: PlanShape, cost: CostModel) -> _Tried:
    epoch = plan_epoch(steps, shape, cost, exact_steps=TRIED_STEPS)
    if shape.context == 1:
        return _Tried(epoch=epoch, balances=[], time=epoch.time())
    rows = epoch.rows(BALANCE_PACKS)
    balances = sorted((context_balance(rows, shape.context, kind) for kind in KINDS), key=lambda each: each.mean)
    same = [each for each in balances if each.mean <= balances[0].mean * SAME_FACTOR]
    best = min(same, key=lambda each: each.key_tokens)
    others = [each for each in balances if each is not best]
    return _Tried(epoch=epoch, balances=[best, *others], time=epoch.time(best.mean))


def _tried_caps(steps: Sequence[Lengths], shape: PlanShape, cost: CostModel, most: int, longest: int) -> list[_Tried]:
    """Caps worth planning, the largest first: no more than memory allows or than one micro-batch a step needs, no less
    than holds the longest sample, where memory allows that.
    """
    useful = _rounded_up(-(-max(int(step.sum()) for step in steps) // shape.ranks))
    least = min(most, _rounded_up(-(-longest // shape.context)))
    largest = max(least, min(most, useful))
    caps = {max(least, min(largest, _rounded_up(largest // part))) for part in (1, 2, 4)}
    return [_tried(steps, replace(shape, max_tokens=cap), cost) for cap in sorted(caps, reverse=True)]


def _fastest(tried: Sequence[_Tried]) -> _Tried:
    """The largest cap of those that are as good as the fastest."""
    least = min(each.time for each in tried)
    return next(each for each in tried if each.time <= least * SAME_FACTOR)


def _rounded_up(tokens: int) -> int:
    return -(-tokens // TOKEN_STEP) * TOKEN_STEP if tokens > TOKEN_STEP else max(1, tokens)


def _why_context(context: int, most: int, longest: int, fits: bool) -> list[str]:
    if not fits:
        return [
            f"context {context}: even {context} context ranks hold only {context * most:,} tokens, the longest sample "
            f"has {longest:,}; set data.max_length={context * most} and data.overlong, or plan for more ranks"
        ]
    if context == 1:
        return [f"context 1: the longest sample, {longest:,} tokens, fits on one device"]
    return [
        f"context {context}: the longest sample has {longest:,} tokens; {context} devices hold {context * most:,} "
        "together, fewer do not hold it"
    ]


def _why_cap(best: _Tried, tried: Sequence[_Tried], most: int) -> list[str]:
    chosen = best.epoch.shape.max_tokens
    if len(tried) == 1:
        why = "the longest sample needs it, and a step's tokens fill no more"
    elif best is not tried[0]:
        why = "of the caps that were planned, the fastest"
    else:
        why = "more would not be used, one micro-batch holds a device's part of a step"
    if chosen == most:
        why = "as many as memory allows"
    found = [f"max tokens {chosen:,}: {why}"]
    for each in tried:
        epoch = each.epoch
        found.append(
            f"planned with {epoch.shape.max_tokens:,}: {each.time / best.time:.3f} times the time of {chosen:,}, fill "
            f"{epoch.fill:.1%}, imbalance {epoch.imbalance:.3f}, {epoch.micro_batches:.1f} micro-batches a step"
        )
    return found


def _why_layout(balances: Sequence[ContextBalance]) -> list[str]:
    if not balances:
        return ["layout: with one context rank there is nothing to divide"]
    best, *others = balances
    why = "its slowest context rank is nearest to the mean"
    if best.mean > min(each.mean for each in others):
        why = f"as balanced as the best within {SAME_FACTOR - 1:.0%}, and it reads fewer keys"
    results = (f"{each.kind} {each.mean:.3f} and {each.key_tokens:.2f} keys read a token" for each in balances)
    return [f"layout {best.kind}: {why} ({', '.join(results)})"]


def _nothing_fits(shape: PlanShape, need: DeviceMemory, memory: float, longest: int) -> Suggestion:
    least = need.estimate(replace(shape, context=1, max_tokens=1)).device
    reasons = [
        f"nothing fits: without any tokens a device needs about {least / GIBIBYTE:.1f} GiB at {shape.ranks} ranks, and "
        f"{USABLE_FRACTION:.0%} of {memory / GIBIBYTE:.0f} GiB are there"
    ]
    for ranks in (shape.ranks << doublings for doublings in range(1, 11)):
        tokens = need.most_tokens(replace(shape, ranks=ranks, context=1), memory)
        if tokens * ranks >= longest:
            reasons.append(f"with {ranks} ranks there would be room for about {tokens:,} tokens of a micro-batch")
            break
    reasons.append("parallel.offload=true, lora.rank, or a device with more memory are other ways")
    return Suggestion(max_tokens=None, context=None, layout=None, reasons=reasons)
