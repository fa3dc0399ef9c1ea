"""Group metrics into figures under headings, and draw the figures.

    metric                   heading                  figure                  line
    response_length_max      Responses                Response length         max
    eval/reward              Learning                 Reward                  held-out
    environment/questions    Environment              Environment questions

Heading, title and unit of a figure are derived from the name of the metric, so a new metric needs no entry here. A
metric that never changes is listed in a table, unless its figure matches `ALWAYS`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from numpy.typing import NDArray

from padfree.tools.page import COLOURS, plain
from padfree.tools.report.runs import Run, Series
from padfree.tools.report.series import MOST_POINTS, SMOOTH_ABOVE, mean_window, running_mean, stretch_means, thinned

DASHES = ("solid", "dash", "dot", "dashdot")
MARKED_BELOW = 50  # series of at most this many values have markers
LEGEND_LETTERS = 36
MOST_BARS = 200  # maximum bars per run; with more steps, each bar is the mean of several steps
HOVER = "%{y:.5~g}<extra>%{fullData.name}</extra>"
MOST_MARKS = 100  # vertical lines in a figure


HEADINGS: Mapping[str, Sequence[str]] = {
    "Where the time went": ("seconds/*", "sampler_tokens_per_second"),
    "Learning": ("loss", "reward*", "gradient_norm", "lr"),
    "Evaluation": ("eval/*",),
    "Statistics of the loss": ("loss/*",),
    "Critic": ("critic/*",),
    "Responses": ("response*", "overlong*", "groups*"),
    "Servers and queue": ("version*", "queue*", "sampler*"),
    "Speed and memory": ("tokens_per_second", "mfu", "tflops*", "seconds", "memory*"),
    "Packing": ("fill", "imbalance*", "padding*", "micro_batches", "*tokens", "samples", "rows"),
}
"""The headings of the report in their order, each with name patterns. A metric belongs to the first heading with a
matching pattern. Without a match, its heading is the prefix of its name or, without a prefix, "Other"."""

ALWAYS = ("seconds/*", "*tokens_per_second", "mfu", "loss", "reward", "gradient_norm", "eval/*", "critic/loss")
"""Metrics that get a figure even if they never change. Other constant metrics are listed in a table."""

TITLES = {
    "mfu": "Model FLOP utilisation",
    "fill": "Fill of the micro-batches",
    "seconds": "Seconds per step",
    "seconds/": "Seconds of each part of a step",
    "memory_gib": "Peak memory",
    "tflops_per_device": "TFLOP/s per device",
    "gradient_norm": "Gradient norm before clipping",
    "imbalance": "Imbalance of the data ranks",
    "version_age": "Age of the policy that sampled the tokens",
    "queue": "Groups waiting to be trained on",
    "loss/kl": "KL to the reference",
    "loss/approx_kl": "KL to the old policy, approximate",
    "loss/ratio": "Ratio to the old policy",
    "loss/sampler_kl": "KL between trainer and sampler",
    "loss/sampler_difference": "Mean absolute difference of log-probabilities, trainer and sampler",
    "sampler_tokens_per_second": "Tokens per second of the sampler",
}
"""Titles of figures for metrics whose name does not make a good title."""

WORDS = {"lr": "learning rate", "kl": "KL", "nll": "NLL", "logprobs": "log-probabilities", "eval": "held-out"}
UNITS = (
    (r"kl|nll|entropy|sampler_difference", "nats per token"),
    (r"share|fraction|accuracy|variance|cut|fill|mfu|pass", "share"),
    (r"tokens|length|length_(min|max)", "tokens"),
    (r"version_age", "optimizer steps"),
    (r"(groups|queue).*", "groups"),
    (r"tokens_per_second", "tokens/s"),
    (r"seconds/.*|seconds", "s"),
    (r"gib", "GiB"),
    (r"tflops_per_device", "TFLOP/s"),
    (r"norm", "norm"),
)
"""Pairs of a regular expression and an axis label. A figure gets the first label whose expression matches the end of
the figure's name. If none matches, the label is the figure's name in words."""

LOGARITHMIC = re.compile(r"norm|perplexity|canary")
PARTS = (
    "weight_sync",
    "waiting",
    "sampling",
    "rewards",
    "reference",
    "teacher",
    "critic",
    "old_logprobs",
    "update",
    "preparing",
    "logging",
    "evaluation",
    "checkpoint",
    "other",
)
"""Parts of a step's time, in the order in which the report's bar chart stacks them."""

TOGETHER = re.compile(
    r"(?P<figure>.+)_(?P<line>min|max|std|measured)|(?P<first>groups|queue|overlong|eval/pass)[_@](?P<rest>.+)"
)
"""Pattern for metrics that share a figure. Its groups are the names of the figure and of the line, e.g. `reward` and
`min` for the metric `reward_min`."""


@dataclass(frozen=True, slots=True)
class Panel:
    """A figure before it is drawn. `metrics` maps each metric to its label; `unit` is the label of the axis."""

    title: str
    unit: str
    metrics: Mapping[str, str]
    log: bool = False  # use a log axis if one value is far above the rest
    stacked: bool = False  # draw stacked bars, because the metrics are parts of a whole


def panels(runs: Sequence[Run]) -> tuple[dict[str, list[Panel]], list[str]]:
    """Return a list of panels (figures to draw) for each heading, and the names of metrics without a figure.

    A metric that never changes has no figure, unless a pattern in `ALWAYS` matches.
    """
    names = {name for run in runs for name in run.metrics}
    lines: dict[str, dict[str, dict[str, str]]] = {}  # by heading and figure: metrics with their labels
    for name in sorted(names, key=_order):
        figure, label = _figure_of(name, names)
        lines.setdefault(_heading(figure), {}).setdefault(figure, {})[name] = label
    found: dict[str, list[Panel]] = {}
    constant: list[str] = []
    for heading, figures in lines.items():
        for figure, metrics in figures.items():
            series = [run.metrics[name] for run in runs for name in metrics if name in run.metrics]
            always = any(fnmatchcase(figure, pattern) for pattern in ALWAYS)
            if not always and all(map(_is_constant, series)):
                constant += metrics
            else:
                found.setdefault(heading, []).append(_panel(figure, metrics))
    return found, constant


def _panel(figure: str, metrics: Mapping[str, str]) -> Panel:
    unit = next((unit for end, unit in UNITS if re.search(rf"(^|_|/)({end})$", figure)), _words(figure))
    log, stacked = bool(LOGARITHMIC.search(figure)), figure.endswith("/")
    return Panel(_title(figure), unit, metrics, log=log, stacked=stacked)


def _figure_of(name: str, names: Collection[str]) -> tuple[str, str]:
    """Return the name of the figure in which the metric `name` is drawn, and the label of its line.

    `names` are the names of all metrics of the runs.
    """
    prefix, _, rest = name.rpartition("/")
    if prefix == "seconds" and rest in PARTS:
        return "seconds/", _words(name)
    if prefix == "eval" and rest in names:
        return rest, "held-out"
    if name.endswith("_tokens"):
        return "tokens", _words(name.removesuffix("_tokens"))
    if (found := TOGETHER.fullmatch(name)) is None:
        return name, _words(name)
    return found[1] or found[3], _words(found[2] or found[4])


def _position(name: str) -> tuple[int, int, str]:
    """Return a sort key that gives the position of a metric on the page. Metrics that match no heading come last.

    The key is the index of the heading, the index of the pattern, and the prefix of a metric without a heading.
    """
    for number, patterns in enumerate(HEADINGS.values()):
        for index, pattern in enumerate(patterns):
            if fnmatchcase(name, pattern):
                return number, index, ""
    return (len(HEADINGS), 0, name.partition("/")[0]) if "/" in name else (len(HEADINGS) + 1, 0, "")


def _order(name: str) -> tuple[Any, ...]:
    part = name.removeprefix("seconds/")
    return (*_position(name), PARTS.index(part) if part in PARTS else len(PARTS), name)


def _heading(figure: str) -> str:
    number, _, prefix = _position(figure)
    if number < len(HEADINGS):
        return tuple(HEADINGS)[number]
    return _title(prefix) if prefix else "Other"


def _title(figure: str) -> str:
    if figure in TITLES:
        return TITLES[figure]
    prefix, _, _ = figure.rpartition("/")
    words = _words(figure) if prefix in ("", "loss") else f"{_words(prefix)} {_words(figure)}"
    return words[:1].upper() + words[1:]


def _words(name: str) -> str:
    return " ".join(WORDS.get(word, word) for word in name.rpartition("/")[2].split("_"))


def figures(panel: Panel, runs: Sequence[Run]) -> list[tuple[str, dict[str, Any]]]:
    """Return the plotly figures of a panel, each with its caption."""
    if not panel.stacked:
        return [(panel.title, figure(panel, runs))]
    having = [run for run in runs if any(name in run.metrics for name in panel.metrics)]
    return [
        (f"{panel.title}: {shortened(run.name)}" if len(runs) > 1 else panel.title, stacked_figure(panel, run))
        for run in having
    ]


def figure(panel: Panel, runs: Sequence[Run]) -> dict[str, Any]:
    """Return a plotly figure of the panel's metrics in all runs that have them."""
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
                "exponentformat": "e" if np.nanmax(np.abs(values), initial=0.0) < 1e-3 else "SI",  # e.g. 8e-6 and 20k
            },
            "hovermode": "x unified" if len(runs) * len(used) <= 6 else "closest",
            "showlegend": len(runs) * len(used) > 1,
            "shapes": _marks(runs, used),
        },
    }


