"""The numbers of a plan compared with brute force, and the printed lines."""

from __future__ import annotations

import json

import numpy as np
import pytest

from padfree.packing import CostModel
from padfree.tools.planner.epoch import PlanShape
from padfree.tools.planner.run_plan import device_tokens, make_plan
from padfree.tools.planner.steps import StepLengths, sft_steps
from padfree.tools.planner.time_model import TimeModel
from tests.tools.planner.cases import config_of, log_normal

COST = CostModel(linear=1.0, quadratic=0.001)
SECONDS = TimeModel(cost=COST, per_second=1000.0, source="measured somewhere")


def test_the_summary_against_brute_force() -> None:
    lengths = log_normal(90, 300)
    data = sft_steps(lengths, config_of(batch={"samples": 16}, data={"shuffle": False}))
    plan = make_plan(data, PlanShape(ranks=4, context=2, max_tokens=256), SECONDS, layout="headtail", exact_steps=None)
    found = plan.summary()
    assert (found["samples"], found["tokens"], found["overlong"]) == (90, int(lengths.sum()), 0)
    assert found["length"] == {
        "shortest": lengths.min(),
        "median": np.median(lengths),
        "mean": lengths.mean(),
        "longest": lengths.max(),
    }
    assert (found["steps"], found["steps_planned"], found["samples_per_step"]) == (6, 6, 15.0)
    assert found["tokens_per_step"] == pytest.approx(lengths.sum() / 6)
    assert (found["data_ranks"], found["context"], found["pack_tokens"]) == (2, 2, 512)

    padded_tokens = 0
    for start in (*range(0, 80, 8), 80, 88):  # steps of 16 in micro-batches of 8, and a last step of 10
        rows = lengths[start : min(start + 8, 90)].tolist()
        padded_tokens += len(rows) * max(rows)
    usual = next(each for each in found["padded"] if each["rows"] == 8 and not each["grouped"])
    assert usual["tokens"] == padded_tokens
    assert found["padding_avoided"] == pytest.approx(1 - lengths.sum() / padded_tokens)
    assert usual["tokens_over_packed"] == pytest.approx(padded_tokens / lengths.sum())

    epoch = plan.epoch
    imbalance = next(each for each in plan.balances if each.kind == "headtail").mean
    assert found["epoch_seconds"] == pytest.approx(epoch.time(imbalance) / 1000)
    assert found["step_seconds"] == pytest.approx(found["epoch_seconds"] / 6)
    assert set(found["context_balance"]) == {"contiguous", "headtail", "balanced"}
    assert found["memory_gib"] is None
    json.dumps(found)


def test_the_lines_say_what_was_found() -> None:
    steps = [np.array([40, 10, 10]), np.array([30, 5]), np.array([7])]
    data = StepLengths(lengths=np.concatenate(steps), steps=steps)
    text = "\n".join(make_plan(data, PlanShape(ranks=2, max_tokens=32), SECONDS, exact_steps=2).lines())
    assert "data        6 samples, 102 tokens; lengths 5 to 40, median 10, mean 17.0" in text
    assert "overlong    1 samples do not fit in a pack of 32 tokens; the plan gives each its own pack, but" in text
    assert "layout      2 ranks = 2 data x 1 context\n" in text
    assert "steps       3 in an epoch, 2.0 samples and 34 tokens each" in text
    assert "from 2 steps spread over the epoch; --exact-steps all plans every step" in text
    assert "(measured somewhere)" in text
    assert "context  " not in text  # one context rank has no balance
    whole = "\n".join(make_plan(data, PlanShape(ranks=2, max_tokens=64), SECONDS).lines())
    assert "overlong    0 samples; all fit in a pack of 64 tokens" in whole
    assert "spread over" not in whole


def test_time_without_seconds() -> None:
    data = StepLengths(lengths=np.array([10]), steps=[np.array([10])])
    shape = PlanShape(ranks=1, max_tokens=16)
    flops = TimeModel(cost=CostModel(linear=1e12), per_second=None, source="FLOPs; x")
    assert "time        10 TFLOP per step (FLOPs; x)" in list(make_plan(data, shape, flops).lines())
    tokens = TimeModel(cost=CostModel.tokens(), per_second=None, source="tokens; x")
    assert "time        unknown, because costs are counted in tokens; x" in list(make_plan(data, shape, tokens).lines())


def test_tokens_of_the_fullest_device() -> None:
    steps = [np.array([40, 10, 10]), np.array([30, 5])]
    assert device_tokens(steps, PlanShape(ranks=1, max_tokens=50)) == 50  # the cap
    assert device_tokens(steps, PlanShape(ranks=1, max_tokens=500)) == 60  # no step has more
    assert device_tokens(steps, PlanShape(ranks=2, context=2, max_tokens=10)) == 20  # half of an overlong sample
