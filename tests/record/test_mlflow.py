"""MLflow's own package with a local store: what it has afterwards is what the run wrote. Nothing leaves the machine."""

from __future__ import annotations

import json
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import padfree
from padfree.config import TrackConfig
from padfree.record import mlflow_tracker
from padfree.record.file_names import TRACKERS
from padfree.record.trackers import Trackers
from padfree.testing.models import save_with_tokenizer
from padfree.warning import PadfreeWarning
from tests.refused import refused

REASON = "make test-mlflow installs mlflow-skinny with a database (115 MB) and runs these tests"
mlflow = pytest.importorskip("mlflow", reason=REASON)
pytest.importorskip("alembic", reason=REASON)
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
CONFIG = TrackConfig(mlflow="padfree-tests")


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with MLflow's tables, which take seconds to create."""
    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    mlflow.MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture(autouse=True)
def _store(empty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(empty, tmp_path / "mlflow.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("PADFREE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def start(folder: Path, **settings: Any) -> Trackers:
    return Trackers(CONFIG, folder, {"optimizer": {"lr": 1e-5, **settings}}, rank=0)


def log_three(folder: Path, step: int = 0, **settings: Any) -> str:
    trackers = start(folder, **settings)
    for each in range(step, step + 3):
        trackers.log(each, {"step": each, "loss": each + 1, "name": "not a number", "done": True})
    trackers.close()
    return run_id(folder)


def run_id(folder: Path) -> str:
    return str(json.loads((folder / TRACKERS).read_text())["mlflow"])


def points(run: str, name: str) -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in mlflow.MlflowClient().get_metric_history(run, name)]


def test_metrics_and_settings_are_those_of_the_run_folder(tmp_path: Path) -> None:
    """A real run, stopped after two of four steps and resumed with another learning rate."""
    model = save_with_tokenizer(tmp_path / "model", writes_back=True)
    data = tmp_path / "sums.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{a}+{a}=", "response": str(2 * a)}) + "\n" for a in range(16)))
    folder = tmp_path / "run"
    for steps, lr in ((2, 1e-3), (4, 2e-3)):
        padfree.sft(
            model=model,
            data={"path": data, "epochs": 2},
            batch={"samples": 8, "max_tokens": 64},
            optimizer={"lr": lr},
            eval={"path": [data], "every": 2},
            track={"mlflow": "padfree-tests"},
            run={"folder": folder, "steps": steps, "device": "cpu"},
        )
        if steps == 2:
            first, settings = run_id(folder), json.loads((folder / "config.json").read_text())
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("padfree-tests").experiment_id])
    assert run.info.run_id == run_id(folder) == first
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")

    expected: dict[str, list[tuple[int, float]]] = {}
    for file in ("metrics.jsonl", "evaluation.jsonl"):
        for line in (folder / file).read_text().splitlines():
            numbers = json.loads(line)
            for name, value in numbers.items():
                if isinstance(value, (int, float)) and name != "step":
                    expected.setdefault(name, []).append((numbers["step"], value))
    assert [step for step, _ in expected["loss"]] == [0, 1, 2, 3]
    assert {"eval/loss", "gradient_norm", "tokens"} <= expected.keys()
    assert {name: sorted(points(first, name)) for name in run.data.metrics} == expected

    assert run.data.params["optimizer.lr"] == "0.001"
    assert run.data.tags["optimizer.lr"] == "0.002"
    assert run.data.params["model.path"] == str(model)
    for section, values in settings.items():
        for name, value in values.items():
            if not isinstance(value, dict):
                assert run.data.params[f"{section}.{name}"] == (value if isinstance(value, str) else json.dumps(value))


