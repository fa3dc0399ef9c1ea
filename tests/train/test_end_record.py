"""`checkpoint.every=none`: a run writes no checkpoint unless a signal asks for one, and its end is still known."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from padfree.cli.main import STOPPED, main
from padfree.train.engine import Engine
from tests.cli.test_train import contents
from tests.train.test_faults import before_step, write_recipe

NONE = "checkpoint.every=none"


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("PADFREE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(Engine, "begin", Engine.begin)  # `before_step` replaces it
    return ["sft", str(write_recipe(tmp_path)), NONE, "run.steps=3"]


def checkpoints(run: Path) -> list[str]:
    return sorted(path.name for path in run.glob("checkpoints/step-*"))


def steps(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_finished_run_has_its_export_and_no_checkpoint(
    recipe: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main(recipe) == 0
    assert checkpoints(run) == []
    assert (run / "model" / "model.safetensors").exists()
    before = contents(run)
    capsys.readouterr()
    for words in (recipe, [*recipe, "optimizer.lr=1e-5"], [*recipe, "run.steps=2"]):
        assert main(words) == 0
        assert capsys.readouterr().out == (
            f"{run} is finished: all 3 steps were done before, and nothing was changed; to train more, give another "
            "run.folder, because this one has no checkpoint to continue from\n"
        )
    # It cannot be continued.
    refusal = (
        f"the run in {run} ended after 3 steps and wrote no checkpoint to continue from (checkpoint.every was none)"
    )
    fix = f"give another run.folder and model.path={run / 'model'}, or start over with checkpoint.resume=false\n"
    for words in ([*recipe, "run.steps=5"], [*recipe, "run.steps=5", "--dry-run"]):
        assert main(words) == 1
        assert capsys.readouterr().err == f"padfree sft: run.steps: 5, but {refusal}; {fix}"
    assert main([*recipe, "data.max_length=5", "data.overlong=truncate"]) == 1
    assert capsys.readouterr().err.startswith(f"padfree sft: run.folder: {refusal}, but settings or data have changed")
    assert contents(run) == before
    assert main([*recipe, "run.steps=5", "checkpoint.resume=false"]) == 0
    assert steps(run) == [0, 1, 2, 3, 4]
    assert main([*recipe, "run.steps=5"]) == 0
    assert "all 5 steps were done before" in capsys.readouterr().out


def test_the_end_of_the_data_is_known(recipe: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = [*recipe, "run.steps=none", "data.epochs=1"]
    assert main(recipe) == 0
    assert main(recipe) == 0
    assert "all 4 steps were done before" in capsys.readouterr().out
    assert checkpoints(tmp_path / "run") == []


def test_a_signal_asks_for_a_checkpoint(recipe: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    before_step(1, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert main(recipe) == STOPPED
    assert checkpoints(run) == ["step-00000002"]
    assert not (run / "end.json").exists()
    assert main(recipe) == 0
    assert steps(run) == [0, 1, 2]
    assert checkpoints(run) == ["step-00000002"], "none at the end"
    capsys.readouterr()
    before = contents(run)
    assert main(recipe) == 0
    assert "all 3 steps were done before" in (said := capsys.readouterr().out)
    assert "raise run.steps" in said, "the checkpoint of the signal is there"
    assert contents(run) == before
    assert main([*recipe, "run.steps=4"]) == 0
    assert steps(run) == [0, 1, 2, 3]


def test_a_run_that_was_killed_before_its_export_starts_again(
    recipe: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("padfree.train.run.export", killed)
        assert main(recipe) == 1
    run = tmp_path / "run"
    assert (run / "end.json").exists()
    assert main(recipe) == 0
    assert steps(run) == [0, 1, 2]
    assert (run / "model" / "model.safetensors").exists()


def test_the_best_checkpoint_is_written(recipe: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    recipe = [*recipe, f"eval.path={tmp_path / 'sft.jsonl'}", "eval.every=1", "checkpoint.best=eval/loss"]
    recipe += ["checkpoint.better=highest", "optimizer.lr=1e-2"]  # the first evaluation is the best
    assert main(recipe) == 0
    assert checkpoints(run) == ["step-00000001"]
    assert (run / "model-best" / "model.safetensors").exists()
    before = contents(run)
    assert main(recipe) == 0
    assert "all 3 steps were done before" in capsys.readouterr().out
    assert contents(run) == before