def stacked_figure(panel: Panel, run: Run) -> dict[str, Any]:
    """Return a figure with a stack of bars per step of a run: one bar per metric of the panel.

    A metric that is missing at a step counts as 0. If there are many steps, a stack shows the means of several steps.
    """
    used = [name for name in panel.metrics if name in run.metrics]
    steps = np.unique(np.concatenate([run.metrics[name].steps for name in used]))
    stretch = -(-len(steps) // MOST_BARS)
    traces = []
    for name in used:  # give each part of a step the same colour on every page
        index, label = PARTS.index(name.removeprefix("seconds/")), panel.metrics[name]
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
    """Return a name, with its middle cut out if it is long."""
    if len(name) <= LEGEND_LETTERS:
        return name
    half = (LEGEND_LETTERS - 1) // 2
    return f"{name[:half]}…{name[-half:]}"


def resumed_at(run: Run) -> list[int]:
    """Return the steps at which the run was resumed."""
    steps = [event.get("step") for event in run.events if event.get("kind") == "resume"]
    return sorted({step for step in steps if isinstance(step, int)})


def _lines(series: Series, label: str, line: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the plotly trace of the values and, if there are many, the trace of their running mean.

    `line`: plotly's settings for the line, such as its colour.
    """
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
    """Return vertical lines at resumes (dotted) and at non-finite steps (solid) of the runs that are drawn.

    A run is drawn if it has one of the metrics `names`.
    """
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


def _is_constant(series: Series) -> bool:
    return len(np.unique(series.values)) == 1  # all NaN count as one value


def _spread_out(values: NDArray[np.float64]) -> bool:
    finite = values[np.isfinite(values)]
    return len(finite) > 0 and finite.min() > 0 and finite.max() > 30 * float(np.median(finite))


def _rounded(values: NDArray[np.float64]) -> list[float]:
    """Round the values to six significant digits, which halves their bytes in the HTML file. Plots look the same."""
    return [float(f"{value:.6g}") for value in values.tolist()]
