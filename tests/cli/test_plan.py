"""`padfree plan`: lines, JSON, HTML page, suggestion, and error messages."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from padfree.cli.main import main
from padfree.testing.models import save_with_tokenizer


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, chat-free SFT rows, rollouts, and lengths."""
    folder = tmp_path_factory.mktemp("plan")
    save_with_tokenizer(folder / "model")
    rows = [{"prompt": f"{a}+{b}=", "response": str(a + b) * (a + 1)} for a in range(6) for b in range(6)]
    (folder / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rollouts = [{**row, "reward": 1.0, "group": group} for group, row in enumerate(rows) for _ in range(2)]
    (folder / "rl.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rollouts))
    np.save(folder / "lengths.npy", np.array([40, 10, 10, 30, 5, 7]))
    return folder


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: Path) -> None:
    monkeypatch.setenv("PADFREE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(files)


def test_help_fits_on_one_screen_and_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["plan", "--help"])
    text = capsys.readouterr().out
    assert end.value.code == 0
    assert len(text.splitlines()) <= 24
    assert "example: padfree plan" in text


def test_data_to_lines_and_a_page(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "new" / "plan.html"
    arguments = ["--data", "sft.jsonl", "--model", "model", "--max-tokens", "32", "--ranks", "4", "--cp", "2"]
    assert main(["plan", *arguments, "--samples", "12", "--layout", "headtail", "--html", str(page)]) == 0
    out, err = capsys.readouterr()
    assert "data        36 samples, " in out
    assert "layout      4 ranks = 2 data x 2 context, headtail" in out
    assert "steps       3 in an epoch, 12.0 samples" in out
    assert "headtail    slowest rank " in out
    assert "memory      about " in out
    assert f"page        {page}" in out
    assert err == "note: data: sft.jsonl is read as prompt and response (prompt, response); as plain text\n"
    assert "<figcaption>Padded relative to packed</figcaption>" in page.read_text()


def test_json_is_all_that_is_printed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = ["--html", str(tmp_path / "plan.html")]
    assert main(["plan", "--lengths", "lengths.npy", "--max-tokens", "32", "--tokens", "50", "--json", *page]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["samples"], found["tokens"], found["overlong"]) == (6, 102, 1)
    assert found["cost"] == 102.0  # no model: a token costs 1
    assert (tmp_path / "plan.html").exists()


def test_rollouts_stay_in_groups(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--data", "rl.jsonl", "--rollouts", "--model", "model", "--max-tokens", "64", "--samples", "5"]
    assert main(["plan", *arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["samples"] == 72
    assert found["samples_per_step"] == 4.0  # two groups of two, a third does not fit


def test_a_recipe_flags_and_overrides(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        'model.path = "model"\ndata.path = ["sft.jsonl"]\nbatch.samples = 6\nbatch.max_tokens = 64\nrun.folder = "runs"'
    )
    assert main(["plan", str(recipe), "batch.samples=9", "--max-tokens", "48", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["steps"], found["max_tokens"]) == (4, 48)
    assert not Path("runs").exists()
    assert main(["plan", str(recipe), "--tokens", "1000", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 1


def test_overrides_alone_are_enough(capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["model.path=model", 'data.path=["sft.jsonl"]', "batch.tokens=100", "batch.max_tokens=64"]
    assert main(["plan", *overrides, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["max_tokens"] == 64


def test_a_suggestion_is_planned_where_nothing_else_was_said(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--data", "sft.jsonl", "--model", "model", "--gpu", "H100", "--ranks", "2", "--suggest"]
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["suggestion"]["max_tokens"] == found["max_tokens"]
    assert found["suggestion"]["context"] == found["context"] == 1
    assert found["step_seconds"] > 0
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert f"suggestion  batch.max_tokens={found['max_tokens']} parallel.context=1\n" in shown
    assert "  - context 1: the longest sample, 17 tokens, fits on one device" in shown
    assert "assuming 40% of the 989 TFLOP/s of H100" in shown


def test_a_calibration_is_stored_and_used(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # what is measured is tested elsewhere; here a token takes a millisecond
    module = importlib.import_module("padfree.tools.planner.calibrate")
    monkeypatch.setattr(module, "_runner", lambda *arguments: lambda lengths: 1e-3 * sum(lengths))
    assert main(["plan", "--calibrate", "--model", "model"]) == 0
    shown = capsys.readouterr().out
    path = shown.rsplit("batch.cost=", 1)[1].strip()
    assert Path(path).exists()
    assert "measured    on cpu, float32, compile none, checkpointing none, models with 2 layers" in shown
    for more in ([], [f"batch.cost={path}"]):
        assert main(["plan", "--data", "sft.jsonl", "--model", "model", "--max-tokens", "64", "--json", *more]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["step_seconds"] > 0
        assert path in found["cost_from"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "--lengths lengths.npy --data sft.jsonl --max-tokens 8",
            "--lengths: lengths.npy cannot be combined with --data",
        ),
        ("--lengths lengths.npy --max-tokens 8 --layout ring", "parallel.layout: 'ring'; give one of contiguous"),
        ("--calibrate", "--calibrate: needs a model; give --model"),
        ("--calibrate --json --model model", "--json: cannot be combined with --calibrate"),
        ("--lengths lengths.npy --model model --max-tokens 8 --gpu abacus", "--gpu: 'abacus' is not a GPU"),
    ],
)
def test_mistakes_are_one_line(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *arguments.split()]) == 1
    error = capsys.readouterr().err
    assert error.startswith("padfree plan: ")
    assert message in error
    assert error.count("\n") == 1
