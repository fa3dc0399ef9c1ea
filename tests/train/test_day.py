"""A chat template that writes the date: the day is part of the data, and a resumed run keeps its day."""

from __future__ import annotations

import datetime
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from padfree.checkpoint.checkpointer import latest_in
from padfree.checkpoint.manifest import read_manifest
from padfree.cli.main import main
from padfree.config import Config
from padfree.data import SFTDataSettings, load_pairs, load_sft
from padfree.data.store import read_metadata
from padfree.testing.models import save_with_tokenizer
from padfree.testing.tokenizers import tiny_tokenizer
from padfree.train.preflight import preflight
from padfree.train.resume import KEY
from padfree.train.run import train
from tests.refused import refused
from tests.train.test_train import make_config, write_lines

MONDAY, TUESDAY = datetime.date(2024, 5, 6), datetime.date(2024, 5, 7)
BODY = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TEMPLATES = {
    "plain": "{{ strftime_now('%d %b %Y') }}\n" + BODY,
    "weekday": "{%- set now = strftime_now('%A') %}{{ now }}\n" + BODY,
    "if not given": "{% if not date_string is defined %}{% set date_string = strftime_now('%j') %}{% endif %}"
    "{{ date_string }}\n" + BODY,
    "if there is a clock": "{% if strftime_now is defined %}{{ strftime_now('%F') }}{% else %}x{% endif %}\n" + BODY,
}
ROWS = [{"prompt": f"{number}+1", "response": f"{number + 1}"} for number in range(8)]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PADFREE_CACHE", str(tmp_path / "cache"))


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.day = MONDAY
        monkeypatch.setattr("padfree.train.finished.today", lambda: self.day)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def config_of(folder: Path, model: Path, template: str, steps: int = 4, **sections: Any) -> Config:
    data = write_lines(folder / "a.jsonl", ROWS)
    (folder / "template.jinja").write_text(template)
    chat = {"chat_template": str(folder / "template.jinja"), "prompt_format": "chat", "epochs": None}
    config = make_config(
        folder / "run", model, data, data={**chat, **sections.pop("data", {})}, checkpoint={"every": 1}, **sections
    )
    return config if steps == 3 else _with_steps(config, steps)


def _with_steps(config: Config, steps: int) -> Config:
    return replace(config, run=replace(config.run, steps=steps))


def recorded(folder: Path) -> dict[str, Any]:
    newest = latest_in(folder / "run" / "checkpoints")
    assert newest is not None
    found: dict[str, Any] = read_manifest(newest, "remove it")["extra"][KEY]["data"]
    return found


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_run_of_monday_resumes_on_tuesday_with_mondays_date(
    name: str, clock: Clock, model_folder: Path, tmp_path: Path
) -> None:
    first = config_of(tmp_path, model_folder, TEMPLATES[name], steps=2)
    train(first)
    monday = recorded(tmp_path)
    assert monday["day"] == "2024-05-06"
    clock.day = TUESDAY
    notes: list[str] = []
    train(_with_steps(first, 4), on_note=notes.append)
    assert recorded(tmp_path) == monday
    assert any("this run uses 2024-05-06, also after a resume" in note for note in notes)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2, 3]


def test_a_fresh_run_writes_todays_date(clock: Clock, model_folder: Path, tmp_path: Path) -> None:
    for day, folder in ((MONDAY, tmp_path / "one"), (TUESDAY, tmp_path / "two")):
        clock.day = day
        folder.mkdir()
        train(config_of(folder, model_folder, TEMPLATES["plain"], steps=1))
        assert recorded(folder)["day"] == day.isoformat()
    assert recorded(tmp_path / "one")["digest"] != recorded(tmp_path / "two")["digest"]
    # A run with checkpoint.resume=false also takes the current day.
    config = config_of(tmp_path / "one", model_folder, TEMPLATES["plain"], steps=1)
    assert preflight(config, processes=1, device_type="cpu", dry=True).source.day == MONDAY
    anew = replace(config, checkpoint=replace(config.checkpoint, resume=False))
    assert preflight(anew, processes=1, device_type="cpu", dry=True).source.day == TUESDAY


def test_a_template_without_a_date_does_not_know_the_day(clock: Clock, model_folder: Path, tmp_path: Path) -> None:
    config = config_of(tmp_path, model_folder, BODY, steps=1)
    train(config)
    assert "day" not in recorded(tmp_path)
    clock.day = TUESDAY
    train(_with_steps(config, 2))


