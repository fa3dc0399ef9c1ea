"""Reading run folders: killed, still running, with invalid values, or not run folders."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest

from padfree.tools.report.runs import read_run, read_runs
from tests.tools.report.run_folders import write_lines, write_rl_run, write_sft_run


def test_all_files_of_a_run(tmp_path: Path) -> None:
    run = read_run(write_rl_run(tmp_path / "a", 30), "a")
    assert run.num_steps == 30
    assert run.metrics["loss"].steps.tolist() == list(range(30))
    written = [json.loads(line)["loss"] for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    assert run.metrics["loss"].values.tolist() == written
    assert "step" not in run.metrics
    assert run.setting("loss", "kind") == "clip"
    assert run.setting("loss", "nothing") is run.setting("nothing", "kind") is None
    assert [event["kind"] for event in run.events] == ["start", "stop", "start", "resume", "nonfinite"]
    assert len(run.rows) == 150
    assert run.nonfinite == [
        {"step": 30, "file": "nonfinite-step-00000030.jsonl", "samples": 2, "uids": ["sample 7", "8"]}
    ]
    assert run.checkpoints == ["step-00000010"]
    assert run.notes == []


@pytest.mark.parametrize("half", ['{"step": 30, "lo', '{"step": 30}\n{"step": 31', "\x00\x00\x00", "[1, 2]", "{"])
def test_half_a_last_line_is_left_out_and_said(tmp_path: Path, half: str) -> None:
    folder = write_sft_run(tmp_path)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(half)
    run = read_run(folder, "a")
    assert run.num_steps == 30 + half.count("\n")
    assert len(run.metrics["loss"].values) == 30
    assert run.notes == ["metrics.jsonl: the last line is incomplete and was skipped"]


def test_a_last_line_that_lacks_only_its_end_counts(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "loss": 1}\n\n{"step": 1, "loss": 2}')
    (tmp_path / "config.json").write_text("{}")
    run = read_run(tmp_path, "a")
    assert run.metrics["loss"].values.tolist() == [1.0, 2.0]
    assert run.notes == []


def test_odd_numbers_are_gaps(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"broken"')
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 0, "loss": NaN, "other": "text", "flag": true}\n'
        '{"step": 1, "loss": -Infinity, "list": [1]}\n'
        '{"step": 2, "loss": null, "rare": 5}\n'
        f'{{"step": 3, "loss": 1{"0" * 400}}}\n'
        '{"step": 4, "loss": 1e999}\n'
        '{"step": 5, "loss": 7}\n'
    )
    run = read_run(tmp_path, "a")
    assert np.isnan(run.metrics["loss"].values[:5]).all()
    assert run.finite("loss").tolist() == [7.0]
    assert run.finite("nothing").tolist() == []
    assert (run.metrics["rare"].steps.tolist(), run.metrics["rare"].values.tolist()) == ([2], [5.0])
    assert set(run.metrics) == {"loss", "rare", "flag"}
    assert run.notes == [
        "loss: 5 of 6 values are not finite and shown as gaps",
        "other: 1 values that are not numbers were skipped",
        "list: 1 values that are not numbers were skipped",
        "config.json cannot be read",
    ]


def test_lines_that_do_not_belong(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "loss": 1}\nnonsense\n{"step": 0, "loss": 0}\n{"loss": 9}\n{"step": -1}\n'
        f'{{"step": {2**70}}}\n{{"step": 1, "loss": 5}}\n{{"step": 2, "loss": 2}}\n'
    )
    run = read_run(tmp_path, "a")
    assert run.metrics["loss"].values.tolist() == [0.0, 5.0, 2.0]
    assert run.notes == [
        "metrics.jsonl: 1 lines that are not JSON objects were skipped; the first is line 2",
        "metrics.jsonl: 3 lines without a step were skipped",
        "metrics.jsonl: 1 lines repeat a step; only the last line of a step is shown",
        "config.json is missing",
    ]


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.json", "events.jsonl", "rows.jsonl"])
def test_nesting_without_an_end_is_left_out_and_said(tmp_path: Path, name: str) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "loss": 1.0}\n')
    (tmp_path / name).write_text('{"a":' * 100_000 + "1" + "}" * 100_000)
    run = read_run(tmp_path, "run")
    assert any(name in note for note in run.notes)


def test_an_empty_file_is_a_run_without_steps(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    run = read_run(tmp_path, "a")
    assert run.num_steps == 0
    assert run.metrics == {}
    assert run.notes == ["config.json is missing"]


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 0, "loss": 1}\n\xff\xfe\n{"step": 1, "loss": 1}\n')
    assert read_run(tmp_path, "a").num_steps == 2


def test_names_are_as_long_as_they_must_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = ["x/run", "y/run", "z", "y/deep/run", "x/deep/run"]
    for place in places:
        write_lines(tmp_path / place / "metrics.jsonl", [{"step": 0}])
    runs = read_runs([tmp_path / place for place in places])
    assert [run.name for run in runs] == ["x/run", "y/run", "z", "y/deep/run", "x/deep/run"]
    monkeypatch.chdir(tmp_path / "z")
    assert read_runs(["."])[0].name == "z"
    assert [run.name for run in read_runs([".", "../x/run"], ["a", "b"])] == ["a", "b"]


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    folder, other = write_sft_run(tmp_path / "a"), write_sft_run(tmp_path / "b")
    for folders, names, message in (
        ([], None, "RUN: is missing; give"),
        ([tmp_path / "nothing"], None, "does not exist; give the run.folder"),
        ([tmp_path], None, "has neither run.json nor metrics.jsonl; give the run.folder"),
        ([folder / "metrics.jsonl"], None, "metrics.jsonl is a file; give the run.folder"),
        ([folder, tmp_path / "b" / ".." / "a"], None, "is given twice; give each run once"),
        ([folder, other], ["one"], "--names: gives 1 names for 2 runs; give one name per run"),
        ([folder, other], ["one", "one"], "--names: 'one,one' has an empty or repeated name; give every run"),
        ([folder], [""], "--names: '' has an empty or repeated name; give every run"),
    ):
        with pytest.raises(ValueError) as caught:
            read_runs(folders, names)
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    folder = write_sft_run(tmp_path / "a")
    write_lines(folder / "rollouts.jsonl", [{"batch": 0}])
    monkeypatch.setattr(Path, "open", refuse)
    (run,) = read_runs([folder])
    assert run.notes[0] == "metrics.jsonl cannot be read (Permission denied)"
    assert "rollouts.jsonl cannot be read (Permission denied)" in run.notes
    assert run.responses is None


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.json", "events.jsonl", "rollouts.jsonl", "evaluation.jsonl"])
def test_a_folder_or_a_pipe_in_the_place_of_a_file_is_left_out_and_said(tmp_path: Path, name: str) -> None:
    for make in (Path.mkdir, os.mkfifo):
        folder = write_sft_run(tmp_path / make.__name__)
        (folder / name).unlink(missing_ok=True)
        make(folder / name)
        assert f"{name} is not a regular file and was skipped" in read_run(folder, "a").notes


def test_nonfinite_files_of_any_name(tmp_path: Path) -> None:
    folder = write_sft_run(tmp_path)
    (folder / "nonfinite-step-later.jsonl").write_text('{"uid": null}\n{"ui')
    run = read_run(folder, "a")
    assert run.nonfinite == [{"step": None, "file": "nonfinite-step-later.jsonl", "samples": 1, "uids": ["None"]}]
    assert run.notes == ["nonfinite-step-later.jsonl: the last line is incomplete and was skipped"]
    assert math.isfinite(run.finite("loss")[0])
