"""A run locks its folder; a folder that is not padfree's is refused and left unchanged."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from padfree.config import Config
from padfree.model.export import RECORD
from padfree.record import run_folder
from padfree.record.run_folder import (
    HOLDER,
    LOCK,
    MARKER,
    check_run_folder,
    held_run_folder,
    mark_run_folder,
    read_identity,
)
from padfree.testing.models import save_with_tokenizer
from padfree.train.run import train
from tests.ranks import PRELOAD, run_ranks
from tests.train.trainer_cases import make_config


def written(folder: Path, name: str, text: str = "precious") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def config_of(folder: Path, model: Path | str = "nowhere", **sections: Any) -> Config:
    return make_config(folder, Path(model), batch={"samples": 4, "max_tokens": 64}, **sections)


def test_a_new_or_an_empty_folder_is_marked_and_taken_again(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    written(tmp_path / "logged", "slurm-17.out")
    for name in ("new/below", "empty", "logged"):
        config = config_of(tmp_path / name)
        check_run_folder(config)
        first = mark_run_folder(config)
        assert json.loads((tmp_path / name / MARKER).read_text())["made_by"] == "padfree"
        written(tmp_path / name, "notes.txt")  # a foreign file that the run does not touch
        assert mark_run_folder(config) == first == read_identity(tmp_path / name)
    runs = {read_identity(tmp_path / name).run for name in ("new/below", "empty", "logged")}
    assert len(runs) == 3


def foreign_metrics(folder: Path) -> Config:
    written(folder, "run/metrics.jsonl", '{"accuracy": 0.5}\n')
    return config_of(folder / "run")


def foreign_marker(folder: Path) -> Config:
    written(folder, "run/run.json", '{"run": 7}')
    return config_of(folder / "run")


def model_folder(folder: Path) -> Config:
    return config_of(save_with_tokenizer(folder / "m"), folder / "m")


def above_the_model(folder: Path) -> Config:
    return config_of(folder, save_with_tokenizer(folder / "model"))


def other_model_folder(folder: Path) -> Config:
    return config_of(save_with_tokenizer(folder / "m"))


def data_folder(folder: Path) -> Config:
    path = written(folder, "data/train.jsonl", '{"prompt": "1", "response": "2"}\n')
    return config_of(folder / "data", data={"path": [str(path)]})


def inside_the_data(folder: Path) -> Config:
    written(folder, "data/train.jsonl")
    return config_of(folder / "data" / "run", data={"path": [str(folder / "data")]})


def own_export_as_the_model(folder: Path) -> Config:
    mark_run_folder(config_of(folder))
    return config_of(folder, save_with_tokenizer(folder / "model"))


def model_in_the_way_of_the_export(folder: Path) -> Config:
    mark_run_folder(config_of(folder / "run"))
    save_with_tokenizer(folder / "run" / "model")
    return config_of(folder / "run")


def model_in_the_way_of_the_critic(folder: Path) -> Config:
    config = config_of(folder / "run", loss={"kind": "clip", "advantage": "gae"})
    mark_run_folder(config)
    save_with_tokenizer(folder / "run" / "critic")
    return config


def file_instead(folder: Path) -> Config:
    return config_of(written(folder, "run"))


FOREIGN: list[tuple[Callable[[Path], Config], str]] = [
    (
        foreign_metrics,
        r"contains metrics\.jsonl but no run\.json, so it is not a run folder of padfree; give a new or an",
    ),
    (foreign_marker, r"run\.json was not written by padfree; give a new or an empty folder"),
    (model_folder, r"m contains an input of the run: model\.path \(.*m\); give a new or an empty folder"),
    (above_the_model, r"contains an input of the run: model\.path \(.*model\); give a new"),
    (other_model_folder, r"contains config\.json but no run\.json"),
    (data_folder, r"data contains an input of the run: data\.path \(.*train\.jsonl\); give a new"),
    (inside_the_data, r"is inside data\.path \(.*data\), whose files are all read as data; give a folder outside"),
    (own_export_as_the_model, r"contains an input of the run: model\.path \(.*model\); give a new"),
    (
        model_in_the_way_of_the_export,
        r"the exported trained model would be written to .*run/model, but this folder .*; move",
    ),
    (
        model_in_the_way_of_the_critic,
        r"the exported critic would be written to .*run/critic, but this folder .*; move",
    ),
    (file_instead, r"run is a file; give a new or an empty folder"),
]


@pytest.mark.parametrize(("make", "message"), FOREIGN, ids=[make.__name__ for make, _ in FOREIGN])
def test_somebodys_folder_is_refused_and_left_as_it_is(
    make: Callable[[Path], Config], message: str, tmp_path: Path
) -> None:
    config = make(tmp_path)
    before = content(tmp_path)
    for refused in (check_run_folder, mark_run_folder, train):
        with pytest.raises(ValueError, match=rf"^run\.folder: .*{message}"):
            refused(config)
    assert content(tmp_path) == before


def test_an_export_that_is_not_asked_for_is_in_nobodys_way(tmp_path: Path) -> None:
    config = model_in_the_way_of_the_export(tmp_path)
    check_run_folder(config_of(tmp_path / "run", checkpoint={"export": False}))
    (tmp_path / "run" / "model" / RECORD).write_text(
        json.dumps({"made_by": "padfree", "files": [path.name for path in (tmp_path / "run" / "model").iterdir()]})
    )
    check_run_folder(config)


def test_a_run_from_before_the_marker_is_known_by_its_settings(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    written(tmp_path, "config.json", json.dumps(config.to_dict()))
    written(tmp_path, "metrics.jsonl", '{"step": 0, "loss": 1.0}\n')
    written(tmp_path, "checkpoints/latest", "step-00000001")
    check_run_folder(config)
    mark_run_folder(config)
    assert read_identity(tmp_path).made_by == "padfree"
    save_with_tokenizer(tmp_path / "model")
    with pytest.raises(ValueError, match=r"is not an earlier export of padfree .*; move this folder away"):
        check_run_folder(config)


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(tmp_path / "run")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", str(tmp_path / "run" / MARKER))

    with monkeypatch.context() as patch:
        patch.setattr(run_folder, "write_json", full)
        with pytest.raises(
            ValueError, match=r"^run\.folder: .*run\.json cannot be written \(No space left on device\); fr"
        ):
            mark_run_folder(config)
    with pytest.raises(ValueError, match=r"^run\.folder: /proc/.* cannot be written \(.*\); give another"):
        train(config_of(Path("/proc/padfree-run")))


# Two runs


def hold(folder: str, said: Connection) -> None:
    """Lock the folder and hold it, or print the error."""
    try:
        with held_run_folder(config_of(Path(folder))):
            said.send("held")
            time.sleep(60)
    except ValueError as error:
        said.send(str(error))


def test_one_of_several_processes_has_the_folder_and_a_killed_one_leaves_it(tmp_path: Path) -> None:
    """Processes without torchrun, as with `srun -n 3`: one runs, the others name it in their error."""
    folder = tmp_path / "run"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    pipes = [context.Pipe(duplex=False) for _ in range(3)]
    started = [context.Process(target=hold, args=(str(folder), ours), daemon=True) for _, ours in pipes]
    try:
        for process in started:
            process.start()
        said = {process.pid: theirs.recv() for process, (theirs, _) in zip(started, pipes, strict=True)}
        (holder,) = [pid for pid, line in said.items() if line == "held"]
        assert holder is not None
        who = rf"process {holder} on {socket.gethostname()} since "
        refused = [line for line in said.values() if line != "held"]
        assert len(refused) == 2
        assert all(line.startswith(f"run.folder: {folder} is in use by {who}") for line in refused)
        assert all("; wait until that run ends, or give another folder" in line for line in refused)
        os.kill(holder, signal.SIGKILL)
    finally:
        for process in started:
            process.kill()
            process.join()
    assert json.loads((folder / HOLDER).read_text())["pid"] == holder, "a killed process does not clean up"
    begin = time.monotonic()
    with held_run_folder(config_of(folder)):
        assert time.monotonic() - begin < 5
        assert json.loads((folder / HOLDER).read_text())["pid"] == os.getpid()
        with (
            pytest.raises(ValueError, match=rf"in use by process {os.getpid()} on "),
            held_run_folder(config_of(folder)),
        ):
            pass
    assert not (folder / HOLDER).exists()


def test_two_runs_of_the_same_command_do_not_mix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second run that starts during the first step of the first one is refused; the first continues."""
    monkeypatch.setenv("PADFREE_CACHE", str(tmp_path / "cache"))
    data = written(tmp_path, "sft.jsonl", "".join(f'{{"prompt": "{a}+1=", "response": "{a + 1}"}}\n' for a in range(8)))
    model = save_with_tokenizer(tmp_path / "model")
    config = config_of(tmp_path / "run", model, data={"path": [str(data)]}, run={"steps": 3})
    refused: list[str] = []

    def again(metrics: Any) -> None:
        with pytest.raises(ValueError) as caught:
            train(config)
        refused.append(str(caught.value))

    assert train(config, on_step=again).step == 3
    assert len(refused) == 3
    assert all(f"is in use by process {os.getpid()} on " in message for message in refused)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2]


