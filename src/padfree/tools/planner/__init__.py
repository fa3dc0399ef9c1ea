"""Plan a run before renting devices: steps, packs, balance, time and memory, from sample lengths and a config.

steps        the lengths of the samples in each optimizer step
epoch        the packing plans of these steps: which samples form which micro-batch on which rank
context      how evenly each layout divides packs among context ranks (ranks that share a pack)
padding      the cost of the same epoch with padded batches
memory_plan  the memory that a device needs, and the largest micro-batch that fits
time_model   how long steps take, without communication
traffic      which rank is on which host, and how many bytes the ranks send each other
scaling      how long steps take on more devices, with communication
run_plan     the whole plan, as numbers and as printed lines
plan_page    the whole plan, as an HTML page
suggest      suggested settings, with reasons
calibrate    measures the cost model on this device
"""

from padfree.tools.planner.calibrate import Calibration, calibrate
from padfree.tools.planner.epoch import EpochPlan, PlanShape, plan_epoch
from padfree.tools.planner.memory_plan import DeviceMemory
from padfree.tools.planner.plan_page import write_page
from padfree.tools.planner.run_plan import RunPlan, make_plan
from padfree.tools.planner.steps import StepLengths, load_steps
from padfree.tools.planner.suggest import Suggestion, suggest
from padfree.tools.planner.time_model import TimeModel, choose_time_model

__all__ = [
    "Calibration",
    "DeviceMemory",
    "EpochPlan",
    "PlanShape",
    "RunPlan",
    "StepLengths",
    "Suggestion",
    "TimeModel",
    "calibrate",
    "choose_time_model",
    "load_steps",
    "make_plan",
    "plan_epoch",
    "suggest",
    "write_page",
]
