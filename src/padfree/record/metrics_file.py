"""The metrics of each step: one JSON line per step, written by rank 0.

    {"step": 3, "loss": 2.1, "gradient_norm": 0.8, "lr": 1e-05, "tokens": 4096, "tokens_per_second": 9100.0, ...}

A resumed run drops the lines of steps that it will repeat. The file then equals that of an uninterrupted run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from padfree.choices import ROLLOUT_ARRAYS
from padfree.errors import UserError
from padfree.record.file_names import METRICS
from padfree.routes import encoded_routes
from padfree.sample import Sample


class MetricsFile:
    """A file with one JSON line per step, such as `metrics.jsonl` in the run folder. Only rank 0 writes."""

    def __init__(self, folder: Path, *, rank: int, step: int = 0, name: str = METRICS) -> None:
        """Open the file `name` in the folder, and drop its lines for step `step` and later steps."""
        self.path = folder / name
        self._writes = rank == 0
        if self._writes:
            folder.mkdir(parents=True, exist_ok=True)
            self._keep_before(step)

    def _keep_before(self, step: int) -> None:
        """Drop the lines of `step` and later steps, which a resumed run writes again, and an incomplete last line."""
        kept = []
        if self.path.exists():
            try:
                text = self.path.read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise UserError(
                    "run.folder",
                    f"{self.path} is not text ({error.reason} at byte {error.start}) and was not written by a run",
                    "move the file away",
                ) from None
            for number, line in enumerate(text.splitlines(keepends=True), start=1):
                if not line.endswith("\n") or line_number(self.path, number, line, "step") >= step:
                    break
                kept.append(line)
        temporary = self.path.with_suffix(".writing")
        temporary.write_text("".join(kept), encoding="utf-8")
        temporary.replace(self.path)

    def write(self, metrics: Mapping[str, Any]) -> None:
        if self._writes:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(metrics) + "\n")


def line_number(path: Path, number: int, line: str, field: str) -> int:
    """Return the integer `field` of line `number` of the JSON Lines file `path`. `line` is the text of this line.

    Raise a `UserError` if the field is missing, because a run of padfree writes it to every line.
    """
    try:
        value = json.loads(line)[field]
    except (ValueError, KeyError, TypeError):
        value = None
    if not isinstance(value, int):
        raise UserError(
            "run.folder",
            f"line {number} of {path} has no {field!r}, so padfree did not write this file",
            "move the file away",
        )
    return value


def write_samples(path: Path, samples: Sequence[Sample]) -> None:
    """Write samples as JSON Lines in the format of rollout data, which users can read or train on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for sample in samples:
            arrays = {name: array.tolist() for name in ROLLOUT_ARRAYS if (array := getattr(sample, name)) is not None}
            row = {
                "uid": sample.uid,
                "group": sample.group,
                "source": sample.source,
                "reward": sample.reward,
                "tokens": sample.tokens.tolist(),
                "loss_mask": sample.mask.astype(int).tolist(),
                **arrays,
                **({} if sample.kept is None else {"kept": sample.kept.lists()}),
            }
            if sample.routes is not None:
                row["routes"] = encoded_routes(sample.routes)
            file.write(json.dumps(row) + "\n")