def test_a_file_system_without_locks_goes_by_the_holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, host = config_of(tmp_path), socket.gethostname()

    def without(self: FileLock, *_: object, **__: object) -> None:
        raise NotImplementedError("FileSystem does not appear to support flock")

    monkeypatch.setattr(FileLock, "acquire", without)
    with held_run_folder(config):
        assert (tmp_path / HOLDER).exists()
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    for pid, where, refused in ((1, host, True), (1, "elsewhere", True), (int(dead.stdout), host, False)):
        (tmp_path / HOLDER).write_text(json.dumps({"pid": pid, "host": where, "since": "2026-01-01"}))
        if refused:
            with (
                pytest.raises(ValueError, match=rf"in use by process 1 on {where} since .*; .* remove .*{HOLDER}"),
                held_run_folder(config),
            ):
                pass
        else:
            with held_run_folder(config):
                pass


def ranks(rank: int, world: int, folder: str, foreign: str) -> list[str]:
    said = []
    with held_run_folder(config_of(Path(folder))) as identity:
        said.append(identity.run)
    for refused in (foreign, folder):
        lock = FileLock(Path(folder) / LOCK)
        if rank == 0:
            lock.acquire()
        with pytest.raises(ValueError) as caught, held_run_folder(config_of(Path(refused))):
            pass
        lock.release()
        said.append(str(caught.value))
    return said


def test_ranks_share_the_run_and_a_refusal(tmp_path: Path) -> None:
    """Rank 0 locks the folder; all ranks raise its error."""
    written(tmp_path, "foreign/notes.txt")
    found = run_ranks(2, ranks, str(tmp_path / "run"), str(tmp_path / "foreign"))
    assert found[0] == found[1]
    assert found[0][0] == read_identity(tmp_path / "run").run
    assert "foreign contains notes.txt but no run.json" in found[0][1]
    assert "is in use by another process; wait until that run ends" in found[0][2]
