"""Plan a run before renting devices: steps, packs, balance, time and memory, from sample lengths and a config.

steps        the sample lengths of each optimizer step
epoch        the packs of some steps
context      how evenly ranks share a pack
padding      the cost of padded batches
memory_plan  the memory of a device
time_model   the time of a step, without communication
traffic      the bytes that ranks send each other
scaling      the time of a step on more devices
run_plan     the whole plan, as text
plan_page    the whole plan, as an HTML page
suggest      suggested settings
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
