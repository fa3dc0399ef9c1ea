"""The page of a plan has all figures with the numbers of the plan."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from padfree.packing import CostModel
from padfree.tools.planner.epoch import PlanShape
from padfree.tools.planner.plan_page import fill_figure, lengths_figure, packs_figure, padded_figure, write_page
from padfree.tools.planner.run_plan import RunPlan, make_plan
from padfree.tools.planner.steps import sft_steps
from padfree.tools.planner.suggest import Suggestion
from padfree.tools.planner.time_model import TimeModel
from tests.browser import Browser, executable
from tests.tools.planner.cases import config_of, log_normal

TIME_MODEL = TimeModel(cost=CostModel(linear=1.0, quadratic=0.001), per_second=None, source="FLOPs")


def plan_of(context: int = 1, **changes: Any) -> RunPlan:
    data = sft_steps(log_normal(300, 500), config_of(batch={"samples": 50}))
    return make_plan(data, PlanShape(ranks=4, context=context, max_tokens=512), TIME_MODEL, **changes)


def figures_in(path: Path) -> list[Any]:
    text = path.read_text(encoding="utf-8")
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    figures: list[Any] = json.loads(found.group(1))["figures"]
    return figures


CAPTIONS = (
    "Lengths of the samples",
    "Fill of the micro-batches, ",
    "Packs of step ",
    "Data ranks: cost of the slowest rank over the mean, ",
    "Padded relative to packed",
    "Context ranks of a long pack",
)


@pytest.mark.parametrize("context", [1, 2])
def test_every_section_has_its_figure(context: int, tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    reasons = Suggestion(max_tokens=512, context=2, layout="balanced", reasons=["because <it> is so"])
    write_page(plan_of(context, exact_steps=3), path, title="A plan", suggestion=reasons)
    text = path.read_text(encoding="utf-8")
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", text)
    expected = [*CAPTIONS, "Work of the 2 context ranks"] if context == 2 else list(CAPTIONS)
    for caption in expected:
        assert any(found.startswith(caption) for found in captions), caption
    assert len(captions) == len(expected) == len(figures_in(path))
    assert "3 of 6 steps" in text
    assert "because &lt;it&gt; is so" in text
    assert "batch.max_tokens=512" in text
    for figure in figures_in(path):
        assert figure["data"]
        for trace in figure["data"]:
            assert len(trace["x"]) == len(trace["y"]) > 0


@pytest.mark.skipif(executable() is None, reason="no Chromium")
def test_every_figure_is_drawn_on_a_phone_in_the_dark(tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    write_page(plan_of(2), path, title="A plan")
    with Browser() as browser:
        view = browser.open(path, width=390, dark=True)
        assert view.errors == []
        assert view.evaluate("document.querySelectorAll('.plot .main-svg').length") >= len(CAPTIONS) + 1
        assert view.evaluate("document.documentElement.scrollWidth") <= 390


def test_the_figures_hold_the_numbers() -> None:
    plan = plan_of(exact_steps=None)
    samples, tokens = lengths_figure(plan)["data"]
    assert samples["y"][:-1].sum() == pytest.approx(1.0)
    assert tokens["y"][:-1].sum() == pytest.approx(1.0)
    assert fill_figure(plan)["data"][0]["y"].sum() == plan.epoch.slot_tokens.size
    tokens_over, cost_over, grouped = padded_figure(plan)["data"]
    assert tokens_over["y"] == sorted(tokens_over["y"])
    assert all(more >= less >= 1 for more, less in zip(cost_over["y"], grouped["y"], strict=True))


def test_documents_of_a_pack_lie_end_to_end() -> None:
    plan = plan_of()
    bars = packs_figure(plan)["data"][0]
    step = plan.epoch.plans[0]
    assert sum(bars["x"]) == step.tokens.sum() == plan.epoch.steps[0].sum()
    ends: dict[str, int] = {}
    for name, base, width in zip(bars["y"], bars["base"], bars["x"], strict=True):
        assert base == ends.get(name, 0)
        ends[name] = base + width
    assert sorted(ends.values()) == sorted(np.ravel(step.tokens).tolist())


def test_samples_of_one_length_have_a_page(tmp_path: Path) -> None:
    data = sft_steps(np.array([7] * 5), config_of())
    write_page(
        make_plan(data, PlanShape(ranks=1, max_tokens=16), TIME_MODEL), tmp_path / "plan.html", title="One length"
    )
    assert len(figures_in(tmp_path / "plan.html")) == len(CAPTIONS)
