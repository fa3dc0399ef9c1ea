"""`checkpoint.resume=false` makes the earlier run unreachable at once, and keeps its files until a run has ended."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from padfree.config import CheckpointConfig, RunConfig
from padfree.record.file_names import MARKER, REPLACED
from padfree.record.start_over import EXPORTS, FILES, remove_replaced, resumes, start_over

FOREIGN = ("run.log", "notes.txt", "wandb/run-1/data", "model-mine/weights")


class Killed(BaseException):
    """Raised in place of an operation on the file system, as if the process were killed before it."""


def write(folder: Path, text: str) -> None:
    """Write every file that a run writes, and files of the user."""
    for name in (*FILES, "nonfinite-step-00000003.jsonl", *EXPORTS):
        path = folder / name
        if "." not in name:
            path = path / "content"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for name in EXPORTS:
        (folder / name / "padfree_export.json").write_text('{"made_by": "padfree", "files": ["content"]}')


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def at_operation(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kill the process before the operation `number` that changes the file system."""
    done = 0

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal done
            if done == number:
                raise Killed
            done += 1
            return original(*arguments, **options)

        return call

    for name in ("rename", "mkdir", "unlink", "rmdir"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))


@pytest.mark.parametrize("again", [False, True])
def test_a_kill_at_any_moment(again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, anew, normal = RunConfig(folder=str(tmp_path / "run")), CheckpointConfig(resume=False), CheckpointConfig()
    number, ended = 0, False
    while not ended:
        folder = tmp_path / "run"
        shutil.rmtree(folder, ignore_errors=True)
        write(folder, "new")
        (folder / MARKER).write_text("{}")
        for name in FOREIGN:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text("the user's")
        if again:  # an earlier run has been replaced before, and no run has ended since
            write(folder / REPLACED, "old")
        before = contents(folder)
        with monkeypatch.context() as patched:
            at_operation(number, patched)
            try:
                start_over(run, anew)
                ended = True
            except Killed:
                pass
        if resumes(run, normal) and not ended:
            assert contents(folder) == before
            start_over(run, anew)
        else:
            start_over(run, normal)
        wanted = contents_after(before, again)
        assert contents(folder) == wanted, number
        assert resumes(run, normal)
        number += 1
    assert number > len(FILES)
    remove_replaced(folder)
    assert contents(folder) == {name: text for name, text in wanted.items() if not name.startswith(REPLACED)}


def contents_after(before: dict[str, str], again: bool) -> dict[str, str]:
    users = {name: text for name, text in before.items() if name in (*FOREIGN, MARKER)}
    if again:
        return users | {name: text for name, text in before.items() if name.startswith(REPLACED)}
    return users | {f"{REPLACED}/{name}": text for name, text in before.items() if name not in users}


def test_a_folder_of_the_user_named_model_is_not_moved(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine").write_text("mine")
    start_over(RunConfig(folder=str(tmp_path)), CheckpointConfig(resume=False))
    assert contents(tmp_path) == {"model/mine": "mine"}
