"""Runs with `checkpoint.asynchronous=auto`: what they record, and how they resume."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from padfree.checkpoint import checkpointer as checkpoint
from padfree.checkpoint.checkpoint_files import write_safetensors
from padfree.config import Config
from padfree.distributed import Mesh
from tests.checkpoint.gpu_hosts import as_on_a_gpu
from tests.train.cases import alone as alone_mesh
from tests.train.processes import alone, ended, forked
from tests.train.trainer_cases import SFT, lines, make_config, make_trainer, save_config


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return alone_mesh()


def config_of(folder: Path, name: str, **checkpoint: Any) -> Config:
    return make_config(folder / name, save_config(folder / "model"), **SFT, checkpoint={"every": 2, **checkpoint})


def choices(folder: Path) -> list[tuple[int, str, str]]:
    """(step, value, reason) of each recorded choice of `checkpoint.asynchronous`."""
    name = "checkpoint.asynchronous"
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [(event["step"], event[name], event[f"{name} because"]) for event in events if name in event]


def files(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted((folder / "checkpoints").glob("step*/rank*"))]


def test_a_run_records_the_choice_once_and_resumes_to_the_bit(
    mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_trainer(config_of(tmp_path, "sync", asynchronous=False), mesh).run()
    assert choices(tmp_path / "sync") == []

    as_on_a_gpu(monkeypatch, free=1e9)
    threads: list[str] = []

    def write(*args: Any) -> tuple[int, str]:
        threads.append(threading.current_thread().name)
        return write_safetensors(*args)

    monkeypatch.setattr(checkpoint, "write_safetensors", write)
    notes: list[str] = []
    make_trainer(config_of(tmp_path, "auto"), mesh, on_note=notes.append).run()
    assert threads == ["checkpoint", "checkpoint", "MainThread"], "no update follows the last checkpoint"
    ((step, value, reason),) = choices(tmp_path / "auto")
    assert (step, value) == (2, "true")
    assert notes == [f"checkpoint.asynchronous=true: {reason}"]
    assert reason.startswith("the copy of a checkpoint needs 0.")
    assert lines(tmp_path / "auto") == lines(tmp_path / "sync")
    found, expected = files(tmp_path / "auto"), files(tmp_path / "sync")
    assert found == expected
    assert len(found) == 2

    # Resume with less memory: the choice changes, the result does not.
    resumed = tmp_path / "auto"
    (resumed / "checkpoints" / "latest").write_text("step-00000004")
    for path in (resumed / "checkpoints" / "step-00000006").iterdir():
        path.unlink()
    (resumed / "checkpoints" / "step-00000006").rmdir()
    monkeypatch.setattr(checkpoint, "free_host_memory", lambda: 1e3)
    make_trainer(config_of(tmp_path, "auto", every=1, keep=9), mesh).run()
    assert [each[:2] for each in choices(resumed)] == [(2, "true"), (5, "false")]
    assert threads[3:] == ["MainThread", "MainThread"]
    assert lines(resumed) == lines(tmp_path / "sync")
    assert files(resumed)[-1] == expected[-1]


def test_without_checkpoints_nothing_is_chosen(mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_a_gpu(monkeypatch, free=1e9)
    make_trainer(config_of(tmp_path, "none", every=None), mesh).run()
    assert choices(tmp_path / "none") == []
    assert not (tmp_path / "none" / "checkpoints").exists()


def test_an_error_of_the_background_write_ends_the_run(
    mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_on_a_gpu(monkeypatch, free=1e9)

    def full(*_: Any) -> tuple[int, str]:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_safetensors", full)
    trainer = make_trainer(config_of(tmp_path, "full"), mesh)
    with pytest.raises(checkpoint.CheckpointError, match="No space left on device"):
        trainer.run()
    assert trainer.step == 4, "the next save raises it"


def killed_run(config: Config, pipe: int) -> int:
    """A run that is killed in step 5, while a thread writes the checkpoint of step 4."""
    as_on_a_gpu(pytest.MonkeyPatch(), free=1e9)
    writing = threading.Event()

    def write(path: Path, tensors: Any) -> tuple[int, str]:
        if "00000004" in str(path):
            path.write_bytes(b"half")
            writing.set()
            time.sleep(300)
        return write_safetensors(path, tensors)

    def on_step(report: Any) -> None:
        if trainer.step == 5:
            assert writing.wait(60)
            os.kill(os.getpid(), signal.SIGKILL)

    checkpoint.write_safetensors = write  # type: ignore[attr-defined]
    trainer = make_trainer(config, alone_mesh(), on_step=on_step)
    trainer.run()
    return 0


def whole_run(config: Config, pipe: int) -> int:
    as_on_a_gpu(pytest.MonkeyPatch(), free=1e9)
    make_trainer(config, alone_mesh()).run()
    return 0


def kill_and_resume(folder: Path) -> list[Any]:
    output = folder / "output"

    def run(function: Any, name: str) -> int:
        child, read = forked(lambda pipe: function(config_of(folder, name), pipe), output)
        os.close(read)
        return ended(child)

    assert run(whole_run, "whole") == 0, output.read_text()
    assert run(killed_run, "killed") == -signal.SIGKILL, output.read_text()
    left = sorted(path.name for path in (folder / "killed" / "checkpoints").iterdir())
    assert run(whole_run, "killed") == 0, output.read_text()
    return [
        left,
        files(folder / "whole") == files(folder / "killed"),
        lines(folder / "whole") == lines(folder / "killed"),
    ]


def test_a_run_killed_during_a_background_write_resumes_to_the_bit(tmp_path: Path) -> None:
    assert alone(kill_and_resume, tmp_path) == [["latest", "step-00000002", "step-00000004.partial"], True, True]
