"""The state of a run, from before its first step to its end."""

from __future__ import annotations

import fcntl
import json
import socket
from pathlib import Path

import pytest
from filelock import FileLock

from padfree.tools.report.runs import read_run
from padfree.tools.report.state import is_held
from tests.tools.report.run_folders import write_lines, write_sft_run


def state_of(folder: Path) -> str:
    return read_run(folder, "a").state


def begun(folder: Path) -> Path:
    """A run folder before its first step."""
    folder.mkdir()
    for name in ("run.json", "run.lock"):
        (folder / name).write_text("{}")
    return folder


def hold(folder: Path, host: str) -> None:
    (folder / "run.holder.json").write_text(json.dumps({"pid": 1, "host": host, "since": "now"}))


def test_a_run_that_has_just_begun(tmp_path: Path) -> None:
    folder = begun(tmp_path / "a")
    with FileLock(folder / "run.lock"):
        run = read_run(folder, "a")
        assert run.state == "starting"
        assert run.notes == []
        assert run.num_steps == 0
    assert state_of(folder) == "ended before its first step"


def test_a_run_that_runs_and_one_that_was_killed(tmp_path: Path) -> None:
    folder = write_sft_run(begun(tmp_path / "a"), 3)
    write_lines(folder / "events.jsonl", [{"kind": "start", "step": 0}])
    hold(folder, socket.gethostname())
    with FileLock(folder / "run.lock"):
        assert state_of(folder) == "running"
        assert is_held(folder)
    assert state_of(folder) == "killed: it stopped without recording an end"
    hold(folder, "another-machine")
    assert is_held(folder) is None
    assert state_of(folder) == "unknown: it is running on another machine, or was killed"


def test_a_run_that_has_ended(tmp_path: Path) -> None:
    folder = write_sft_run(begun(tmp_path / "a"), 3)
    for events, state in (
        ([("start", {}), ("end", {})], "finished"),
        ([("start", {}), ("stop", {})], "stopped by a signal"),
        ([("start", {}), ("failed", {"error": "data.path: gone"})], "failed: data.path: gone"),
        ([("start", {}), ("failed", {})], "failed"),
        ([("start", {}), ("failed", {"error": "x" * 9999})], f"failed: {'x' * 300}"),
        (
            [("start", {}), ("nonfinite", {}), ("failed", {"error": "loss"})],
            "stopped: the loss or a gradient was not finite",
        ),
        ([("start", {}), ("failed", {}), ("start", {}), ("end", {})], "finished"),
    ):
        write_lines(folder / "events.jsonl", [{"kind": kind, "step": 0, **more} for kind, more in events])
        assert state_of(folder) == state
    with FileLock(folder / "run.lock"):
        assert state_of(folder) == "exporting its model after the last step"


def test_looking_does_not_hold_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = begun(tmp_path / "a")
    assert is_held(folder) is False
    with FileLock(folder / "run.lock", timeout=0):
        pass

    def no_locks(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert is_held(folder) is None
