"""Outputs that cannot be written are refused before the work, and the checks change nothing."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest

from padfree.config.output_sections import check_folder, check_output


def test_what_can_be_written_is_left_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    check_output(file, "--json")
    check_output(tmp_path / "new" / "page.html", "--html", makes_folder=True)
    check_folder(tmp_path / "runs" / "first", "run.folder")
    assert list(tmp_path.iterdir()) == []
    file.write_text("before")
    os.utime(file, (1, 1))
    check_output(file, "--json")
    check_folder(tmp_path, "run.folder")
    assert (file.read_text(), file.stat().st_mtime) == ("before", 1)
    assert list(tmp_path.iterdir()) == [file]


def refused(path: Path, *, folder: bool = False, makes_folder: bool = False) -> str:
    check = partial(check_output, path, "--json", makes_folder=makes_folder)
    with pytest.raises(ValueError) as caught:
        (partial(check_folder, path, "run.folder") if folder else check)()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_is_in_the_way_is_named(tmp_path: Path) -> None:
    file = tmp_path / "a file"
    file.write_text("x")
    assert refused(tmp_path) == f"--json: {tmp_path} is a folder; give the name of a file"
    assert refused(tmp_path / "no" / "r.json") == f"--json: {tmp_path / 'no'} is not a folder; create it first"
    assert refused(file / "r.json") == f"--json: {file} is not a folder; give a file in a folder"
    assert "is a file; give another folder" in refused(file / "deep" / "r.json", makes_folder=True)
    assert refused(file, folder=True) == f"run.folder: {file} cannot be created: {file} is a file; give another folder"
    assert (
        refused(file / "run", folder=True)
        == f"run.folder: {file / 'run'} cannot be created: {file} is a file; give another folder"
    )


def test_a_disk_that_refuses_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(*arguments: object, **options: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("padfree.config.output_sections.tempfile.TemporaryFile", read_only)
    assert "r.json cannot be written (Read-only file system); give another file" in refused(tmp_path / "r.json")
    assert "run cannot be written (Read-only file system); give another folder" in refused(
        tmp_path / "run", folder=True
    )
    (tmp_path / "old.json").write_text("x")
    monkeypatch.setattr(Path, "open", read_only)
    assert "old.json cannot be written (Read-only file system)" in refused(tmp_path / "old.json")
