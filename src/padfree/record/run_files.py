"""Opens the files that a run writes: metrics, evaluations, events, trackers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from padfree.config import Config
from padfree.distributed import Mesh
from padfree.record.events import Events, environment
from padfree.record.file_names import CONFIG, EVALUATION
from padfree.record.metrics_file import MetricsFile
from padfree.record.run_folder import writing
from padfree.record.trackers import Trackers


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RunFiles:
    folder: Path
    metrics: MetricsFile
    evaluations: MetricsFile
    events: Events
    trackers: Trackers


def open_run_files(
    config: Config, mesh: Mesh, *, step: int, evaluated: bool, resumed: Mapping[str, Any] | None
) -> RunFiles:
    """Open the files for metrics, evaluations and events, and the trackers, of a run that has done `step` steps.

    `evaluated`: whether the model was evaluated after these steps. `resumed`: fields of the resume event; None if the
    run does not resume a checkpoint.
    """
    folder, rank = Path(config.run.folder), mesh.loss.rank
    with writing(folder):
        metrics = MetricsFile(folder, rank=rank, step=step)
        evaluations = MetricsFile(folder, rank=rank, step=step + evaluated, name=EVALUATION)
        if rank == 0:
            settings = json.dumps(finite(config.to_dict()), indent=1, allow_nan=False)
            (folder / CONFIG).write_text(settings, encoding="utf-8")
        events = Events(folder, rank=rank)
        events.write("start", step=step, **environment(mesh, replicate=config.parallel.replicate))
        if resumed is not None:
            events.write("resume", step=step, **resumed)
        trackers = Trackers(config.track, folder, config.to_dict(), rank=rank, step=step)
    return RunFiles(folder=folder, metrics=metrics, evaluations=evaluations, events=events, trackers=trackers)


def finite(value: Any) -> Any:
    """Replace infinity by the string "inf", because JSON has no infinity."""
    if isinstance(value, dict):
        return {name: finite(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(entry) for entry in value]
    return str(value) if isinstance(value, float) and math.isinf(value) else value
