"""Real trackers in offline mode: the logged metrics are read back from their files."""

from __future__ import annotations

import json
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from padfree.config import TrackConfig
from padfree.record.file_names import TRACKERS
from padfree.record.trackers import Trackers, _name_of, require_trackers
from padfree.warning import PadfreeWarning
from tests.refused import refused

# Files and sockets that the packages leave open.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def log_three(folder: Path, config: TrackConfig, *, step: int = 0, factor: float = 1.0) -> None:
    trackers = Trackers(config, folder, {"optimizer": {"lr": 1e-5}}, rank=0, step=step)
    for each in range(step, step + 3):
        trackers.log(each, {"step": each, "loss": factor * (each + 1), "name": "not a number", "done": True})
    trackers.close()


def test_tensorboard_shows_every_step_once_after_a_resume(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = TrackConfig(tensorboard=True)
    log_three(tmp_path / "run", config)
    log_three(tmp_path / "run", config, step=2, factor=10.0)
    found = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert found.Tags()["scalars"] == ["loss"]
    points = [(event.step, event.value) for event in found.Scalars("loss")]
    assert points == [(0, 1.0), (1, 2.0), (2, 30.0), (3, 40.0), (4, 50.0)]
    assert found.Tags()["tensors"] == ["config/text_summary"]


def test_wandb_offline_keeps_one_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    folder = tmp_path / "a run: 50%"
    folder.mkdir()
    config = TrackConfig(wandb="padfree-tests")
    log_three(folder, config)
    identity = json.loads((folder / TRACKERS).read_text())["wandb"]
    log_three(folder, config, step=3)
    assert json.loads((folder / TRACKERS).read_text())["wandb"] == identity
    files = sorted((folder / "wandb").glob(f"offline-run-*/run-{identity}.wandb"))
    assert files
    assert b"loss" in files[0].read_bytes()


def test_wandb_that_refuses_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class RefusalError(Exception):
        pass

    def init(**_: Any) -> None:
        raise RefusalError("No API key\nconfigured")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(Error=RefusalError, init=init))  # type: ignore[arg-type]
    monkeypatch.setattr("padfree.record.trackers.require_trackers", lambda config: None)
    with refused("track.wandb"):
        Trackers(TrackConfig(wandb="p"), tmp_path, {}, rank=0)


@pytest.fixture
def _local_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """trackio reads its folder when it is imported."""
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    forget_trackio()
    yield
    forget_trackio()


def forget_trackio() -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "trackio"]:
        del sys.modules[name]


@pytest.mark.usefixtures("_local_trackio")
def test_trackio_resumes_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("trackio")
    config = TrackConfig(trackio="padfree-tests")
    log_three(tmp_path / "run", config)
    log_three(tmp_path / "run", config, step=3)
    name = json.loads((tmp_path / "run" / TRACKERS).read_text())["trackio"]
    assert name.startswith("run-")
    with sqlite3.connect(tmp_path / "trackio" / "padfree-tests.db") as database:
        rows = database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY step").fetchall()
    database.close()
    assert [(row[0], row[1]) for row in rows] == [(name, step) for step in range(6)]
    assert [json.loads(row[2])["loss"] for row in rows] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


def test_other_ranks_and_no_trackers_write_nothing(tmp_path: Path) -> None:
    everything = TrackConfig(tensorboard=True, wandb="p", trackio="p", mlflow="p")
    for trackers in (
        Trackers(everything, tmp_path / "run", {}, rank=1),
        Trackers(TrackConfig(), tmp_path / "run", {}, rank=0),
    ):
        trackers.log(0, {"loss": 1.0})
        trackers.close()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio", "mlflow"])
@pytest.mark.parametrize("origin", ["missing", "a folder"])
def test_a_missing_package_is_named_before_anything_starts(
    name: str, origin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = None if origin == "missing" else SimpleNamespace(origin=None)
    monkeypatch.setattr("padfree.record.trackers.find_spec", lambda _: spec)
    config = TrackConfig(**{name: True if name == "tensorboard" else "project"})  # type: ignore[arg-type]
    with refused(f"track.{name}"):
        require_trackers(config)
    with pytest.raises(ValueError, match=rf"^track.{name}"):
        Trackers(config, tmp_path / "run", {}, rank=0)
    assert not (tmp_path / "run").exists()
    require_trackers(TrackConfig())


def test_a_tracker_that_fails_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.tensorboard import SummaryWriter

    logged = []

    def add_scalar(self: Any, name: str, value: float, step: int) -> None:
        if step < 2:
            raise OSError("no space\nleft")
        logged.append((name, value, step))

    def close(self: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(SummaryWriter, "add_scalar", add_scalar)
    monkeypatch.setattr(SummaryWriter, "close", close)
    with pytest.warns(PadfreeWarning, match=r"^track.tensorboard: OSError: no space left; the run goes on") as warned:
        log_three(tmp_path / "run", TrackConfig(tensorboard=True))
    assert len(warned) == 1
    assert logged == [("loss", 3.0, 2)]


@pytest.mark.parametrize("content", ["{", "[]", '{"trackio": 3}'])
def test_a_damaged_list_of_names_is_one_line(content: str, tmp_path: Path) -> None:
    (tmp_path / "trackers.json").write_text(content)
    with refused("track"):
        _name_of(tmp_path, "trackio")
