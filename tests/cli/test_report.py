"""`padfree report` from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from padfree.cli.main import main


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        lines = [json.dumps({"step": step, "loss": 1 / (step + 1)}) + "\n" for step in range(5)]
        (tmp_path / name / "metrics.jsonl").write_text("".join(lines))
        (tmp_path / name / "config.json").write_text("{}")
    return ["a", "b"]


def test_help_has_an_example_and_fits_on_one_screen(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["report", "--help"])
    text = capsys.readouterr().out
    assert len(text.splitlines()) <= 24
    assert "example: padfree report" in text


def test_one_run_with_defaults(folders: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", folders[0]]) == 0
    assert capsys.readouterr().out == "written to a/report.html\n"
    assert "<h1>Run a</h1>" in Path("a/report.html").read_text()
    assert not Path("report.html").exists()


def test_the_page_of_several_runs_goes_next_to_them(
    folders: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = Path().resolve()
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert main(["report", *(f"../{name}" for name in folders)]) == 0
    assert capsys.readouterr().out == f"written to {place / 'report.html'}\n"
    assert "<h1>2 runs side by side</h1>" in (place / "report.html").read_text()


def test_several_runs_names_and_notes(folders: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    Path("b/config.json").unlink()
    assert main(["report", *folders, "--output", "new/compare.html", "--names", "small, large"]) == 0
    assert capsys.readouterr().out == "note: large: config.json is missing\nwritten to new/compare.html\n"
    text = Path("new/compare.html").read_text()
    assert "<h1>2 runs side by side</h1>" in text
    assert '"name":"small"' in text


def test_mistakes_are_one_line_and_exit_code_1(folders: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        ([*folders, "--names", "one"], "--names: gives 1 names for 2 runs; give one name per run, separated by commas"),
        (["nothing"], "RUN: nothing does not exist; give the run.folder of a run that has started"),
        (
            ["a", "--output", "a/metrics.jsonl"],
            "--output: a/metrics.jsonl is not an HTML file name; give a file name that ends in .html",
        ),
        (
            ["a", "--output", "a/metrics.jsonl/x.html"],
            "--output: a/metrics.jsonl is not a folder; give a file in a folder",
        ),
    ):
        assert main(["report", *arguments]) == 1
        assert capsys.readouterr().err == f"padfree report: {message}\n"
