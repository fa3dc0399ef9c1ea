"""A plan as one HTML page: a table of results, and figures about data, packs, balance and scaling to more devices."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from padfree.tools.page import COLOURS, Page
from padfree.tools.planner.context import ContextBalance
from padfree.tools.planner.run_plan import RunPlan
from padfree.tools.planner.scaling import PARTS, Scaling
from padfree.tools.planner.suggest import Suggestion

Figure = dict[str, Any]

PACKS, DOCUMENTS = 24, 1500
"""Maximum number of packs in the figure that shows the packs of a step, and maximum number of documents in all these
packs."""

BINS = 60


def write_page(
    plan: RunPlan,
    path: str | Path,
    *,
    title: str,
    suggestion: Suggestion | None = None,
    scaling: Scaling | None = None,
) -> None:
    """Write a plan as an HTML page to `path`."""
    page = Page(title, f"{len(plan.lengths):,} samples, {plan.shape.ranks} ranks, {len(plan.epoch.steps):,} steps")
    page.add_heading("Summary")
    page.add_table("The plan", ["what", "result"], [_split(line) for line in plan.lines()])
    if suggestion is not None:
        page.add_heading("Suggestion")
        for reason in suggestion.reasons:
            page.add_text(reason)
        if overrides := suggestion.overrides():
            page.add_details("As overrides of a recipe", "\n".join(overrides))
    planned, steps = len(plan.epoch.plans), len(plan.epoch.steps)
    of_steps = "all steps" if planned == steps else f"{planned:,} of {steps:,} steps"

    page.add_heading("Data and packs")
    page.add_figure("Lengths of the samples", lengths_figure(plan))
    page.add_figure(f"Fill of the micro-batches, {of_steps}", fill_figure(plan))
    page.add_figure(f"Packs of step {plan.epoch.planned[0]:,}; each bar is a document", packs_figure(plan), wide=True)
    page.add_heading("Balance")
    page.add_figure(f"Data ranks: cost of the slowest rank over the mean, {of_steps}", imbalance_figure(plan))
    page.add_figure("Padded relative to packed", padded_figure(plan))
    if plan.balances:
        page.add_figure(
            f"Work of the {plan.shape.context} context ranks, for the pack with the longest document",
            ranks_figure(plan.balances),
        )
    page.add_figure("Context ranks of a long pack: cost of the slowest rank over the mean", contexts_figure(plan))
    if scaling is not None:
        page.add_heading("More devices")
        page.add_figure(
            f"Throughput per device relative to {scaling.sharded[0].ranks} devices", efficiency_figure(scaling)
        )
        page.add_figure("Seconds of a step, weights sharded over all ranks", parts_figure(scaling))
        page.add_details("Figures and assumptions", "\n".join(scaling.lines()))
    page.write(path)


def efficiency_figure(scaling: Scaling) -> Figure:
    """Plot efficiency (throughput per device, relative to the fewest devices) against the number of devices.

    The figure has two lines: with weights sharded over all ranks, and with one replica of the weights per host.
    """
    traces = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": name,
            "x": [time.ranks for time in times],
            "y": scaling.efficiency(times),
            "line": {"color": COLOURS[index]},
        }
        for index, (name, times) in enumerate(scaling.ways.items())
    ]
    layout = {
        "xaxis": {"type": "log", "title": {"text": "devices"}},
        "yaxis": {"tickformat": ".0%", "rangemode": "tozero"},
    }
    return {"data": traces, "layout": layout}


def parts_figure(scaling: Scaling) -> Figure:
    """Plot the seconds of a step by part (compute, waiting, communication), for each number of devices."""
    names = [f"{time.ranks}" for time in scaling.sharded]
    words = {"even": "compute", "weights": "weights, not overlapped", "context": "keys and values"}
    bars = [
        _bar(words.get(part, part), names, [getattr(time, part) for time in scaling.sharded], index)
        for index, part in enumerate(PARTS)
    ]
    layout = {
        "barmode": "stack",
        "xaxis": {"type": "category", "title": {"text": "devices"}},
        "yaxis": {"title": {"text": "seconds"}},
    }
    return {"data": bars, "layout": layout}


def lengths_figure(plan: RunPlan) -> Figure:
    """Plot the number of samples and the number of tokens by sample length, with equally wide bins on a log axis."""
    shortest, longest = int(plan.lengths.min()), int(plan.lengths.max())
    edges = np.unique(np.geomspace(shortest, longest + 1, BINS + 1).round().astype(np.int64))
    samples = np.histogram(plan.lengths, edges)[0]
    tokens = np.histogram(plan.lengths, edges, weights=plan.lengths)[0]
    traces = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": name,
            "x": edges,
            "y": np.append(counts, counts[-1]) / counts.sum(),
            "line": {"shape": "hv", "color": colour},
            "fill": "tozeroy",
        }
        for name, counts, colour in (("samples", samples, COLOURS[0]), ("tokens", tokens, COLOURS[1]))
    ]
    layout: Figure = {
        "xaxis": {"type": "log", "title": {"text": "tokens in a sample"}},
        "yaxis": {"tickformat": ".0%", "rangemode": "tozero", "title": {"text": "share"}},
    }
    limit = plan.shape.pack_tokens
    if limit <= 2 * longest:
        line = {"type": "line", "x0": limit, "x1": limit, "yref": "paper", "y0": 0, "y1": 1}
        layout["shapes"] = [{**line, "line": {"color": COLOURS[7], "dash": "dot"}}]
        layout["annotations"] = [
            {
                "x": float(np.log10(limit)), "y": 1, "yref": "paper", "text": "pack", "showarrow": False,
                "xanchor": "right", "xshift": -4,
            }
        ]  # fmt: skip
    return {"data": traces, "layout": layout}


def fill_figure(plan: RunPlan) -> Figure:
    """Plot a histogram of the planned micro-batches by how full they are."""
    share = np.minimum(plan.epoch.slot_tokens / plan.shape.pack_tokens, 1.0)
    counts, edges = np.histogram(share, bins=50, range=(0.0, 1.0))
    bars = {
        "type": "bar",
        "x": (edges[:-1] + edges[1:]) / 2,
        "y": counts,
        "width": 0.02,
        "marker": {"color": COLOURS[2]},
    }
    layout = {
        "bargap": 0,
        "xaxis": {"range": [0, 1], "tickformat": ".0%", "title": {"text": "tokens over capacity"}},
        "yaxis": {"title": {"text": "micro-batches"}},
    }
    return {"data": [bars], "layout": layout}


def packs_figure(plan: RunPlan) -> Figure:
    """Plot which samples each pack of the first planned step holds, up to `PACKS` packs and `DOCUMENTS` samples."""
    step = plan.epoch.plans[0]
    bases: list[int] = []
    widths: list[int] = []
    names: list[str] = []
    colours: list[str] = []
    shown: list[str] = []
    for number in range(step.num_micro_batches):
        for rank, of_rank in enumerate(step.micro_batches):
            lengths = step.lengths[of_rank[number]]
            if len(shown) == PACKS or (shown and len(widths) + len(lengths) > DOCUMENTS):
                break
            name = f"rank {rank}, micro-batch {number}"
            shown.append(name)
            bases += (np.cumsum(lengths) - lengths).tolist()
            widths += lengths.tolist()
            names += [name] * len(lengths)
            colours += [COLOURS[index % len(COLOURS)] for index in range(len(lengths))]
    bars = {
        "type": "bar",
        "orientation": "h",
        "base": bases,
        "x": widths,
        "y": names,
        "marker": {"color": colours},
        "hovertemplate": "%{y}: %{x:,} tokens<extra></extra>",
    }
    end = max(plan.shape.pack_tokens, int(step.tokens.max()))
    layout = {
        "barmode": "overlay",
        "bargap": 0.25,
        "height": 80 + 20 * len(shown),
        "xaxis": {"range": [0, end], "title": {"text": "tokens"}},
        "yaxis": {"type": "category", "categoryorder": "array", "categoryarray": shown[::-1], "dtick": 1},
    }
    return {"data": [bars], "layout": layout}


def imbalance_figure(plan: RunPlan) -> Figure:
    """Plot the imbalance of each planned step: the cost of the slowest data rank over the mean."""
    points = {
        "type": "scatter",
        "mode": "markers",
        "x": plan.epoch.planned,
        "y": plan.epoch.imbalances,
        "marker": {"color": COLOURS[4]},
    }
    layout = {"xaxis": {"title": {"text": "step"}}, "yaxis": {"title": {"text": "1 is perfect"}}}
    return {"data": [points], "layout": layout}


def padded_figure(plan: RunPlan) -> Figure:
    """Plot tokens and cost of padded micro-batches, as multiples of the tokens and the cost of packed ones."""
    packed_tokens = int(plan.epoch.tokens.sum())
    plain = [each for each in plan.padded if not each.grouped]
    grouped = [each for each in plan.padded if each.grouped]
    names = [f"{each.size} samples" for each in plain]
    bars = [
        ("tokens", [each.tokens / packed_tokens for each in plain]),
        ("cost", [each.cost / plan.packed_cost for each in plain]),
        ("cost, samples sorted by length", [each.cost / plan.packed_cost for each in grouped]),
    ]
    layout = {
        "barmode": "group",
        "yaxis": {"title": {"text": "times packed"}},
        "shapes": [
            {
                "type": "line",
                "xref": "paper",
                "x0": 0,
                "x1": 1,
                "y0": 1,
                "y1": 1,
                "line": {"color": COLOURS[8], "dash": "dot"},
            }
        ],
    }
    return {"data": [_bar(name, names, values, index) for index, (name, values) in enumerate(bars)], "layout": layout}


def ranks_figure(balances: Sequence[ContextBalance]) -> Figure:
    """Plot the cost of each context rank, divided by the mean over the ranks, for each layout."""
    bars = [
        _bar(each.kind, [f"rank {rank}" for rank in range(len(each.shares))], each.shares.tolist(), index)
        for index, each in enumerate(balances)
    ]
    return {"data": bars, "layout": {"barmode": "group", "yaxis": {"title": {"text": "cost over the mean"}}}}


def contexts_figure(plan: RunPlan) -> Figure:
    """Plot the imbalance (cost of the slowest rank over the mean) of each layout for 2, 4 and 8 context ranks."""
    worlds = [f"{world} ranks" for world in plan.long_pack_balances]
    kinds = [each.kind for each in next(iter(plan.long_pack_balances.values()))]
    bars = [
        _bar(kind, worlds, [found[index].mean for found in plan.long_pack_balances.values()], index)
        for index, kind in enumerate(kinds)
    ]
    return {"data": bars, "layout": {"barmode": "group", "yaxis": {"title": {"text": "1 is perfect"}}}}


def _bar(name: str, x: Sequence[str], y: Sequence[float], colour: int) -> Figure:
    return {"type": "bar", "name": name, "x": x, "y": y, "marker": {"color": COLOURS[colour]}}


def _split(line: str) -> tuple[str, str]:
    return line[:12].strip(), line[12:]
