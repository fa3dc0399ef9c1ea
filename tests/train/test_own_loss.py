"""`loss.kind = "module:function"`: a user's copy of `clip` gives a run that is bit-identical to `clip`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from padfree.config import Config
from padfree.distributed import Mesh, make_mesh
from tests.losses.objectives.cases import HERE
from tests.ranks import run_ranks
from tests.train.trainer_cases import RL, lines, make_config, make_trainer, save_config

KINDS = ("clip", f"{HERE}:clip")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_config(tmp_path_factory.mktemp("model"))


def config_of(folder: Path, model_folder: Path, kind: str, **changes: Any) -> Config:
    return make_config(folder, model_folder, **{**RL, "loss": {**RL["loss"], "kind": kind}}, run=changes)


def test_a_copy_of_clip_makes_the_same_run(mesh: Mesh, model_folder: Path, tmp_path: Path) -> None:
    for number, kind in enumerate(KINDS):
        make_trainer(config_of(tmp_path / str(number), model_folder, kind), mesh).run()
    assert lines(tmp_path / "0") == lines(tmp_path / "1")


def test_a_run_may_resume_with_another_kind(mesh: Mesh, model_folder: Path, tmp_path: Path) -> None:
    """Also inside a rollout batch, whose old log-probabilities are saved."""
    make_trainer(config_of(tmp_path / "whole", model_folder, "clip"), mesh).run()
    notes: list[str] = []
    for steps, kind in ((3, KINDS[1]), (6, KINDS[0])):
        config = config_of(tmp_path / "parts", model_folder, kind, steps=steps)
        make_trainer(config, mesh, on_note=notes.append).run()
    assert lines(tmp_path / "parts") == lines(tmp_path / "whole")
    assert [f'loss.kind "clip" (was "{KINDS[1]}")' in note for note in notes] == [True]


def ranks(rank: int, world: int, runs: list[tuple[int, Config]]) -> None:
    for context, config in runs:
        make_trainer(config, make_mesh("cpu", context=context)).run()


def test_a_copy_of_clip_makes_the_same_run_on_two_ranks(model_folder: Path, tmp_path: Path) -> None:
    runs = [
        (context, config_of(tmp_path / f"{context} {number}", model_folder, kind))
        for context in (1, 2)
        for number, kind in enumerate(KINDS)
    ]
    run_ranks(2, ranks, runs)
    for context in (1, 2):
        assert lines(tmp_path / f"{context} 0") == lines(tmp_path / f"{context} 1")
