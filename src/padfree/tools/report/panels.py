"""Which metrics are drawn together, under which title and heading, and the figures themselves.

    one run, one metric        one line, no legend
    one run, more metrics      a colour a metric
    more runs                  a colour a run; with more metrics a dash pattern a metric
    a stacked panel            bars upon each other, a colour a metric; more runs: a figure a run

A series of more than 200 values is drawn faint with its running mean above it. A metric that no panel names has one of
its own, under "Statistics of the loss" (their names begin with `loss/`), "Evaluation" (`eval/`) or "Other". A metric
that never changes in any run is a row of a table, unless its panel is `always` drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from padfree.tools.page import COLOURS, plain
from padfree.tools.report.runs import Run, Series
from padfree.tools.report.series import MOST_POINTS, SMOOTH_ABOVE, mean_window, running_mean, stretch_means, thinned

DASHES = ("solid", "dash", "dot", "dashdot")
MARKED_BELOW = 50  # so few values are points as well as a line
LEGEND_LETTERS = 36
MOST_BARS = 200  # of one run; more are means over stretches of steps
HOVER = "%{y:.5~g}<extra>%{fullData.name}</extra>"
MOST_MARKS = 100  # resumes and stops in a figure


@dataclass(frozen=True, slots=True)
class Panel:
    """A figure: metrics with what each is called in it. `unit` is the label of the axis."""

    title: str
    unit: str
    metrics: Mapping[str, str]
    always: bool = False
    log: bool = False  # logarithmic where one value is far above the rest
    stacked: bool = False  # the metrics are parts of a whole


GROUPS: Mapping[str, Sequence[Panel]] = {
    "Where the time went": (
        Panel(
            "Seconds of each part of a step",
            "s",
            {
                "seconds/weight_exchange": "weight exchange",
                "seconds/waiting": "waiting",
                "seconds/sampling": "sampling",
                "seconds/rewards": "rewards",
                "seconds/reference": "reference",
                "seconds/teacher": "teacher",
                "seconds/critic": "critic",
                "seconds/old_logprobs": "old log-probabilities",
                "seconds/update": "update",
            },
            always=True,
            stacked=True,
        ),
        Panel(
            "Tokens per second of the sampler",
            "tokens/s",
            {"sampler_tokens_per_second": "tokens/s"},
            always=True,
        ),
    ),
    "Learning": (
        Panel("Loss", "loss", {"loss": "loss", "eval/loss": "held-out"}, always=True),
        Panel(
            "Reward",
            "reward",
            {"reward": "mean", "reward_min": "least", "reward_max": "greatest", "eval/reward": "held-out"},
            always=True,
        ),
        Panel("Reward, standard deviation in the batch", "reward", {"reward_std": "standard deviation"}),
        Panel("Gradient norm before clipping", "norm", {"gradient_norm": "norm"}, always=True, log=True),
        Panel("Learning rate", "learning rate", {"lr": "learning rate"}),
    ),
    "Evaluation": (
        Panel("Held-out perplexity", "perplexity", {"eval/perplexity": "perplexity"}, always=True, log=True),
        Panel("Held-out accuracy", "share", {"eval/accuracy": "accuracy"}, always=True),
        Panel(
            "Right responses to held-out prompts",
            "share",
            {"eval/pass@1": "pass@1", "eval/pass@k": "pass@k"},
            always=True,
        ),
        Panel("Length of held-out responses", "tokens", {"eval/response_length": "mean"}, always=True),
    ),
    "Policy": (
        Panel("KL to the reference", "nats a token", {"loss/kl": "KL"}),
        Panel("KL to the old policy, approximate", "nats a token", {"loss/approx_kl": "KL"}),
        Panel("Entropy", "nats a token", {"loss/entropy": "entropy"}),
        Panel("Clipped tokens", "share of tokens", {"loss/clip_fraction": "share"}),
        Panel("Ratio to the old policy", "mean ratio", {"loss/ratio": "ratio"}),
        Panel("Importance weight of the corrections", "mean weight", {"loss/importance_weight": "weight"}),
        Panel("Tokens masked by the corrections", "share of tokens", {"loss/masked_fraction": "share"}),
        Panel("KL between trainer and sampler", "nats a token", {"loss/sampler_kl": "KL"}),
        Panel(
            "Log-probabilities of trainer and sampler", "mean absolute difference", {"loss/sampler_difference": "nats"}
        ),
        Panel("Advantage", "mean over tokens", {"loss/advantage": "advantage"}),
    ),
    "Critic": (
        Panel("Value loss", "loss", {"critic/loss": "loss"}, always=True),
        Panel(
            "Variance of the returns that the values explain",
            "share",
            {"critic/explained_variance": "share"},
            always=True,
        ),
        Panel("Values and returns", "mean over tokens", {"critic/value": "value", "critic/return": "return"}),
        Panel("Values held back by the clip", "share of tokens", {"critic/clip_fraction": "share"}),
        Panel("Gradient norm of the critic", "norm", {"critic/gradient_norm": "norm"}, log=True),
    ),
    "Responses": (
        Panel(
            "Response length",
            "tokens",
            {"response_length": "mean", "response_length_min": "shortest", "response_length_max": "longest"},
        ),
        Panel("Responses cut before their end", "share of responses", {"response_cut": "share"}),
        Panel(
            "Responses near the end of their room",
            "share of responses, reward",
            {"overlong_share": "share", "overlong_penalty": "mean penalty"},
        ),
        Panel(
            "Groups asked for",
            "groups",
            {"groups_asked": "all", "groups_equal": "equal rewards", "groups_surplus": "no room"},
        ),
    ),
    "Servers and queue": (
        Panel(
            "Age of the policy that wrote the tokens",
            "optimizer steps",
            {"version_age": "mean", "version_age_max": "oldest"},
        ),
        Panel(
            "Groups ahead of training",
            "groups",
            {"queue_finished": "finished", "queue_unfinished": "unfinished", "groups_dropped": "dropped"},
        ),
        Panel(
            "Log-probabilities of trainer and server after an exchange",
            "difference",
            {"sampler/canary_difference": "mean", "sampler/canary_largest": "largest"},
            log=True,
        ),
    ),
    "Speed and memory": (
        Panel("Tokens per second", "tokens/s", {"tokens_per_second": "tokens/s"}, always=True),
        Panel("Model FLOP utilisation", "share of the peak", {"mfu": "MFU"}, always=True),
        Panel("TFLOP/s per device", "TFLOP/s", {"tflops_per_device": "TFLOP/s"}),
        Panel("Seconds per step", "s", {"seconds": "seconds"}),
        Panel("Peak memory", "GiB", {"memory_gib": "peak"}),
    ),
    "Packing": (
        Panel("Fill of the micro-batches", "share of batch.max_tokens", {"fill": "fill"}),
        Panel(
            "Imbalance of the data ranks",
            "slowest rank / mean",
            {"imbalance": "planned", "imbalance_measured": "measured"},
        ),
        Panel("Padding", "share of computed tokens", {"padding_share": "share"}),
        Panel("Micro-batches per rank", "micro-batches", {"micro_batches": "micro-batches"}),
        Panel("Tokens per step", "tokens", {"tokens": "all", "scored_tokens": "scored"}),
        Panel("Samples per step", "samples", {"samples": "samples"}),
    ),
}


def panels(runs: Sequence[Run]) -> tuple[dict[str, list[Panel]], list[str]]:
    """The panels to draw under each heading, and the names of the metrics that never change."""
    names = sorted({name for run in runs for name in run.metrics})
    known = {name for group in GROUPS.values() for panel in group for name in panel.metrics}
    unknown = [name for name in names if name not in known]
    statistics = [Panel(name.removeprefix("loss/"), "mean", {name: name}) for name in unknown if _is_statistic(name)]
    held_out = [Panel(name.removeprefix("eval/"), "value", {name: name}) for name in unknown if _is_held_out(name)]
    others = [Panel(name, "value", {name: name}) for name in unknown if not (_is_statistic(name) or _is_held_out(name))]
    found: dict[str, list[Panel]] = {}
    constant: list[str] = []
    named = {**GROUPS, "Evaluation": (*GROUPS["Evaluation"], *held_out)}
    for heading, group in [*named.items(), ("Statistics of the loss", statistics), ("Other", others)]:
        for panel in group:
            there = [name for name in panel.metrics if name in names]
            if not there:
                continue
            if not panel.always and all(
                _is_constant(run.metrics[name]) for run in runs for name in there if name in run.metrics
            ):
                constant += there
            else:
                found.setdefault(heading, []).append(panel)
    return found, constant


def figures(panel: Panel, runs: Sequence[Run]) -> list[tuple[str, dict[str, Any]]]:
    """Captions and plotly figures of a panel."""
    if not panel.stacked:
        return [(panel.title, figure(panel, runs))]
    having = [run for run in runs if any(name in run.metrics for name in panel.metrics)]
    return [
        (f"{panel.title}: {shortened(run.name)}" if len(runs) > 1 else panel.title, stacked_figure(panel, run))
        for run in having
    ]


def figure(panel: Panel, runs: Sequence[Run]) -> dict[str, Any]:
    """A plotly figure of the panel's metrics in all runs that have them."""
    used = [name for name in panel.metrics if any(name in run.metrics for run in runs)]
    traces: list[dict[str, Any]] = []
    for i, run in enumerate(runs):
        for j, name in enumerate(used):
            if name not in run.metrics:
                continue
            parts = [shortened(run.name)] * (len(runs) > 1) + [panel.metrics[name]] * (len(used) > 1)
            label = plain(" · ".join(parts) or panel.metrics[name])
            colour = COLOURS[(i if len(runs) > 1 else j) % len(COLOURS)]
            dash = DASHES[j % len(DASHES)] if len(runs) > 1 else "solid"
            traces += _lines(run.metrics[name], label, {"color": colour, "dash": dash})
    values = np.concatenate([run.metrics[name].values for run in runs for name in used if name in run.metrics])
    log = panel.log and _spread_out(values)
    return {
        "data": traces,
        "layout": {
            "xaxis": {"title": {"text": "step"}},
            "yaxis": {
                "title": {"text": panel.unit + (" (log)" if log else "")},
                **({"type": "log", "dtick": 1} if log else {"type": "linear"}),
                "exponentformat": "e" if np.nanmax(np.abs(values), initial=0.0) < 1e-3 else "SI",  # no 8µ, but 20k
            },
            "hovermode": "x unified" if len(runs) * len(used) <= 6 else "closest",
            "showlegend": len(runs) * len(used) > 1,
            "shapes": _marks(runs, used),
        },
    }


