"""Read the folder of a run that has ended, was killed, or is still running.

    metrics.jsonl             one object per step; not every step has every metric
    evaluation.jsonl          one object per evaluation
    events.jsonl              starts, resumes, stops
    rows.jsonl                data rows that were skipped, dropped or truncated
    rollouts.jsonl            a few responses of each batch of an RL run
    failures.jsonl            episodes and rewards that failed or timed out
    nonfinite-step-*.jsonl    the samples of a step with a non-finite loss or gradient

Most files may be missing. Data that cannot be read is skipped, with a note in `Run.notes`.
"""

from __future__ import annotations

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
from padfree.tools.json_objects import parsed_object
from padfree.tools.report.response_table import Responses, read_responses
from padfree.tools.report.state import state_of

Record = dict[str, Any]

SAMPLES_SHOWN = 10


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Series:
    """The values of one metric, and the steps that have a value. Values that are not finite are NaN."""

    steps: NDArray[np.int64]  # [N] ascending
    values: NDArray[np.float64]  # [N]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Run:
    name: str
    folder: Path
    num_steps: int  # steps in metrics.jsonl
    metrics: Mapping[str, Series]
    config: Mapping[str, Any]
    events: Sequence[Record]
    rows: Sequence[Record]
    nonfinite: Sequence[Record]  # {"step": 7, "file": ..., "uids": [...], "samples": 3}
    checkpoints: Sequence[str]
    state: str
    num_evaluations: int
    responses: Responses | None  # None: the file does not exist or cannot be read
    failures: Responses | None
    notes: Sequence[str]

    def finite(self, metric: str) -> NDArray[np.float64]:
        """Return the finite values of a metric; an empty array if the run does not have the metric."""
        series = self.metrics.get(metric)
        return np.empty(0) if series is None else series.values[np.isfinite(series.values)]

    def setting(self, section: str, name: str) -> Any:
        values = self.config.get(section)
        return values.get(name) if isinstance(values, dict) else None


def read_runs(folders: Sequence[str | Path], names: Sequence[str] | None = None) -> list[Run]:
    """Read the runs in these folders. `names`: the names of the runs in the report.

    By default, a run has the name of its folder, with as many parent folders as make the name unique.
    """
    paths = [Path(folder) for folder in folders]
    if not paths:
        raise UserError("RUN", "is missing", "give the folders of one or more runs")
    resolved = [path.resolve() for path in paths]
    twice = [str(path) for path, count in Counter(resolved).items() if count > 1]
    if twice:
        raise UserError("RUN", f"{twice[0]} is given twice", "give each run once")
    if names is None:
        names = _names(resolved)
    elif len(names) != len(paths):
        raise UserError(
            "--names", f"gives {len(names)} names for {len(paths)} runs", "give one name per run, separated by commas"
        )
    elif len(set(names)) < len(names) or not all(names):
        raise UserError(
            "--names", "has an empty or repeated name", "give every run a different name", value=",".join(names)
        )
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
    """Raise a `UserError` if the folder does not exist or is not a run folder."""
    try:
        if any((folder / name).exists() for name in (MARKER, METRICS, EVENTS)):
            return
        what = "does not exist" if not folder.exists() else "is a file" if folder.is_file() else None
    except OSError as error:
        what = f"cannot be read ({error.strerror})"
    what = what or f"has neither {MARKER} nor {METRICS}"
    raise UserError("RUN", f"{folder} {what}", "give the run.folder of a run that has started")


def _names(paths: Sequence[Path]) -> list[str]:
    """Return a name for each run: the last parts of its path, as many as are needed to make the names unique."""
    depths = [1] * len(paths)
    while True:
        names = ["/".join(path.parts[-depth:]) for path, depth in zip(paths, depths, strict=True)]
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
        notes.append(f"{path.name}: {without} lines without a step were skipped")
    if again:
        notes.append(f"{path.name}: {again} lines repeat a step; only the last line of a step is shown")
    steps = np.array(sorted(by_step), dtype=np.int64)
    lines = [by_step[step] for step in steps.tolist()]
    metrics: dict[str, Series] = {}
    for name in dict.fromkeys(name for line in lines for name in line if name != "step"):
        at, column = steps[[name in line for line in lines]], [line[name] for line in lines if name in line]
        if set(map(type, column)) != {float}:  # usually all values are floats
            fits = [value is None or isinstance(value, int | float) for value in column]
            at, column = at[fits], [_finite(value) for value, fit in zip(column, fits, strict=True) if fit]
            if not all(fits):
                notes.append(f"{name}: {fits.count(False)} values that are not numbers were skipped")
        values = np.array(column, dtype=np.float64)
        values[~np.isfinite(values)] = np.nan
        gaps = int(np.isnan(values).sum())
        if gaps:
            notes.append(f"{name}: {gaps} of {len(values)} values are not finite and shown as gaps")
        if len(values):
            metrics[name] = Series(steps=at, values=values)
    return len(by_step), metrics


def _finite(value: float | None) -> float:
    """Return the number as a float; NaN if it is missing or too large for a float."""
    return float(value) if value is not None and abs(value) <= sys.float_info.max else math.nan


def _read_config(path: Path, notes: list[str]) -> Mapping[str, Any]:
    if not path.exists():
        if (
            not (path.parent / MARKER).exists() or (path.parent / METRICS).exists()
        ):  # a run that has just started has none
            notes.append("config.json is missing")
        return {}
    text = "".join(line for _, line in _lines(path, notes))
    found = parsed_object(text) if text else None
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
    """Return the objects in a JSON Lines file; an empty list if the file does not exist. Add problems to `notes`."""
    found: list[Record] = []
    broken: list[int] = []
    count = 0
    for count, line in _lines(path, notes):
        record = parsed_object(line)
        if record is None:
            broken.append(count)
        else:
            found.append(record)
    if broken == [count]:
        notes.append(f"{path.name}: the last line is incomplete and was skipped")
    elif broken:
        notes.append(
            f"{path.name}: {len(broken)} lines that are not JSON objects were skipped; the first is line {broken[0]}"
        )
    return found


def _lines(path: Path, notes: list[str]) -> Iterator[tuple[int, str]]:
    """Yield the non-blank lines of a file with their numbers, counted from 1; nothing if the file does not exist."""
    if not _is_file(path, notes):
        return
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line
    except OSError as error:
        notes.append(f"{path.name} cannot be read ({error.strerror or error})")


def _is_file(path: Path, notes: list[str]) -> bool:
    """Return whether the path is a regular file. If it is a folder or a pipe, add a note to `notes`."""
    if path.exists() and not path.is_file():
        notes.append(f"{path.name} is not a regular file and was skipped")
    return path.is_file()


def _read_responses(path: Path, notes: list[str]) -> Responses | None:
    if not _is_file(path, notes):
        return None
    try:
        found = read_responses(path)
    except OSError as error:
        notes.append(f"{path.name} cannot be read ({error.strerror or error})")
        return None
    if found.broken:
        notes.append(f"{path.name}: {found.broken} lines that are not JSON objects were skipped")
    return found
