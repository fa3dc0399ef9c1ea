"""Assign samples to packs and ranks. A pack is one sequence in which several samples follow each other without
padding.
"""

from padfree.packing.balance import balance
from padfree.packing.collate import collate, pack, unpack
from padfree.packing.cost import CostModel
from padfree.packing.fill import fill
from padfree.packing.prefixes import PrefixTree, find_prefixes
from padfree.packing.shared_plan import plan_shared_step
from padfree.packing.step_plan import StepPlan, plan_step
from padfree.packing.stream import FixedSizeBatcher, TokenBudgetBatcher

__all__ = [
    "CostModel",
    "FixedSizeBatcher",
    "PrefixTree",
    "StepPlan",
    "TokenBudgetBatcher",
    "balance",
    "collate",
    "fill",
    "find_prefixes",
    "pack",
    "plan_shared_step",
    "plan_step",
    "unpack",
]
