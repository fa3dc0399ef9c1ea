"""Send metrics to an MLflow run.

    in padfree         in MLflow
    settings           parameters with dotted names, such as optimizer.lr = "1e-05"
    changed settings   tags with the same names, because a resumed run cannot change parameters
    metrics            metrics with the step of `metrics.jsonl`

The environment variable MLFLOW_TRACKING_URI names a server or a database (`sqlite:////data/mlflow.db`).

A thread sends the metrics, because MLflow's client blocks for minutes if the server is unreachable. Metrics that could
not be sent are sent again at the next step.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from padfree.errors import UserError

MOST_UNSENT = 200_000
"""Maximum number of metric values that wait while MLflow's server is unreachable. Older values are dropped."""

CLOSE_SECONDS = 30.0
"""Maximum seconds to wait at the end of a run until the remaining metrics are sent to MLflow."""

BATCH = 1000  # values in a request: MLflow's limit
LONGEST_NAME = 250  # MLflow's limits
LONGEST_VALUE = 6000


class MlflowTracker:
    """A run at MLflow, to which a thread sends the metrics.

    If the thread could not send metrics, the next call of `log` or `close` raises the error, which the caller
    catches.
    """

    def __init__(self, experiment: str, folder: Path, settings: Mapping[str, Any], run_id: str | None) -> None:
        """Continue the MLflow run `run_id`, or start a new run.

        A new run is started if `run_id` is None, or if that run was deleted, belongs to another experiment, or does
        not exist on this server or in this database.
        """
        from mlflow import MlflowClient, get_tracking_uri
        from mlflow.exceptions import MlflowException

        if urlsplit(get_tracking_uri()).scheme in ("", "file"):
            raise UserError(
                "track.mlflow",
                f"cannot be stored in the folder {get_tracking_uri()}, because the metrics loss and loss/entropy would "
                "need a file and a folder of the same name",
                "set MLFLOW_TRACKING_URI to a server or a database, e.g. sqlite:///mlflow.db",
                value=experiment,
            )
        try:
            self._client = MlflowClient()
            self.run_id = self._start(experiment, folder.resolve().name, run_id)
            self._write_settings(settings)
        except MlflowException as error:
            raise UserError(
                "track.mlflow",
                f"cannot be used ({' '.join(str(error).split())})",
                "set MLFLOW_TRACKING_URI to a server, or to a database (needs pip install 'padfree[mlflow]')",
                value=experiment,
            ) from error
        self._changed = threading.Condition()
        self._unsent: list[Any] = []
        self._failure: Exception | None = None
        self._closing = False
        self._sender = threading.Thread(target=self._send, name="mlflow", daemon=True)
        self._sender.start()

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        with self._changed:
            self._unsent += [Metric(_valid_name(name), value, now, step) for name, value in numbers.items()]
            self._changed.notify()
        self._raise_failure()

    def close(self) -> None:
        """Send the metrics that are not sent yet, and mark the MLflow run as finished."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._sender.join(CLOSE_SECONDS)
        self._raise_failure()
        if self._sender.is_alive():
            raise TimeoutError(f"no answer for {CLOSE_SECONDS:.0f} s; {len(self._unsent)} values were not sent")

    def _start(self, experiment: str, name: str, run_id: str | None) -> str:
        from mlflow.exceptions import MlflowException

        client = self._client
        found = client.get_experiment_by_name(experiment)
        identity = client.create_experiment(experiment) if found is None else found.experiment_id
        if run_id is not None:
            try:
                info = client.get_run(run_id).info
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
            else:
                if info.lifecycle_stage == "active" and info.experiment_id == identity:
                    client.update_run(run_id, status="RUNNING")
                    return run_id
        return str(client.create_run(identity, run_name=name).info.run_id)

    def _write_settings(self, settings: Mapping[str, Any]) -> None:
        from mlflow.entities import Param, RunTag

        known = self._client.get_run(self.run_id).data
        values = dict(_flatten(settings))
        new = [Param(name, value) for name, value in values.items() if name not in known.params]
        changed = [
            RunTag(name, value)
            for name, value in values.items()
            if name in known.params and known.tags.get(name, known.params[name]) != value
        ]
        self._client.log_batch(self.run_id, params=new, tags=changed)

    def _send(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._unsent) or self._closing)
                batch, self._unsent = self._unsent[:BATCH], self._unsent[BATCH:]
            try:
                if batch:
                    self._client.log_batch(self.run_id, metrics=batch)
                else:
                    self._client.set_terminated(self.run_id)
                    return
            except Exception as error:
                with self._changed:
                    self._failure = error
                    self._unsent = (batch + self._unsent)[-MOST_UNSENT:]
                    if self._closing:
                        return
                    self._changed.wait()  # until the next step adds values, or the run ends

    def _raise_failure(self) -> None:
        with self._changed:
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure


def _flatten(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield each setting with its dotted name: `{"optimizer": {"lr": 1e-5}}` -> `("optimizer.lr", "1e-05")`.

    Strings stay as they are. All other values are converted to JSON text.
    """
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value)
            yield _valid_name(f"{prefix}{name}"), text[:LONGEST_VALUE]


def _valid_name(name: str) -> str:
    """Return a metric name that MLflow accepts: `source//data/a+b/loss` -> `source/data/a_b/loss`."""
    parts = (part for part in re.sub(r"[^\w.\- :/]", "_", name).split("/") if part not in ("", ".", ".."))
    return "/".join(parts)[:LONGEST_NAME]
