"""A run that starts over with `checkpoint.resume=false`, and is killed, never continues the earlier run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from padfree.cli.main import main
from padfree.train.engine import Engine
from tests.train.test_faults import before_step, write_recipe

ANEW = "checkpoint.resume=false"
FIRST, SECOND = ["optimizer.lr=1e-2", "run.steps=6"], ["optimizer.lr=1e-3", "run.steps=7"]


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("PADFREE_CACHE", str(tmp_path / "cache"))
    return ["sft", str(write_recipe(tmp_path))]


def losses(run: Path) -> dict[int, float]:
    lines: list[dict[str, Any]] = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines}


@pytest.mark.parametrize("every", ["checkpoint.every=2", "checkpoint.every=none"])
@pytest.mark.parametrize("killed_before", [0, 3])
def test_the_earlier_run_is_out_of_reach(
    killed_before: int, every: str, recipe: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed() -> None:
        raise KeyboardInterrupt

    run, fresh = tmp_path / "run", tmp_path / "fresh"
    assert main([*recipe, *FIRST, every]) == 0
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "begin", Engine.begin)  # `before_step` replaces it
        before_step(killed_before, killed)
        assert main([*recipe, *SECOND, every, ANEW]) == 1
    assert not (run / "model").exists()
    assert losses(run / "replaced").keys() == set(range(6))
    assert (run / "replaced" / "model" / "model.safetensors").exists()
    assert main([*recipe, *SECOND, every]) == 0
    assert main([*recipe, *SECOND, every, f"run.folder={fresh}"]) == 0
    assert losses(run) == losses(fresh)
    assert sorted(path.name for path in run.iterdir()) == sorted(path.name for path in fresh.iterdir())
    for name in ("model/model.safetensors", *(("checkpoints/latest",) if every[-1] == "2" else ())):
        assert (run / name).read_bytes() == (fresh / name).read_bytes()


def test_a_run_killed_at_its_very_end_leaves_no_earlier_run(
    recipe: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(_: object) -> None:
        raise KeyboardInterrupt

    assert main([*recipe, *FIRST]) == 0
    with monkeypatch.context() as patch:
        patch.setattr("padfree.train.run.remove_replaced", killed)
        assert main([*recipe, *SECOND, ANEW]) == 1
    assert (tmp_path / "run" / "replaced").exists()
    assert main([*recipe, *SECOND]) == 0
    assert not (tmp_path / "run" / "replaced").exists()
    assert losses(tmp_path / "run").keys() == set(range(7))
