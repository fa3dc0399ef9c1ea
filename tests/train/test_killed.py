"""Runs of several commands, killed with SIGKILL and resumed: bit-identical to uninterrupted runs."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from padfree.checkpoint.checkpointer import latest_in
from padfree.config import Config
from padfree.record.file_names import CHECKPOINTS
from padfree.testing.models import save_with_tokenizer
from padfree.train.run import train
from tests.train.processes import alone, ended, forked
from tests.train.trainer_cases import lines
from tests.train.ways import way_config, write_data

STEPS, KILLED_AT = 4, 3
WAYS = ("dpo", "distill", "reward", "critic")
"""SFT and RL are killed in `test_faults`, runs in the middle of an episode in `test_environment_run`."""


@pytest.mark.slow
def test_killed_runs_resume_to_the_bit(tmp_path: Path) -> None:
    alone(run_and_kill, tmp_path)
    for way in WAYS:
        whole, killed = tmp_path / f"{way} whole", tmp_path / f"{way} killed"
        assert len(lines(whole)) == STEPS
        assert lines(whole) == lines(killed), way
        found = [latest_in(folder / CHECKPOINTS) for folder in (whole, killed)]
        files = [sorted(path.glob("rank-*")) for path in found if path is not None]
        assert len(files[0]) == len(files[1]) == 1
        # Weights and optimizer state of all trained models, including the critic, and the random state.
        assert files[0][0].read_bytes() == files[1][0].read_bytes(), way


def run(config: Config) -> int:
    train(config)
    return 0


def die(config: Config) -> int:
    made = 0

    def on_step(_: Any) -> None:
        nonlocal made
        made += 1
        if made == KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)

    train(config, on_step=on_step)
    return 0


def run_and_kill(folder: Path) -> None:
    def code_of(function: Callable[[Config], int], config: Config, output: Path) -> int:
        child, read = forked(lambda pipe: function(config), output)
        os.close(read)
        return ended(child)

    save_with_tokenizer(folder / "model", num_hidden_layers=1)
    save_with_tokenizer(folder / "teacher", hidden_size=48, num_hidden_layers=1)
    write_data(folder, [(f"{a}+{b}=", f"the sum is {a + b}") for a in range(3) for b in (2, 5)])
    for way in WAYS:
        changes: dict[str, Any] = {"checkpoint": {"every": 1, "export": False}, "run": {"steps": STEPS}}
        whole, killed = (way_config(folder, way, f"{way} {name}", **changes) for name in ("whole", "killed"))
        output = folder / f"{way}.txt"
        assert code_of(run, whole, output) == 0, output.read_text()
        assert code_of(die, killed, output) == -signal.SIGKILL, output.read_text()
        written = (folder / f"{way} killed" / "metrics.jsonl").read_text().splitlines()
        assert 0 < len([json.loads(line) for line in written]) < STEPS
        assert code_of(run, killed, output) == 0, output.read_text()
