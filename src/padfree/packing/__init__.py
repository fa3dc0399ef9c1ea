"""Which sample goes where, and how samples become one token axis."""

from padfree.packing.balance import balance
from padfree.packing.collate import collate, pack, unpack
from padfree.packing.cost import CostModel
from padfree.packing.fill import fill
from padfree.packing.step_plan import StepPlan, plan_step
from padfree.packing.stream import FixedSizeBatcher, TokenBudgetBatcher

__all__ = [
    "CostModel",
    "FixedSizeBatcher",
    "StepPlan",
    "TokenBudgetBatcher",
    "balance",
    "collate",
    "fill",
    "pack",
    "plan_step",
    "unpack",
]
