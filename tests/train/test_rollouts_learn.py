"""A random model learns a task from rewards alone; bench/rollout.py runs all three seeds."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.mark.slow
def test_the_reward_rises(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    task = importlib.import_module("rollout")
    task.write_task(tmp_path, 1)
    rewards = task.rewards_of(task.task_config(tmp_path, seed=1))
    assert len(rewards) == task.STEPS
    assert rewards[0] < task.START
    assert sum(rewards[-5:]) / 5 > task.END
