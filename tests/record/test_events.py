"""`events.jsonl` is append-only, whatever an earlier process left in it."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch

import padfree
from padfree.distributed import distributed, make_mesh
from padfree.record.events import Events, environment


def test_lines_are_appended_also_after_half_a_line(tmp_path: Path) -> None:
    folder = tmp_path / "a run"
    Events(folder, rank=0).write("start", step=0, torch="2.13")
    path = folder / "events.jsonl"
    with path.open("a") as file:
        file.write('{"time": "2026')
    again = Events(folder, rank=0)
    again.write("resume", step=3, checkpoint="step-00000003")
    again.write("end", step=5)
    first, half, *rest = path.read_text().splitlines()
    assert half == '{"time": "2026'
    written = [json.loads(line) for line in (first, *rest)]
    assert [(row["kind"], row["step"]) for row in written] == [("start", 0), ("resume", 3), ("end", 5)]
    assert written[0]["torch"] == "2.13"
    assert written[1]["checkpoint"] == "step-00000003"
    for row in written:
        age = datetime.now(UTC) - datetime.fromisoformat(row["time"])
        assert timedelta(seconds=-1) <= age < timedelta(minutes=5)


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    Events(tmp_path / "run", rank=1).write("start", step=0)
    assert not (tmp_path / "run").exists()


def test_a_source_tree_that_is_not_installed_has_a_version_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", missing)
    with distributed(device="cpu") as device:
        assert environment(make_mesh(device))["padfree"] == padfree.__version__


def test_environment_names_versions_device_and_layout(tmp_path: Path) -> None:
    with distributed(device="cpu") as device:
        found = environment(make_mesh(device))
    assert found["torch"] == torch.__version__
    assert found["padfree"] == padfree.__version__
    assert found["device"] == "cpu"
    assert found["processes"] == 1
    assert found["layout"] == "1 replicate x 1 shard x 1 context"
    Events(tmp_path, rank=0).write("start", step=0, **found)