def stacked_figure(panel: Panel, run: Run) -> dict[str, Any]:
    """Bars upon each other at the steps that have any of the metrics; one that a step has not is 0 there."""
    used = [name for name in panel.metrics if name in run.metrics]
    steps = np.unique(np.concatenate([run.metrics[name].steps for name in used]))
    stretch = -(-len(steps) // MOST_BARS)
    traces = []
    for index, (name, label) in enumerate(panel.metrics.items()):
        if name not in used:
            continue
        values = np.zeros(len(steps))
        values[np.searchsorted(steps, run.metrics[name].steps)] = np.nan_to_num(run.metrics[name].values)
        bars = {"type": "bar", "name": label, "x": stretch_means(steps, stretch)}
        bars |= {"y": _rounded(stretch_means(values, stretch)), "hovertemplate": HOVER}
        traces.append({**bars, "marker": {"color": COLOURS[index % len(COLOURS)], "line": {"width": 0}}})
    return {
        "data": traces,
        "layout": {
            "barmode": "stack",
            "bargap": 0.1 if len(steps) <= MARKED_BELOW else 0,
            "xaxis": {"title": {"text": "step"}},
            "yaxis": {"title": {"text": panel.unit if stretch == 1 else f"{panel.unit}, mean of {stretch} steps"}},
            "hovermode": "x unified",
            "showlegend": True,
            "shapes": _marks([run], used),
        },
    }


def shortened(name: str) -> str:
    """A long name without its middle."""
    if len(name) <= LEGEND_LETTERS:
        return name
    half = (LEGEND_LETTERS - 1) // 2
    return f"{name[:half]}…{name[-half:]}"


def resumed_at(run: Run) -> list[int]:
    """The steps at which the run was resumed."""
    steps = [event.get("step") for event in run.events if event.get("kind") == "resume"]
    return sorted({step for step in steps if isinstance(step, int)})


def _lines(series: Series, label: str, line: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The values, and above them their running mean if there are many."""
    count = len(series.values)
    kept = thinned(series.values)
    smooth = count > SMOOTH_ABOVE
    raw = {
        "type": "scatter",
        "x": series.steps[kept],
        "y": _rounded(series.values[kept]),
        "mode": "lines+markers" if count <= MARKED_BELOW else "lines",
        "name": label,
        "legendgroup": label,
        "showlegend": not smooth,
        "opacity": 0.3 if smooth else 1.0,
        "line": {**line, "width": 1 if smooth else 1.8},
        "marker": {"size": 5},
        "hoverinfo": "skip",
    }
    if not smooth:
        return [{**raw, "hovertemplate": HOVER}]
    at = np.linspace(0, count - 1, min(count, MOST_POINTS // 2), dtype=np.int64)
    mean = {
        "type": "scatter",
        "x": series.steps[at],
        "y": _rounded(running_mean(series.values, at, mean_window(count))),
        "mode": "lines",
        "name": label,
        "legendgroup": label,
        "line": {**line, "width": 2},
        "hovertemplate": HOVER,
    }
    return [raw, mean]


def _marks(runs: Sequence[Run], names: Sequence[str]) -> list[dict[str, Any]]:
    """Upright lines where a run with one of these metrics was resumed (dotted) or had a step that was not finite."""
    found = []
    for index, run in enumerate(runs):
        if not any(name in run.metrics for name in names):
            continue
        colour = COLOURS[index % len(COLOURS)] if len(runs) > 1 else COLOURS[8]
        marks = [(step, "dot") for step in resumed_at(run)]
        marks += [(row["step"], "solid") for row in run.nonfinite if row["step"] is not None]
        for step, dash in marks:
            line = {"color": colour, "width": 1, "dash": dash}
            found.append({"type": "line", "x0": step, "x1": step, "y0": 0, "y1": 1, "yref": "paper", "line": line})
    return found[-MOST_MARKS:]


def _is_statistic(name: str) -> bool:
    return name.startswith("loss/")


def _is_held_out(name: str) -> bool:
    return name.startswith("eval/")


def _is_constant(series: Series) -> bool:
    return len(np.unique(series.values)) == 1  # NaN is one value here


def _spread_out(values: NDArray[np.float64]) -> bool:
    finite = values[np.isfinite(values)]
    return len(finite) > 0 and finite.min() > 0 and finite.max() > 30 * float(np.median(finite))


def _rounded(values: NDArray[np.float64]) -> list[float]:
    """Six digits that count: what a screen can show, in half the bytes."""
    return [float(f"{value:.6g}") for value in values.tolist()]
