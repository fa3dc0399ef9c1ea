"""`padfree demo --real` with a tiny model: all stages run, and wrong inputs give one-line errors."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from padfree.cli.main import main
from padfree.tools.demo import run_demo
from padfree.tools.demo.real_stages import RealSizes, reward
from padfree.tools.talk.find_model import find_model
from tests.tools.talk.talk_cases import save_model

TINY = RealSizes(held_out=3, samples=2, sft_steps=3, responses=4, group=2, rl_steps=2, max_new_tokens=6, shown=2)


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_demo, "REAL_SIZES", TINY)


def write_rows(path: Path, count: int, prompt: str = "question", response: str = "answer") -> str:
    rows = [{prompt: f"What is {i} plus one?", response: f"{i}+1={i + 1}\n#### {i + 1}"} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.slow
def test_all_stages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, data = str(save_model(tmp_path / "model")), write_rows(tmp_path / "rows.jsonl", 20)
    folder = tmp_path / "demo"
    words = ["demo", "--real", "--model", model, "--data", data, "--folder", str(folder)]
    assert main(words) == 0
    shown = capsys.readouterr().out
    for text in (
        "1/5  training and held-out rows",
        "6 rows for training, 3 held out",
        "> What is 6 plus one?",
        "held-out rows: ",
        "5/5  report",
    ):
        assert text in shown
    found = json.loads((folder / "demo.json").read_text())
    assert found.keys() == {"rows", "before", "tuned", "rewarded", "page"}
    assert find_model(str(folder / "real" / "rl")).weights == str(folder / "real" / "rl" / "model")
    page = (folder / "real" / "report.html").read_text()
    assert "Responses: GRPO" in page
    assert "Problems while reading" not in page
    assert main([*words, "--resume"]) == 0
    assert capsys.readouterr().out.count("already done") == 5
    assert main(["demo", "--folder", str(folder), "--resume"]) == 1
    assert "holds a demo with --real" in capsys.readouterr().err


def test_the_reward_sees_the_form_and_the_number() -> None:
    row = {"answer": "2+2=4\n#### 4"}
    assert [reward(text, row) for text in ("#### 4", "so #### 5", "4", "####")] == [1.0, 0.2, 0.0, 0.0]


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, data = str(save_model(tmp_path / "model")), write_rows(tmp_path / "rows.jsonl", 20)
    few, other = write_rows(tmp_path / "few.jsonl", 3), tmp_path / "other.jsonl"
    other.write_text('{"question": "x", "answer": "no number"}\n')
    odd = tmp_path / "odd.jsonl"
    odd.write_text("[1]\n")
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes(b"\xff\n")
    os.mkfifo(tmp_path / "pipe")
    capsys.readouterr()
    for number, (words, message) in enumerate(
        (
            (["--real"], "--real: names no model; give a folder or a Hub id"),
            (["--real", model], "--data: is missing; give a JSON Lines file"),
            (["--real", model, "--model", model, "--data", data], "give only one of the two"),
            (["--real", str(tmp_path / "gone"), "--data", data], "does not exist"),
            (["--data", data], "add --real, or remove this option"),
            (["--model", model], "add --real, or remove this option"),
            (["--real", model, "--data", few], "has only 3 rows; give more than 3"),
            (["--real", model, "--data", str(other)], "does not end in '#### number'"),
            (
                ["--real", model, "--data", str(odd)],
                "odd.jsonl:1 is not a JSON object whose question and answer are strings",
            ),
            (["--real", model, "--data", str(latin)], "it is not UTF-8 text"),
            (["--real", model, "--data", str(tmp_path)], "is not a file"),
            (["--real", model, "--data", str(tmp_path / "pipe")], "is not a file"),
            (["--real", model, "--data", "none.jsonl"], "cannot be read (No such file or directory)"),
        )
    ):
        assert main(["demo", "--folder", str(tmp_path / f"demo {number}"), *words]) == 1, words
        error = capsys.readouterr().err
        assert message in error
        assert error.startswith("padfree demo: ")
        assert error.count("\n") == 1