def test_a_run_of_another_experiment_and_a_deleted_one_are_left_alone(tmp_path: Path) -> None:
    first = log_three(tmp_path / "run")
    assert log_three(tmp_path / "run", step=3) == first
    assert points(first, "loss") == [(step, step + 1.0) for step in range(6)]
    mlflow.MlflowClient().delete_run(first)
    second = log_three(tmp_path / "run", step=6)
    assert points(second, "loss") == [(6, 7.0), (7, 8.0), (8, 9.0)]
    Trackers(TrackConfig(mlflow="another"), tmp_path / "run", {}, rank=0).close()
    third = run_id(tmp_path / "run")
    names = [mlflow.MlflowClient().get_run(run).info.experiment_id for run in (second, third)]
    assert names[0] != names[1]
    (tmp_path / "run" / TRACKERS).write_text(json.dumps({"mlflow": "0" * 32}))
    assert log_three(tmp_path / "run") not in ("0" * 32, first, second, third)


def test_a_setting_is_marked_when_it_changes_and_when_it_changes_back(tmp_path: Path) -> None:
    def tags() -> dict[str, str]:
        found = mlflow.MlflowClient().get_run(run_id(tmp_path / "run")).data
        assert found.params == {"optimizer.lr": "1e-05", "optimizer.betas": "[0.9, 0.95]"}
        return {name: value for name, value in found.tags.items() if name.startswith("optimizer")}

    for lr, expected in ((1e-5, {}), (2e-5, {"optimizer.lr": "2e-05"}), (1e-5, {"optimizer.lr": "1e-05"})):
        log_three(tmp_path / "run", lr=lr, betas=[0.9, 0.95])
        assert tags() == expected


def test_what_cannot_be_sent_is_sent_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    works, send = threading.Event(), mlflow.MlflowClient.log_batch
    trackers = start(tmp_path / "run")

    def log_batch(self: Any, run: str, **values: Any) -> None:
        if not works.is_set():
            raise mlflow.MlflowException("no\nserver")
        send(self, run, **values)

    monkeypatch.setattr(mlflow.MlflowClient, "log_batch", log_batch)
    message = r"^track.mlflow: MlflowException: no server; the run goes on, metrics.jsonl has all metrics$"

    def log_forty() -> None:
        for step in range(40):
            trackers.log(step, {"loss": float(step)})
            time.sleep(0.005)

    with pytest.warns(PadfreeWarning, match=message) as warned:
        log_forty()
    assert len(warned) == 1
    works.set()
    trackers.log(40, {"loss": 40.0})
    trackers.close()
    assert points(run_id(tmp_path / "run"), "loss") == [(step, float(step)) for step in range(41)]


def test_a_server_that_does_not_answer_holds_nothing_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers, send = threading.Event(), mlflow.MlflowClient.log_batch
    trackers = start(tmp_path / "run")

    def log_batch(self: Any, run: str, **values: Any) -> None:
        answers.wait(60)
        send(self, run, **values)

    monkeypatch.setattr(mlflow.MlflowClient, "log_batch", log_batch)
    monkeypatch.setattr(mlflow_tracker, "CLOSE_SECONDS", 0.2)
    begin = time.perf_counter()
    for step in range(100):
        trackers.log(step, {"loss": float(step)})
    assert time.perf_counter() - begin < 5.0
    with pytest.warns(PadfreeWarning, match=r"track.mlflow: TimeoutError: no answer .*; \d+ values were not sent"):
        trackers.close()
    assert time.perf_counter() - begin < 10.0
    answers.set()


def test_many_metrics_and_odd_names(tmp_path: Path) -> None:
    trackers = start(tmp_path / "run")
    numbers = {f"source/{index}/loss": float(index) for index in range(2500)}
    trackers.log(0, {**numbers, "source//data/a+b.jsonl/loss": 1.0, "x" * 300: 2.0, "loss": float("nan")})
    trackers.close()
    found = mlflow.MlflowClient().get_run(run_id(tmp_path / "run")).data.metrics
    assert found.pop("loss") != 0.0
    assert found == {**numbers, "source/data/a_b.jsonl/loss": 1.0, "x" * 250: 2.0}


def test_a_store_that_refuses_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with refused("track.mlflow"):
        start(tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("uri", ["mlruns", "file:///tmp/mlruns"])
def test_the_file_store_is_refused(uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    with refused("track.mlflow"):
        start(tmp_path / "run")
    assert not (tmp_path / "run").exists()