@pytest.mark.parametrize("command", ["rl", "dpo"])
def test_prompts_and_pairs_have_a_day_as_well(command: str, clock: Clock, model_folder: Path, tmp_path: Path) -> None:
    if command == "rl":
        rows = [{"prompt": f"{number}+1", "answer": "2"} for number in range(8)]
        sections: dict[str, Any] = {
            "loss": {"kind": "clip"},
            "rollout": {"reward": "exact_match", "samples_per_prompt": 2, "max_new_tokens": 4},
        }
    else:
        rows = [{"prompt": f"{number}+1", "chosen": "2", "rejected": "3"} for number in range(8)]
        sections = {
            "loss": {"kind": "dpo"},
            "reference": {"path": str(model_folder)},
            "batch": {"samples": 4, "max_tokens": 256},
        }
    config = config_of(tmp_path, model_folder, TEMPLATES["plain"], steps=1, **sections)
    write_lines(tmp_path / "a.jsonl", rows)
    train(config)
    assert recorded(tmp_path)["day"] == "2024-05-06"
    clock.day = TUESDAY
    again = preflight(_with_steps(config, 2), processes=1, device_type="cpu", dry=True).source
    assert again.day == MONDAY
    train(_with_steps(config, 2))


def test_the_day_is_part_of_the_key_of_the_token_cache(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    path = write_lines(tmp_path / "a.jsonl", ROWS)
    pairs = write_lines(tmp_path / "pairs.jsonl", [{"prompt": "1", "chosen": "2", "rejected": "3"}])

    def loaded(template: str, day: datetime.date, function: Any = load_sft, file: Path = path) -> Any:
        settings = SFTDataSettings(chat_template=template, day=day)
        return function(file, tokenizer, settings, cache=tmp_path / "cache", num_workers=0)

    for template in TEMPLATES.values():
        for function, file in ((load_sft, path), (load_pairs, pairs)):
            monday, tuesday = (loaded(template, day, function, file) for day in (MONDAY, TUESDAY))
            assert monday.folder != tuesday.folder
            assert monday.digest != tuesday.digest
            assert read_metadata(tuesday.folder)["day"] == "2024-05-07"
            assert loaded(template, MONDAY, function, file).folder == monday.folder
    assert loaded(BODY, MONDAY).folder == loaded(BODY, TUESDAY).folder
    given = SFTDataSettings(
        chat_template=TEMPLATES["if not given"], template_arguments={"date_string": "x"}, day=MONDAY
    )
    found = load_sft(path, tokenizer, given, cache=tmp_path / "cache", num_workers=0)
    assert "day" not in read_metadata(found.folder)


def test_how_files_are_read_is_said_by_run_dry_run_and_plan(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"instruction": f"{number}+1", "input": "", "output": "2", "id": number} for number in range(8)]
    path = write_lines(tmp_path / "a.jsonl", rows)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("")
    words = [str(recipe), f"model.path={model_folder}", f"data.path={path}", "batch.samples=4", "batch.max_tokens=64"]
    words += ["run.device=cpu", "run.steps=1", f"run.folder={tmp_path / 'run'}", f"eval.path={path}"]
    line = "a.jsonl is read as Alpaca (instruction, input, output); not used: id; as plain text"
    assert main(["sft", *words, "--dry-run"]) == 0
    assert f"note: data: {line}\n" in capsys.readouterr().out
    assert main(["plan", *words, "--ranks", "1"]) == 0
    assert f"note: data: {line}\n" in capsys.readouterr().err
    assert main(["sft", *words]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"note: data: {line}" in shown
    assert f"note: eval.path: {line}" in shown


def test_token_ids_of_rows_are_checked_against_the_vocabulary(model_folder: Path, tmp_path: Path) -> None:
    rows = [{"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}, {"input_ids": [1, 9999], "labels": [1, 9999]}]
    config = make_config(tmp_path / "run", model_folder, write_lines(tmp_path / "a.jsonl", rows))
    with refused("data.path", r"a\.jsonl:2 has token id 9999, but the model's vocabulary"):
        preflight(config, processes=1, device_type="cpu", dry=True)
    source = {"path": [str(tmp_path / "a.jsonl")], "name": "ids"}
    other = {"path": [str(write_lines(tmp_path / "b.jsonl", ROWS))]}
    mixture = make_config(tmp_path / "run", model_folder, tmp_path, data={"path": [], "sources": [source, other]})
    with pytest.raises(ValueError, match=r"a\.jsonl:2 has token id 9999, but the model's vocabulary"):
        preflight(mixture, processes=1, device_type="cpu", dry=True)


def test_a_pipe_as_a_chat_template_is_refused(model_folder: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jinja")
    config = make_config(
        tmp_path / "run",
        model_folder,
        write_lines(tmp_path / "a.jsonl", ROWS),
        data={"chat_template": str(tmp_path / "pipe.jinja")},
    )
    with refused("data.chat_template", r".*pipe\.jinja is a FIFO, not a file"):
        preflight(config, processes=1, device_type="cpu", dry=True)
