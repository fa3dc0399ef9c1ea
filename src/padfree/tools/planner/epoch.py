"""The plans of an epoch's steps, and what they add up to.

    steps     0   1   2   3   4   5   6   7   8   9        their samples and tokens are all counted
    planned       x       x           x       x            at most so many are planned to the last micro-batch

A plan takes some milliseconds, a million samples make thousands of steps, and a hundred of them tell the fill and the
imbalance of all. The planned steps are spread evenly, without chance, and the output says how many they are. Averages
are ratios of sums, so that a small last step weighs little.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from padfree.errors import UserError
from padfree.packing import CostModel, PrefixTree, StepPlan, plan_shared_step, plan_step
from padfree.packing.cost import Floats
from padfree.tools.planner.steps import Lengths, spread

EXACT_STEPS = 128
"""How many steps are planned, unless more are asked for."""

OnPlannedStep = Callable[[int, int], None]
"""Called with how many steps are planned and how many will be."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanShape:
    """How many devices there are, how they share the work, and what one of them may hold."""

    ranks: int
    context: int = 1
    replicate: int = 1
    max_tokens: int  # of one device in one micro-batch

    def __post_init__(self) -> None:
        for flag, value in (("--ranks", self.ranks), ("--cp", self.context), ("--max-tokens", self.max_tokens)):
            if value < 1:
                raise UserError(f"{flag}", "", "give 1 or more", value=value)
        if self.ranks % (self.context * self.replicate):
            times = f" times parallel.replicate {self.replicate}" if self.replicate > 1 else ""
            raise UserError(
                "--cp", f"{self.context}{times} does not divide {self.ranks} ranks", "change --cp or --ranks"
            )

    @property
    def data_ranks(self) -> int:
        return self.ranks // self.context

    @property
    def shards(self) -> int:
        """Over how many devices weights and optimizer state are divided."""
        return self.ranks // self.replicate

    @property
    def pack_tokens(self) -> int:
        """What the context ranks of one row hold together."""
        return self.max_tokens * self.context


@dataclass(frozen=True, kw_only=True, eq=False)
class EpochPlan:
    """One pass over the data: all steps as lengths, some of them planned."""

    shape: PlanShape
    cost: CostModel
    steps: Sequence[Lengths]
    planned: Lengths  # [P] which steps
    plans: list[StepPlan]  # [P]

    @cached_property
    def tokens(self) -> Lengths:
        """[steps]"""
        return np.array([step.sum() for step in self.steps], dtype=np.int64)

    @cached_property
    def slot_tokens(self) -> Lengths:
        """[slots] tokens that every planned micro-batch computes."""
        return np.concatenate([plan.computed_tokens.ravel() for plan in self.plans])

    @property
    def fill(self) -> float:
        """Tokens over what the planned micro-batches could hold."""
        held = np.minimum(self.slot_tokens, self.shape.pack_tokens)
        return float(held.sum() / (held.size * self.shape.pack_tokens))

    @property
    def imbalances(self) -> list[float]:
        """[P]"""
        return [plan.imbalance for plan in self.plans]

    @property
    def imbalance(self) -> float:
        """What the planned steps cost over what they would cost if no data rank ever waited."""
        mean = sum(float(plan.cost.sum()) / plan.ranks for plan in self.plans)
        return sum(plan.step_cost for plan in self.plans) / mean if mean else 1.0

    @property
    def micro_batches(self) -> float:
        """Of a step, on each rank, on average."""
        return sum(plan.num_micro_batches for plan in self.plans) / len(self.plans)

    @cached_property
    def costs(self) -> Floats:
        """[steps] of all samples, without what a micro-batch costs on top."""
        return np.array([self.cost(step).sum() for step in self.steps])

    @cached_property
    def attention_share(self) -> float:
        """How much of the cost grows with the square of the length."""
        square = sum(float(np.square(step.astype(np.float64)).sum()) for step in self.steps)
        return self.cost.quadratic * square / float(self.costs.sum())

    def time(self, context_imbalance: float = 1.0) -> float:
        """What the whole epoch takes, in the units of the cost model: rows are divided over the context ranks.

        `context_imbalance`, the slowest of them over the mean, is about attention. The rest of a row is divided evenly,
        since they have the same number of tokens.
        """
        uneven = 1 + self.attention_share * (context_imbalance - 1)
        total = 0.0
        for plan in self.plans:
            constant = plan.num_micro_batches * self.cost.constant
            total += (plan.step_cost - constant) / self.shape.context * uneven + constant + self.cost.step
        return total * float(self.costs.sum() / self.costs[self.planned].sum())

    def rows(self, most: int) -> list[Lengths]:
        """The lengths of some planned micro-batches, spread over all of them, and the one with the longest sample."""
        slots = [
            lengths
            for plan in self.plans
            for row in plan.micro_batches
            for indices in row
            if len(lengths := plan.lengths[indices])
        ]
        longest = max(range(len(slots)), key=lambda slot: int(slots[slot].max()))
        chosen = {longest, *spread(len(slots), most - 1).tolist()}
        return [slots[slot] for slot in sorted(chosen)]


def plan_epoch(
    steps: Sequence[Lengths],
    shape: PlanShape,
    cost: CostModel,
    *,
    exact_steps: int | None = EXACT_STEPS,
    progress: OnPlannedStep | None = None,
    prefixes: Callable[[int], PrefixTree] | None = None,
) -> EpochPlan:
    """Plan `exact_steps` of the steps, spread over the epoch; None: all of them.

    `prefixes`: what the samples of a step share, where they do.
    """
    if exact_steps is not None and exact_steps < 1:
        raise UserError("--exact-steps", "", "give 1 or more", value=exact_steps)
    planned = spread(len(steps), exact_steps or len(steps))
    plans = []
    for step in planned.tolist():
        plan = plan_step if prefixes is None else partial(plan_shared_step, prefixes(step))
        plans.append(
            plan(steps[step], ranks=shape.data_ranks, max_tokens=shape.pack_tokens, cost=cost, overlong="alone")
        )
        if progress is not None:
            progress(len(plans), len(planned))
    return EpochPlan(shape=shape, cost=cost, steps=steps, planned=planned, plans=plans)
