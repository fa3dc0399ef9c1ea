"""What a run would do, before anything is rented: steps, packs, balance, time and memory from lengths and a config.

steps       lengths of the data, in the optimizer steps of a run
epoch       plans of these steps
context     rows on context ranks, for each layout
padding     the same epoch with padded rows
memory      about what a device needs, and the largest micro-batch that fits
clock       from FLOPs to seconds, or measured seconds
plan        all of it, as numbers and as lines
page        all of it, as an HTML page
suggest     settings to start from, with reasons
calibrate   the cost model measured on this device
"""

from padfree.planner.calibrate import Calibration, calibrate
from padfree.planner.clock import Clock, choose_clock
from padfree.planner.epoch import EpochPlan, Shape, plan_epoch
from padfree.planner.memory import DeviceMemory
from padfree.planner.page import write_page
from padfree.planner.run_plan import Plan, make_plan
from padfree.planner.steps import Steps, load_steps
from padfree.planner.suggest import Suggestion, suggest

__all__ = [
    "Calibration",
    "Clock",
    "DeviceMemory",
    "EpochPlan",
    "Plan",
    "Shape",
    "Steps",
    "Suggestion",
    "calibrate",
    "choose_clock",
    "load_steps",
    "make_plan",
    "plan_epoch",
    "suggest",
    "write_page",
]
