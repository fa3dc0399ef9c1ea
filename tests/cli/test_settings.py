"""`padfree settings`: the reference of settings as a table and as JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from padfree.cli.main import main
from padfree.config.settings_table import setting_entries


def shown(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["settings", *arguments]) == 0
    return capsys.readouterr().out


def found(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    return {entry["name"]: entry for entry in json.loads(shown([*arguments, "--json"], capsys))}


def test_a_table_of_all_settings(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown([], capsys).splitlines()
    assert lines[0].split() == ["setting", "type", "default", "meaning"]
    assert [line.split()[0] for line in lines[1:]] == [entry.name for entry in setting_entries()]
    (line,) = [line for line in lines if line.startswith("run.steps ")]
    assert line.split("  ")[0] == "run.steps"
    assert "int or none" in line
    assert line.endswith("Number of optimizer steps. With the default, none, the run trains until the data ends.")


def test_a_section_a_table_and_one_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert [line.split()[0] for line in shown(["track"], capsys).splitlines()[1:]] == [
        *("track.tensorboard", "track.wandb", "track.trackio", "track.mlflow")
    ]
    assert list(found(["loss.clip"], capsys)) == ["loss.clip.low", "loss.clip.high", "loss.clip.dual"]
    assert list(found(["loss.kind"], capsys)) == ["loss.kind"]
    assert "rollout.launch.devices" in found(["rollout"], capsys)


def test_json_has_everything(capsys: pytest.CaptureFixture[str]) -> None:
    entries = found([], capsys)
    assert entries["rollout.samples_per_prompt"] == {
        "name": "rollout.samples_per_prompt",
        "type": "int",
        "choices": [],
        "required": False,
        "default": 8,
        "bounds": "1 or more",
        "needs": [],
        "meaning": "Number of responses per prompt, i.e. the size of a group.",
        "resume": "must stay",
        "formerly": "group",
    }
    assert entries["batch.max_tokens"]["required"] is True
    assert entries["parallel.compile"]["choices"] == ["auto", "none", "inductor", "aot_eager"]
    assert entries["parallel.compile"]["type"] == "auto, none, inductor, aot_eager or bool"
    assert entries["rollout.oversample"]["needs"] == ["rollout.filter=equal"]
    assert entries["eval.samples_per_prompt"]["needs"][0] == "eval.greedy=false"
    assert entries["optimizer.betas"]["default"] == [0.9, 0.95]
    assert entries["data.sources.N.weight"]["bounds"] == "more than 0, at most 1000"


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("rolout", "rollout"),
        ("loss.clip.hi", "loss.clip.high"),
        ("rollout.group", "rollout.samples_per_prompt"),
        ("betas", "optimizer.betas"),
    ],
)
def test_an_unknown_name_is_refused_with_a_suggestion(
    name: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["settings", name]) == 1
    error = capsys.readouterr().err
    assert f"settings: {name!r} is neither a setting nor a section; did you mean {meant}?" in error


def test_a_name_that_is_like_nothing_lists_the_sections(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["settings", "xyzzy"]) == 1
    assert "one of the sections model, data, batch, " in capsys.readouterr().err


def test_it_needs_no_torch() -> None:
    program = "import sys; from padfree.cli.main import main; main(['settings']); assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, check=False).returncode == 0
