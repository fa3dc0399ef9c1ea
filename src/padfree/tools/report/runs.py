"""A run folder as it lies on disk, also one that was killed or that still runs.

    metrics.jsonl             one object a step; a name that only some steps have is a shorter series
    evaluation.jsonl          the same for evaluations
    config.json               the settings
    events.jsonl              starts, resumes, stops
    rows.jsonl                rows of the data that were skipped, dropped or cut
    rollouts.jsonl            a few responses of each batch of an RL run
    failures.jsonl            episodes and rewards that raised or hung
    nonfinite-step-*.jsonl    the samples of a step whose loss or gradient was no finite number
    checkpoints/step-*        what can be resumed from

A run that has just begun has `run.json` and little else; a run of an early version has no `run.json`. What cannot be
read (half of a last line, a number that is not one, a file without permission) is left out, and `notes`, which the page
shows, says so. A file that a run does not write (no evaluation, no rollouts) is not worth a note.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from padfree.errors import UserError
from padfree.record.file_names import (
    CHECKPOINTS,
    CONFIG,
    EVALUATION,
    EVENTS,
    FAILURES,
    MARKER,
    METRICS,
    NONFINITE,
    ROLLOUTS,
    ROWS,
)
from padfree.tools.report.response_table import Responses, read_responses
from padfree.tools.report.state import state_of

Record = dict[str, Any]

SAMPLES_SHOWN = 10


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Series:
    """One metric: its value at each step that has one, NaN where that was no finite number."""

    steps: NDArray[np.int64]  # [N] rising
    values: NDArray[np.float64]  # [N]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Run:
    name: str
    folder: Path
    num_steps: int  # that metrics.jsonl has
    metrics: Mapping[str, Series]
    config: Mapping[str, Any]
    events: Sequence[Record]
    rows: Sequence[Record]
    nonfinite: Sequence[Record]  # {"step": 7, "file": ..., "uids": [...], "samples": 3}
    checkpoints: Sequence[str]
    state: str
    num_evaluations: int
    responses: Responses | None  # None: there is no such file, or it cannot be read
    failures: Responses | None
    notes: Sequence[str]

    def finite(self, metric: str) -> NDArray[np.float64]:
        """Its finite values; none where there is no such metric."""
        series = self.metrics.get(metric)
        return np.empty(0) if series is None else series.values[np.isfinite(series.values)]

    def setting(self, section: str, name: str) -> Any:
        values = self.config.get(section)
        return values.get(name) if isinstance(values, dict) else None


def read_runs(folders: Sequence[str | Path], names: Sequence[str] | None = None) -> list[Run]:
    """The runs in these folders; without names they are called as their folders, with parents where that is needed."""
    paths = [Path(folder) for folder in folders]
    if not paths:
        raise UserError("RUN", "none", "give the folder of a run, or of several")
    places = [path.resolve() for path in paths]
    twice = [str(path) for path, count in Counter(places).items() if count > 1]
    if twice:
        raise UserError("RUN", f"{twice[0]} is given twice", "give each run once")
    if names is None:
        names = _names(places)
    elif len(names) != len(paths):
        raise UserError("--names", f"{len(names)} for {len(paths)} runs", "give one for each, with commas between")
    elif len(set(names)) < len(names) or not all(names):
        raise UserError("--names", "", "give every run a name of its own", value=",".join(names))
    return [read_run(path, name) for path, name in zip(paths, names, strict=True)]


def read_run(folder: Path, name: str) -> Run:
    _check_folder(folder)
    notes: list[str] = []
    num_steps, metrics = _read_metrics(folder / METRICS, notes)
    num_evaluations, held_out = _read_metrics(folder / EVALUATION, notes)
    events = _read_lines(folder / EVENTS, notes)
    nonfinite = [_read_nonfinite(path, notes) for path in sorted(folder.glob(NONFINITE.format(step="*")))]
    return Run(
        name=name,
        folder=folder,
        num_steps=num_steps,
        metrics=metrics | held_out,
        config=_read_config(folder / CONFIG, notes),
        events=events,
        rows=_read_lines(folder / ROWS, notes),
        nonfinite=nonfinite,
        checkpoints=sorted(
            path.name for path in (folder / CHECKPOINTS).glob("step-*") if not path.name.endswith(".partial")
        ),
        state=state_of(folder, events, has_nonfinite=bool(nonfinite)),
        num_evaluations=num_evaluations,
        responses=_read_responses(folder / ROLLOUTS, notes),
        failures=_read_responses(folder / FAILURES, notes),
        notes=notes,
    )


def _check_folder(folder: Path) -> None:
    """Refuse what is not a run folder."""
    try:
        if any((folder / name).exists() for name in (MARKER, METRICS, EVENTS)):
            return
        what = "no such folder" if not folder.exists() else "it is a file" if folder.is_file() else None
    except OSError as error:
        what = f"it cannot be read ({error.strerror})"
    what = what or f"there is no {MARKER} and no {METRICS} in it"
    raise UserError("RUN", f"{folder}: {what}", "give the run.folder of a run that has begun")


def _names(places: Sequence[Path]) -> list[str]:
    """The last parts of each path, as many as make it differ from all others."""
    depths = [1] * len(places)
    while True:
        names = ["/".join(place.parts[-depth:]) for place, depth in zip(places, depths, strict=True)]
        counts = Counter(names)
        if max(counts.values()) == 1:
            return names
        depths = [depth + (counts[name] > 1) for depth, name in zip(depths, names, strict=True)]


def _read_metrics(path: Path, notes: list[str]) -> tuple[int, dict[str, Series]]:
    by_step: dict[int, Record] = {}
    again = without = 0
    for line in _read_lines(path, notes):
        step = line.get("step")
        if not isinstance(step, int) or not 0 <= step < 1 << 53:
            without += 1
            continue
        again += step in by_step
        by_step[step] = line
    if without:
        notes.append(f"{path.name}: {without} lines without a step are left out")
    if again:
        notes.append(f"{path.name}: {again} steps are there more than once; the last line of each is shown")
    steps = np.array(sorted(by_step), dtype=np.int64)
    lines = [by_step[step] for step in steps.tolist()]
    metrics: dict[str, Series] = {}
    for name in dict.fromkeys(name for line in lines for name in line if name != "step"):
        at, column = steps[[name in line for line in lines]], [line[name] for line in lines if name in line]
        if set(map(type, column)) != {float}:  # the usual case needs no look at every value
            fits = [value is None or isinstance(value, int | float) for value in column]
            at, column = at[fits], [_finite(value) for value, fit in zip(column, fits, strict=True) if fit]
            if not all(fits):
                notes.append(f"{name}: {fits.count(False)} values are not numbers; they are left out")
        values = np.array(column, dtype=np.float64)
        values[~np.isfinite(values)] = np.nan
        gaps = int(np.isnan(values).sum())
        if gaps:
            notes.append(f"{name}: {gaps} of {len(values)} values are no finite number; they are gaps")
        if len(values):
            metrics[name] = Series(steps=at, values=values)
    return len(by_step), metrics


def _finite(value: float | None) -> float:
    """The number, NaN where it is none that a float can be."""
    return float(value) if value is not None and abs(value) <= sys.float_info.max else math.nan


def _read_config(path: Path, notes: list[str]) -> Mapping[str, Any]:
    if not path.exists():
        if not (path.parent / MARKER).exists() or (path.parent / METRICS).exists():  # a run that begins has none yet
            notes.append("there is no config.json")
        return {}
    text = "".join(line for _, line in _lines(path, notes))
    found = _parsed(text) if text else None
    if found is None:
        notes.append("config.json cannot be read")
        return {}
    return found


def _read_nonfinite(path: Path, notes: list[str]) -> Record:
    samples = _read_lines(path, notes)
    number = path.stem.removeprefix("nonfinite-step-")
    return {
        "step": int(number) if number.isdecimal() else None,
        "file": path.name,
        "samples": len(samples),
        "uids": [str(sample.get("uid")) for sample in samples[:SAMPLES_SHOWN]],
    }


def _read_lines(path: Path, notes: list[str]) -> list[Record]:
    """The objects in a file of JSON lines; none where there is no file."""
    found: list[Record] = []
    broken: list[int] = []
    count = 0
    for count, line in _lines(path, notes):
        record = _parsed(line)
        if record is None:
            broken.append(count)
        else:
            found.append(record)
    if broken == [count]:
        notes.append(f"{path.name}: the last line is not whole; it is left out")
    elif broken:
        notes.append(f"{path.name}: {len(broken)} lines are no JSON objects, the first is line {broken[0]}; left out")
    return found


def _lines(path: Path, notes: list[str]) -> Iterator[tuple[int, str]]:
    """Lines that are not blank, with their numbers from 1; none where there is no file."""
    if not _is_file(path, notes):
        return
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line
    except OSError as error:
        notes.append(f"{path.name} cannot be read ({error.strerror or error}); it is left out")


def _is_file(path: Path, notes: list[str]) -> bool:
    """Whether there is a file. A folder or a pipe of its name is worth a note."""
    if path.exists() and not path.is_file():
        notes.append(f"{path.name} is not a file; it is left out")
    return path.is_file()


def _read_responses(path: Path, notes: list[str]) -> Responses | None:
    if not _is_file(path, notes):
        return None
    try:
        found = read_responses(path)
    except OSError as error:
        notes.append(f"{path.name} cannot be read ({error.strerror or error}); it is left out")
        return None
    if found.broken:
        notes.append(f"{path.name}: {found.broken} of the lines that were looked at are not JSON objects; left out")
    return found


def _parsed(text: str) -> Record | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
