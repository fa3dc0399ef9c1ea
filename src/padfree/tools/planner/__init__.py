"""What a run would do, before anything is rented: steps, packs, balance, time and memory from lengths and a config.

steps        lengths of the samples in each optimizer step of a run
epoch        plans of these steps
context      how evenly each layout divides rows among context ranks
padding      the same epoch with padded rows
memory       about what a device needs, and the largest micro-batch that fits
time_model   how long steps take
traffic      which rank is on which host, and what they send each other
scaling      how long steps take on more devices, communication included
run_plan     all of it, as numbers and as lines
page         all of it, as an HTML page
suggest      settings to start from, with reasons
calibrate    the cost model measured on this device
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
