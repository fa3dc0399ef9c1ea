"""Plan some steps of an epoch: which samples form which micro-batch on which rank.

    steps     0   1   2   3   4   5   6   7   8   9
    planned       x       x           x       x

Planning a step takes milliseconds, and an epoch can have thousands of steps. Therefore, only `EXACT_STEPS` evenly
spread steps are planned by default. Balance and time of the whole epoch are estimated from these steps.
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
"""The default number of steps that are planned, i.e. whose samples are assigned to micro-batches. Values of the whole
epoch are estimated from these steps."""

OnPlannedStep = Callable[[int, int], None]
"""Function that is called with the number of steps planned so far and the total number of steps to plan."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanShape:
    """The number of devices, how they divide the work, and the tokens that one device may hold."""

    ranks: int
    context: int = 1
    replicate: int = 1
    max_tokens: int  # maximum tokens of a micro-batch on one device

    def __post_init__(self) -> None:
        for flag, value in (("--ranks", self.ranks), ("--cp", self.context), ("--max-tokens", self.max_tokens)):
            if value < 1:
                raise UserError(f"{flag}", "is not a positive number", "give 1 or more", value=value)
        if self.ranks % (self.context * self.replicate):
            times = f" × {self.replicate} (--cp × parallel.replicate)" if self.replicate > 1 else ""
            raise UserError(
                "--cp",
                f"{self.ranks} ranks cannot be divided into groups of {self.context}{times}",
                f"set --ranks to a multiple of {self.context * self.replicate}, or change --cp",
            )

    @property
    def data_ranks(self) -> int:
        return self.ranks // self.context

    @property
    def shards(self) -> int:
        """Return the number of devices over which weights and optimizer state are sharded."""
        return self.ranks // self.replicate

    @property
    def pack_tokens(self) -> int:
        """Return the maximum number of tokens of a pack: tokens per rank times the ranks that share the pack."""
        return self.max_tokens * self.context


@dataclass(frozen=True, kw_only=True, eq=False)
class EpochPlan:
    """One pass over the data: the sample lengths of all steps, and the packing plans of some of the steps.

    A plan says which samples form which micro-batch on which rank.
    """

    shape: PlanShape
    cost: CostModel
    steps: Sequence[Lengths]
    planned: Lengths  # [P] indices of the P planned steps
    plans: list[StepPlan]  # [P] plan of each planned step

    @cached_property
    def tokens(self) -> Lengths:
        """Return an array with the number of tokens of each step."""
        return np.array([step.sum() for step in self.steps], dtype=np.int64)

    @cached_property
    def slot_tokens(self) -> Lengths:
        """Return the number of tokens of each micro-batch of each data rank in each planned step, as a flat array."""
        return np.concatenate([plan.computed_tokens.ravel() for plan in self.plans])

    @property
    def fill(self) -> float:
        """Return the number of tokens in the micro-batches of the planned steps, divided by their capacity."""
        held = np.minimum(self.slot_tokens, self.shape.pack_tokens)
        return float(held.sum() / (held.size * self.shape.pack_tokens))

    @property
    def imbalances(self) -> list[float]:
        """Return, for each of the P planned steps, its cost divided by the cost with equally loaded ranks, [P]."""
        return [plan.imbalance for plan in self.plans]

    @property
    def imbalance(self) -> float:
        """Return the cost of the planned steps divided by the cost that they would have if all data ranks were equally
        loaded, so that no rank waits for another.
        """
        mean = sum(float(plan.cost.sum()) / plan.ranks for plan in self.plans)
        return sum(plan.step_cost for plan in self.plans) / mean if mean else 1.0

    @property
    def micro_batches(self) -> float:
        """Return the mean number of micro-batches that a rank computes in a step."""
        return sum(plan.num_micro_batches for plan in self.plans) / len(self.plans)

    @cached_property
    def costs(self) -> Floats:
        """Return the cost of each step, [steps]: the sum of the costs of its samples, without the fixed cost that every
        micro-batch adds.
        """
        return np.array([self.cost(step).sum() for step in self.steps])

    @cached_property
    def attention_share(self) -> float:
        """Return the share of attention in the cost of the epoch: the part that grows with the square of the sample
        length.
        """
        square = sum(float(np.square(step.astype(np.float64)).sum()) for step in self.steps)
        return self.cost.quadratic * square / float(self.costs.sum())

    def time(self, context_imbalance: float = 1.0) -> float:
        """Return the time of the whole epoch in the units of the cost model (e.g. seconds).

        `context_imbalance`: the attention cost of the slowest context rank divided by the mean attention cost. Context
        ranks divide all other work evenly.
        """
        uneven = 1 + self.attention_share * (context_imbalance - 1)
        total = 0.0
        for plan in self.plans:
            constant = plan.num_micro_batches * self.cost.constant
            total += (plan.step_cost - constant) / self.shape.context * uneven + constant + self.cost.step
        return total * float(self.costs.sum() / self.costs[self.planned].sum())

    def packs(self, most: int) -> list[Lengths]:
        """Return the sample lengths of some packs, evenly spread over the planned steps.

        There are no more than `most` packs. The pack with the longest sample is one of them.
        """
        slots = [
            lengths
            for plan in self.plans
            for of_rank in plan.micro_batches
            for indices in of_rank
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
    """Assign the samples of some steps to micro-batches and ranks.

    `steps`: sample lengths of each step. `exact_steps`: the number of evenly spread steps to plan; None: all steps.
    `prefixes`: returns the prefix tree of the step with a given index; None: samples share no prefixes.
    """
    if exact_steps is not None and exact_steps < 1:
        raise UserError("--exact-steps", "is not a positive number", "give 1 or more", value=exact_steps)
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
