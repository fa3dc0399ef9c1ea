"""Send metrics from rank 0 to TensorBoard, W&B, trackio and MLflow, as the config section `[track]` says.

    setting                         metrics are stored in
    track.tensorboard = true        run folder/tensorboard
    track.wandb = "project"         W&B, run folder/wandb
    track.trackio = "project"       trackio's own folder
    track.mlflow = "experiment"     MLflow's server or database

A resumed run continues the same run at each tracker. Steps that it repeats appear twice, except in TensorBoard.

A tracker that cannot start ends the run before the first step. A tracker that fails later only causes a warning.
"""

from __future__ import annotations

import json
import secrets
import warnings
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from padfree.config import TrackConfig
from padfree.errors import UserError
from padfree.record.file_names import TENSORBOARD, TRACKERS
from padfree.record.mlflow_tracker import MlflowTracker
from padfree.warning import PadfreeWarning

PACKAGES = {
    "tensorboard": "padfree[track]",
    "wandb": "padfree[track]",
    "trackio": "padfree[track]",
    "mlflow": "padfree[mlflow]",
}
"""What to install for each tracker. The name of a tracker is also the name of its setting and of its package."""

Log = Callable[[int, Mapping[str, float]], None]
Close = Callable[[], Any]


def require_trackers(config: TrackConfig) -> None:
    """Raise a `UserError` if the settings name a tracker whose package is not installed."""
    for name, package in PACKAGES.items():
        found = find_spec(name) if getattr(config, name) else None
        # find_spec also finds a plain folder with the name of the package, e.g. the folder wandb of W&B. Its spec has
        # no origin.
        if getattr(config, name) and (found is None or found.origin is None):
            raise UserError(
                f"track.{name}",
                f", but the package {name} is missing",
                f"install it with pip install '{package}', or remove track.{name}",
                value=getattr(config, name),
            )


class Trackers:
    """The metric trackers (TensorBoard, W&B, trackio, MLflow) that the settings name. Only rank 0 has trackers."""

    def __init__(
        self, config: TrackConfig, folder: Path, settings: Mapping[str, Any], *, rank: int, step: int = 0
    ) -> None:
        """Start the trackers that `config` names, on rank 0.

        `settings`: the settings of the run, which the trackers store. `step`: the next step to be logged.
        """
        self._targets: dict[str, tuple[Log, Close]] = {}
        self._failed: set[str] = set()
        if rank:
            return
        require_trackers(config)
        if config.tensorboard:
            self._targets["tensorboard"] = _tensorboard(folder / TENSORBOARD, settings, step)
        if config.wandb is not None:
            self._targets["wandb"] = _wandb(config.wandb, folder, settings)
        if config.trackio is not None:
            self._targets["trackio"] = _trackio(config.trackio, folder, settings)
        if config.mlflow is not None:
            self._targets["mlflow"] = _mlflow(config.mlflow, folder, settings)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Log the metrics that are numbers."""
        numbers = {
            name: float(value)
            for name, value in metrics.items()
            if name != "step" and isinstance(value, (int, float)) and not isinstance(value, bool)
        }
        for name, (log, _) in self._targets.items():
            self._try(name, log, step, numbers)

    def close(self) -> None:
        """Flush the trackers. Nothing can be logged afterwards."""
        for name, (_, close) in self._targets.items():
            self._try(name, close)
        self._targets.clear()

    def _try(self, name: str, call: Callable[..., Any], *arguments: Any) -> None:
        """Call a tracker. Its first exception becomes a warning, later ones are ignored, so that the run continues."""
        try:
            call(*arguments)
        except Exception as error:
            if name not in self._failed:
                self._failed.add(name)
                reason = " ".join(str(error).split())
                message = (
                    f"track.{name}: {type(error).__name__}: {reason}; the run goes on, metrics.jsonl has all metrics"
                )
                warnings.warn(message, PadfreeWarning, stacklevel=3)


def _tensorboard(folder: Path, settings: Mapping[str, Any], step: int) -> tuple[Log, Close]:
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter(str(folder), purge_step=step)
    writer.add_text("config", f"```json\n{json.dumps(settings, indent=1)}\n```", step)

    def log(step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)

    return log, writer.close


def _wandb(project: str, folder: Path, settings: Mapping[str, Any]) -> tuple[Log, Close]:
    import wandb

    try:
        run = wandb.init(
            project=project,
            name=folder.resolve().name,
            id=_name_of(folder, "wandb"),
            resume="allow",
            dir=str(folder),
            config=dict(settings),
        )
    except wandb.Error as error:
        reason = " ".join(str(error).split())
        raise UserError(
            "track.wandb",
            f"cannot be used ({reason})",
            "log in with wandb login, or set WANDB_MODE=offline",
            value=project,
        ) from error
    run.define_metric("step")
    run.define_metric("*", step_metric="step")  # the x-axis
    return lambda step, numbers: run.log({"step": step, **numbers}), run.finish


def _trackio(project: str, folder: Path, settings: Mapping[str, Any]) -> tuple[Log, Close]:
    import trackio

    trackio.init(project=project, name=_name_of(folder, "trackio"), resume="allow", config=dict(settings))
    return lambda step, numbers: trackio.log(dict(numbers), step=step), trackio.finish


def _mlflow(experiment: str, folder: Path, settings: Mapping[str, Any]) -> tuple[Log, Close]:
    tracker = MlflowTracker(experiment, folder, settings, _read_names(folder / TRACKERS).get("mlflow"))
    _write_name(folder, "mlflow", tracker.run_id)
    return tracker.log, tracker.close


def _name_of(folder: Path, tracker: str) -> str:
    """Return the name or id of this run at a tracker such as W&B. It is chosen and stored when the run starts for the
    first time.
    """
    names = _read_names(folder / TRACKERS)
    if tracker not in names:
        # A folder name may contain characters that W&B does not allow in an id.
        readable = "" if tracker == "wandb" else f"{folder.resolve().name}-"
        names[tracker] = f"{readable}{secrets.token_hex(4)}"
        _write_name(folder, tracker, names[tracker])
    return names[tracker]


def _write_name(folder: Path, tracker: str, name: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / TRACKERS
    temporary = path.with_suffix(".writing")
    temporary.write_text(json.dumps({**_read_names(path), tracker: name}, indent=1), encoding="utf-8")
    temporary.replace(path)


def _read_names(path: Path) -> dict[str, str]:
    if not path.exists():
        return {}
    try:
        names = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        names = None
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise UserError("track", f"{path} is damaged", "remove the file, so that the trackers start new runs")
    return names
