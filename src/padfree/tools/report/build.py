"""Build the HTML report of one or more runs: summary, plots, responses, events, settings.

If there is too much data, the report shows a part of it and says so. Plots show the minimum and the maximum of every
interval of steps. The list of events is cut at its beginning, the list of skipped or truncated data rows at its end.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from padfree.config.output_sections import check_output
from padfree.errors import UserError
from padfree.record.file_names import FAILURES, ROLLOUTS
from padfree.tools.page import Cell, Page
from padfree.tools.report.panels import figures, panels
from padfree.tools.report.response_table import (
    MOST_LETTERS,
    MOST_LETTERS_OF_TEXT,
    MOST_ROWS,
    TEXTS,
    common_beginning,
    shown_lines,
    table_of,
    without_beginning,
    without_middle,
)
from padfree.tools.report.runs import Record, Run, read_runs
from padfree.tools.report.series import MOST_POINTS, SMOOTH_ABOVE, mean_window

ROWS_SHOWN = 100
CHECKPOINTS_SHOWN = 3
EVENTS_SHOWN = 200
HELD_OUT = ("eval/loss", "eval/accuracy", "eval/reward", "eval/pass@1")
VERSIONS = ("padfree", "python", "torch", "transformers", "device", "processes", "layout")
NOTHING = "–"
PAGE = "report.html"


def default_output(folders: Sequence[str | Path]) -> Path:
    """Return the default path of the report: in the run's folder or, for several runs, next to the first run's."""
    first = Path(folders[0]) if folders else Path()
    return (first if len(folders) == 1 else first.resolve().parent) / PAGE


def write_report(
    folders: Sequence[str | Path], output: str | Path | None = None, *, names: Sequence[str] | None = None
) -> list[str]:
    """Write an HTML page about the runs in `folders` to the file `output`, by default `default_output(folders)`.

    Return notes about data that could not be read. The page shows these notes, too. `names`: how the page names the
    runs.
    """
    given = output is not None
    output = Path(output) if output is not None else default_output(folders)
    if output.suffix not in (".html", ".htm"):
        raise UserError("--output", f"{output} is not an HTML file name", "give a file name that ends in .html")
    if given:
        check_output(output, "--output", makes_folder=True)
    runs = read_runs(folders, names)
    if not given:
        check_output(output, "--output")
    report_page(runs).write(output)
    return [f"{run.name}: {note}" for run in runs for note in run.notes]


def report_page(runs: Sequence[Run]) -> Page:
    alone = len(runs) == 1
    now = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    title = f"Run {runs[0].name}" if alone else f"{len(runs)} runs side by side"
    page = Page(title, f"padfree report, written {now}")
    page.add_table("Summary", ["", *(run.name for run in runs)], _summary(runs))
    notes = [[run.name, note] for run in runs for note in run.notes]
    if notes:
        page.add_table("Problems while reading the runs", ["run", "note"], notes)
    _add_plots(page, runs)
    _add_responses(page, runs)
    _add_events(page, runs)
    _add_settings(page, runs)
    return page


# Summary


def _summary(runs: Sequence[Run]) -> list[list[Cell]]:
    def row(label: str, values: Sequence[Cell | None]) -> list[Cell]:
        return [label, *(NOTHING if value is None else value for value in values)]

    rows = [
        row("folder", [str(run.folder) for run in runs]),
        row("model", [_text(run.setting("model", "path")) for run in runs]),
        row("loss.kind", [_text(run.setting("loss", "kind")) for run in runs]),
        row("state", [run.state for run in runs]),
        row("steps", [_steps(run) for run in runs]),
        row("loss, last", [_at(run, "loss", -1) for run in runs]),
        row("reward, first", [_at(run, "reward", 0) for run in runs]),
        row("reward, last", [_at(run, "reward", -1) for run in runs]),
        row("evaluations", [run.num_evaluations or None for run in runs]),
        *(row(f"{name}, last", [_at(run, name, -1) for run in runs]) for name in HELD_OUT),
        row("tokens", [None if (count := _total(run, "tokens")) is None else int(count) for run in runs]),
        row("time in steps", [_duration(_total(run, "seconds")) for run in runs]),
        row("time in sampling", [_duration(_total(run, "seconds/sampling")) for run in runs]),
        row("tokens per second", [_speed(run) for run in runs]),
        row("peak memory, GiB", [_at(run, "memory_gib", -1) for run in runs]),
        row("resumes", [sum(event.get("kind") == "resume" for event in run.events) for run in runs]),
        row("data rows skipped, dropped or truncated", [len(run.rows) for run in runs]),
        row("checkpoints", [_newest(run.checkpoints) for run in runs]),
    ]
    return [found for found in rows if any(cell != NOTHING for cell in found[1:])]


def _newest(checkpoints: Sequence[str]) -> str | None:
    more = f"{len(checkpoints):,}, the newest " if len(checkpoints) > CHECKPOINTS_SHOWN else ""
    return more + ", ".join(checkpoints[-CHECKPOINTS_SHOWN:]) or None


def _steps(run: Run) -> str:
    asked = run.setting("run", "steps")
    return f"{run.num_steps:,} of {asked:,}" if isinstance(asked, int) else f"{run.num_steps:,}"


def _at(run: Run, metric: str, index: int) -> float | None:
    values = run.finite(metric)
    return float(values[index]) if len(values) else None


def _total(run: Run, metric: str) -> float | None:
    values = run.finite(metric)
    return float(values.sum()) if len(values) else None


def _speed(run: Run) -> float | None:
    tokens, seconds = _total(run, "tokens"), _total(run, "seconds")
    return tokens / seconds if tokens is not None and seconds else None


def _duration(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, hours = int(seconds) // 60, int(seconds) // 3600
    return f"{hours} h {minutes % 60:02d} min" if hours else f"{minutes} min {int(seconds) % 60:02d} s"


# Plots


def _add_plots(page: Page, runs: Sequence[Run]) -> None:
    drawn, constant = panels(runs)
    if not drawn and not constant:
        page.add_text("The run has not finished a step yet, so there is nothing to plot.")
    longest = max(run.num_steps for run in runs)
    said = []
    if longest > SMOOTH_ABOVE:
        said.append(
            f"Strong lines are running means ({mean_window(longest):,} steps in the longest run); faint lines are "
            "single values."
        )
    if longest > MOST_POINTS:
        said.append(
            f"Series of more than {MOST_POINTS:,} values show only the minimum and the maximum of every interval of "
            "steps. All values are in metrics.jsonl."
        )
    if any(event.get("kind") == "resume" for run in runs for event in run.events):
        said.append("A dotted vertical line is a step at which the run was resumed.")
    if any(run.nonfinite for run in runs):
        said.append("A solid vertical line is a step whose loss or gradient was not finite.")
    if said:
        page.add_text(" ".join(said))
    for heading, group in drawn.items():
        page.add_heading(heading)
        for panel in group:
            for caption, drawing in figures(panel, runs):
                page.add_figure(caption, drawing)
    if constant:
        rows = [[name, *(_constant(run, name) for run in runs)] for name in constant]
        page.add_table("Metrics that never change", ["metric", *(run.name for run in runs)], rows)


def _constant(run: Run, name: str) -> Cell:
    return float(run.metrics[name].values[0]) if name in run.metrics else NOTHING


# Responses


def _add_responses(page: Page, runs: Sequence[Run]) -> None:
    """Add tables of responses and of failed episodes to the page, with at most `MOST_ROWS` rows in all."""
    parts = [
        (run, what, file, found)
        for run in runs
        for what, file, found in (("Responses", ROLLOUTS, run.responses), ("Failures", FAILURES, run.failures))
        if found is not None and found.rows
    ]
    if not parts:
        return
    page.add_heading("Responses")
    page.add_text("Click a line to expand it, and the name of a column to sort.")
    most = max(MOST_ROWS // len(parts), 1)
    for run, what, file, found in parts:
        rows = [found.rows[index] for index in shown_lines(len(found.rows), most)]
        letters = min(MOST_LETTERS_OF_TEXT, MOST_LETTERS // (len(TEXTS) * len(parts) * len(rows)))
        caption = what if len(runs) == 1 else f"{what}: {run.name}"
        left_out = found.total - found.broken - len(rows)
        if left_out:
            caption += f", {len(rows):,} of {found.total:,}; the other {left_out:,} are in {file}"
        beginning = common_beginning(rows)
        page.add_records(caption, *table_of(without_beginning(rows, beginning), letters))
        if beginning:
            page.add_details(
                "The first lines of all prompts, which the table omits because they are equal",
                without_middle(beginning, letters),
            )


# Events


def _add_events(page: Page, runs: Sequence[Run]) -> None:
    page.add_heading("Events")
    rows = sorted((row for run in runs for row in _event_rows(run)), key=lambda row: row[0])
    if rows:
        shown = rows[-EVENTS_SHOWN:]
        caption = "Events" if len(shown) == len(rows) else f"The last {len(shown)} of {len(rows):,} events"
        page.add_table(caption, ["time", "run", "event", "step", "details"], shown)
    else:
        page.add_text("No events: the folders have no events.jsonl.")
    for run in runs:
        if run.nonfinite:
            page.add_table(
                f"Steps with a non-finite loss or gradient: {run.name}",
                ["step", "samples", "first samples", "file"],
                [
                    [_text(row["step"]) or NOTHING, row["samples"], ", ".join(row["uids"]), row["file"]]
                    for row in run.nonfinite
                ],
            )
        if run.rows:
            counts = Counter(str(row.get("action")) for row in run.rows)
            actions = ", ".join(f"{count:,} {action}" for action, count in counts.items())
            cut = f"; the first {ROWS_SHOWN} are shown, all are in rows.jsonl" if len(run.rows) > ROWS_SHOWN else ""
            lines = [
                f"{_shown(row.get('action'))} {_shown(row.get('file'))} line {_shown(row.get('line'))}: "
                f"{_shown(row.get('reason'))}"
                for row in run.rows[:ROWS_SHOWN]
            ]
            page.add_details(f"Data rows of {run.name}: {actions}{cut}", "\n".join(lines))


def _event_rows(run: Run) -> list[list[Cell]]:
    found: list[list[Cell]] = []
    before: Record = {}  # fields of the last start; the next start shows only the fields that changed since then
    for event in run.events:
        fields = {key: value for key, value in event.items() if key not in ("time", "kind", "step")}
        shown = fields
        if event.get("kind") == "start":
            shown = {key: value for key, value in fields.items() if before.get(key) != value}
            before = fields
        details = [f"{key} {_shown(value)}" for key, value in shown.items()] or ["unchanged"] * bool(fields)
        time = _shown(event.get("time")).replace("T", " ").replace("+00:00", " UTC")
        found.append([time, run.name, _shown(event.get("kind")), _shown(event.get("step")), ", ".join(details)])
    return found


# Settings


def _add_settings(page: Page, runs: Sequence[Run]) -> None:
    page.add_heading("Versions and settings")
    starts = [_last_start(run) for run in runs]
    versions = [
        [name, *(_shown(start.get(name)) for start in starts)]
        for name in VERSIONS
        if any(name in start for start in starts)
    ]
    if versions:
        page.add_table("Versions", ["", *(run.name for run in runs)], versions)
    else:
        page.add_text("No versions: the folders have no events.jsonl.")
    if len(runs) > 1:
        flat = [_flat(run.config) for run in runs]
        keys = dict.fromkeys(key for settings in flat for key in settings)
        rows = [[key, *(_shown(settings.get(key)) for settings in flat)] for key in keys]
        rows = [row for row in rows if len(set(row[1:])) > 1]
        if rows:
            page.add_table("Settings that differ", ["setting", *(run.name for run in runs)], rows)
    for run in runs:
        if run.config:
            text = json.dumps(run.config, indent=1, ensure_ascii=False)
            page.add_details(f"All settings: {run.name}" if len(runs) > 1 else "All settings", text)


def _last_start(run: Run) -> Record:
    return next((event for event in reversed(run.events) if event.get("kind") == "start"), {})


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested dicts to dotted names: `{"loss": {"kind": "sft"}}` -> `{"loss.kind": "sft"}`."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _shown(value: Any) -> str:
    if value is None:
        return NOTHING
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
