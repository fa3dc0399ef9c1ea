"""The figure of each metric, and the style of its lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from padfree.tools.page import COLOURS
from padfree.tools.report.panels import PARTS as SHOWN_PARTS
from padfree.tools.report.panels import Panel, figure, figures, panels, resumed_at, shortened
from padfree.tools.report.runs import Run, read_run
from padfree.train.batch_times import PARTS
from tests.tools.report.run_folders import rl_step, timed_rl_step, write_lines, write_rl_run, write_sft_run


def run_of(folder: Path, rows: list[dict[str, Any]], name: str = "run") -> Run:
    write_lines(folder / "metrics.jsonl", [{"step": step, **row} for step, row in enumerate(rows)])
    return read_run(folder, name)


def titles(runs: list[Run]) -> dict[str, list[str]]:
    return {heading: [panel.title for panel in group] for heading, group in panels(runs)[0].items()}


def figure_of(title: str, runs: list[Run]) -> dict[str, Any]:
    (panel,) = [panel for group in panels(runs)[0].values() for panel in group if panel.title == title]
    return figure(panel, runs)


def test_every_metric_is_in_one_panel_or_constant(tmp_path: Path) -> None:
    runs = [read_run(write_rl_run(tmp_path / "rl", 30), "rl"), read_run(write_sft_run(tmp_path / "sft"), "sft")]
    drawn, constant = panels(runs)
    names = {name for run in runs for name in run.metrics}
    shown = [name for group in drawn.values() for panel in group for name in panel.metrics if name in names]
    assert sorted([*shown, *constant]) == sorted(names)
    assert constant == ["padding_share", "micro_batches", "samples"]
    assert titles(runs)["Learning"] == ["Loss", "Reward", "Gradient norm before clipping", "Learning rate"]
    assert titles(runs)["Statistics of the loss"] == ["Clip fraction", "Entropy", "KL to the reference"]


def test_a_metric_that_nobody_knows_is_under_its_prefix(tmp_path: Path) -> None:
    names = ("loss/nll", "eval/new_share", "weather/rain_max", "weather/rain", "response_cut", "speed of light")
    run = run_of(
        tmp_path, [{name: step * (name != "speed of light") - step / 2 for name in names} for step in range(3)]
    )
    assert titles([run]) == {
        "Evaluation": ["Held-out new share"],
        "Statistics of the loss": ["NLL"],
        "Responses": ["Response cut"],
        "Weather": ["Weather rain"],
        "Other": ["Speed of light"],
    }
    (line,) = figure_of("Speed of light", [run])["data"]
    assert list(line["x"]) == [0, 1, 2]
    assert line["y"] == [0, -0.5, -1]
    assert [line["name"] for line in figure_of("Weather rain", [run])["data"]] == ["rain", "max"]
    assert figure_of("Response cut", [run])["layout"]["yaxis"]["title"]["text"] == "share"


@pytest.mark.parametrize(
    ("name", "beside", "heading", "title", "unit", "lines"),
    [
        ("reward_min", ("reward", "eval/reward"), "Learning", "Reward", "reward", ["reward", "held-out", "min"]),
        ("eval/pass@k", ("eval/pass@1",), "Evaluation", "Held-out pass", "share", ["1", "k"]),
        ("groups_requested", ("groups_equal",), "Responses", "Groups", "groups", ["equal", "requested"]),
        ("computed_tokens", ("tokens",), "Packing", "Tokens", "tokens", ["computed", "tokens"]),
        ("loss/kl", (), "Statistics of the loss", "KL to the reference", "nats per token", ["KL"]),
        ("critic/gradient_norm", (), "Critic", "Critic gradient norm", "norm", ["gradient norm"]),
        ("version_age_max", ("version_age",), "Servers and queue", None, "optimizer steps", ["version age", "max"]),
    ],
)  # fmt: skip
def test_names_say_where_metrics_are_drawn(
    tmp_path: Path, name: str, beside: tuple[str, ...], heading: str, title: str | None, unit: str, lines: list[str]
) -> None:
    run = run_of(tmp_path, [dict.fromkeys((name, *beside), step) for step in range(3)])
    ((found, (panel,)),) = panels([run])[0].items()
    assert (found, panel.unit, sorted(panel.metrics.values())) == (heading, unit, sorted(lines))
    assert panel.title == (title or "Age of the policy that sampled the tokens")


def test_a_metric_that_changes_in_one_run_is_drawn_for_all(tmp_path: Path) -> None:
    first = run_of(tmp_path / "a", [{"fill": 1.0}, {"fill": 1.0}], "a")
    second = run_of(tmp_path / "b", [{"fill": 1.0}, {"fill": 0.5}], "b")
    assert panels([first]) == ({}, ["fill"])
    assert len(figure_of("Fill of the micro-batches", [first, second])["data"]) == 2
    gone = run_of(tmp_path / "c", [{"fill": None}, {"fill": None}], "c")
    assert panels([gone]) == ({}, ["fill"])


def test_colours_and_dashes_tell_runs_and_metrics_apart(tmp_path: Path) -> None:
    rows = [{"imbalance": 1 + step / 10, "imbalance_measured": 1 + step / 5, "loss": step} for step in range(4)]
    first, second = run_of(tmp_path / "a", rows, "<a>"), run_of(tmp_path / "b", rows[:2], "b")
    alone = figure_of("Imbalance of the data ranks", [first])
    assert [line["name"] for line in alone["data"]] == ["imbalance", "measured"]
    assert [line["line"]["color"] for line in alone["data"]] == list(COLOURS[:2])
    assert alone["layout"]["showlegend"]
    assert not figure_of("Loss", [first])["layout"]["showlegend"]
    both = figure_of("Imbalance of the data ranks", [first, second])["data"]
    assert [line["name"] for line in both] == [
        "&lt;a&gt; · imbalance",
        "&lt;a&gt; · measured",
        "b · imbalance",
        "b · measured",
    ]
    assert [line["line"]["color"] for line in both] == [COLOURS[0]] * 2 + [COLOURS[1]] * 2
    assert [line["line"]["dash"] for line in both] == ["solid", "dash"] * 2
    assert [len(line["x"]) for line in both] == [4, 4, 2, 2]
    assert [line["name"] for line in figure_of("Loss", [first, second])["data"]] == ["&lt;a&gt;", "b"]


@pytest.mark.parametrize("count", [1, 2, 200, 201, 5000])
def test_long_series_are_thinned_and_have_a_running_mean(tmp_path: Path, count: int, rng: np.random.Generator) -> None:
    run = run_of(tmp_path, [{"step": step, "loss": rl_step(step, rng)["loss"]} for step in range(count)])
    lines = figure_of("Loss", [run])["data"]
    assert len(lines) == (1 if count <= 200 else 2)
    raw, strong = lines[0], lines[-1]
    assert len(raw["x"]) == len(raw["y"]) <= 1000
    assert min(raw["y"]) == pytest.approx(run.finite("loss").min(), rel=1e-5)
    assert max(raw["y"]) == pytest.approx(run.finite("loss").max(), rel=1e-5)
    assert (raw["x"][0], raw["x"][-1]) == (strong["x"][0], strong["x"][-1]) == (0, count - 1)
    assert strong.get("showlegend", True)
    assert "hovertemplate" in strong
    assert ("markers" in raw["mode"]) == (count <= 50)
    if count > 200:
        assert (raw["opacity"], raw["hoverinfo"], raw["showlegend"]) == (0.3, "skip", False)
        assert len(strong["x"]) == min(count, 500)
        assert np.std(np.diff(strong["y"])) < np.std(np.diff(raw["y"])) / 2


def test_a_spike_makes_the_gradient_norm_logarithmic(tmp_path: Path) -> None:
    rows = [{"gradient_norm": 1.0 + step / 100, "lr": 1e-6 * step} for step in range(20)]
    calm = run_of(tmp_path / "a", rows, "a")
    spike = run_of(tmp_path / "b", [{"gradient_norm": 1e4}, *rows], "b")
    zero = run_of(tmp_path / "c", [{"gradient_norm": 1e4}, {"gradient_norm": 0.0}, *rows], "c")
    nothing = run_of(tmp_path / "d", [{"gradient_norm": None}, {"gradient_norm": None}], "d")
    axes = [
        figure_of("Gradient norm before clipping", [run])["layout"]["yaxis"] for run in (calm, spike, zero, nothing)
    ]
    assert [axis["type"] for axis in axes] == ["linear", "log", "linear", "linear"]
    assert axes[1]["title"]["text"] == "norm (log)"
    assert figure_of("Learning rate", [calm])["layout"]["yaxis"]["exponentformat"] == "e"


def test_resumes_and_stops_are_marked(tmp_path: Path) -> None:
    run = read_run(write_rl_run(tmp_path, 30), "a")
    assert resumed_at(run) == [10]
    marks = figure_of("Loss", [run])["layout"]["shapes"]
    assert [(mark["x0"], mark["line"]["dash"]) for mark in marks] == [(10, "dot"), (30, "solid")]
    other = run_of(tmp_path / "other", [{"loss": step, "mfu": step} for step in range(3)], "b")
    assert len(figure_of("Loss", [other, run])["layout"]["shapes"]) == 2
    only = run_of(tmp_path / "only", [{"new metric": step} for step in range(3)], "c")
    assert figure_of("New metric", [only, run])["layout"]["shapes"] == []


def test_long_names_lose_their_middle() -> None:
    assert shortened("a" * 36) == "a" * 36
    assert shortened("begin" + "x" * 50 + "end") == "begin" + "x" * 12 + "…" + "x" * 14 + "end"


TIMES = "Where the time went"


def times(run: Run) -> Panel:
    return panels([run])[0][TIMES][0]


def test_where_the_time_went_comes_first_and_is_stacked(tmp_path: Path, rng: np.random.Generator) -> None:
    run = run_of(tmp_path, [timed_rl_step(step, rng) for step in range(6)])
    assert next(iter(titles([run]))) == TIMES
    assert titles([run])[TIMES] == ["Seconds of each part of a step", "Tokens per second of the sampler"]
    assert set(PARTS) == set(SHOWN_PARTS)
    ((caption, drawn),) = figures(times(run), [run])
    assert caption == "Seconds of each part of a step"
    assert drawn["layout"]["barmode"] == "stack"
    assert [(bars["type"], bars["name"]) for bars in drawn["data"]] == [
        ("bar", "sampling"),
        ("bar", "old log-probabilities"),
        ("bar", "update"),
    ]
    sampling, old, update = drawn["data"]
    assert list(sampling["x"]) == list(old["x"]) == list(update["x"]) == list(range(6))
    assert (sampling["y"], old["y"], update["y"]) == ([20, 0, 22, 0, 24, 0], [1.5, 0] * 3, [2.0] * 6)
    assert len({bars["marker"]["color"] for bars in drawn["data"]}) == 3
    assert list(figure(panels([run])[0][TIMES][1], [run])["data"][0]["x"]) == [0, 2, 4]


def test_what_is_no_part_of_a_step_is_not_stacked(tmp_path: Path) -> None:
    run = run_of(tmp_path, [{"seconds/breakfast": 1.0 + step, "lr": 1e-3} for step in range(3)])
    (panel,) = panels([run])[0][TIMES]
    assert (panel.title, panel.unit, panel.stacked) == ("Seconds breakfast", "s", False)
    assert panels([run])[1] == ["lr"], "a learning rate that never changes is in the table"


def test_a_part_has_its_colour_whatever_else_is_there(tmp_path: Path, rng: np.random.Generator) -> None:
    both = run_of(tmp_path / "a", [timed_rl_step(step, rng) for step in range(3)], "a")
    alone = run_of(tmp_path / "b", [{"seconds/update": 1.0}, {"seconds/update": None}], "b")
    without = run_of(tmp_path / "c", [rl_step(step, rng) for step in range(3)], "c")
    (first, drawn), (second, other) = figures(times(both), [both, alone, without])
    assert (first, second) == ("Seconds of each part of a step: a", "Seconds of each part of a step: b")
    assert drawn["data"][-1]["marker"] == other["data"][0]["marker"]
    assert other["data"][0]["y"] == [1.0, 0.0]
    assert TIMES not in titles([without])


def test_many_steps_are_means_that_keep_the_whole(tmp_path: Path, rng: np.random.Generator) -> None:
    run = run_of(tmp_path, [timed_rl_step(step, rng) for step in range(1001)])
    ((_, drawn),) = figures(times(run), [run])
    stretches = [6] * 166 + [5]
    for bars, name in zip(drawn["data"], ("sampling", "old_logprobs", "update"), strict=True):
        assert len(bars["x"]) == len(bars["y"]) == len(stretches)
        shown = sum(height * count for height, count in zip(bars["y"], stretches, strict=True))
        assert shown == pytest.approx(run.finite(f"seconds/{name}").sum(), rel=1e-5)
    assert list(drawn["data"][0]["x"][:2]) == [2.5, 8.5]
    assert drawn["layout"]["yaxis"]["title"]["text"] == "s, mean of 6 steps"
