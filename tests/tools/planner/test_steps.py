"""Steps computed from lengths are the steps of a run: same samples, same order."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from padfree.sample import Sample
from padfree.tools.planner.steps import read_lengths, rollout_steps, sft_steps
from padfree.train.batcher import make_batcher
from tests.tools.planner.cases import config_of, log_normal


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("batch", [{"samples": 8}, {"samples": None, "tokens": 700, "buffer": 16}])
def test_sft_steps_are_those_of_the_batcher(batch: dict[str, int | None], shuffle: bool) -> None:
    lengths = log_normal(101, 400)
    config = config_of(batch=batch, data={"shuffle": shuffle}, run={"seed": 3})
    samples = [Sample(tokens=np.zeros(n, np.int64)) for n in lengths]
    expected = [[len(sample) for (sample,) in groups] for groups in make_batcher(config, samples)]
    found = sft_steps(lengths, config)
    assert [step.tolist() for step in found.steps] == expected
    assert found.lengths is lengths


def test_a_sample_longer_than_the_token_budget_is_a_step_of_its_own() -> None:
    found = sft_steps(np.array([3, 50, 4]), config_of(batch={"samples": None, "tokens": 10}, data={"shuffle": False}))
    assert [step.tolist() for step in found.steps] == [[3, 4], [50]]
    assert found.over_budget == 1


def test_rollout_steps_keep_groups_and_follow_passes_and_mini_batches() -> None:
    lengths = [3, 4, 5, 6, 7, 8, 9, 10]
    samples = [Sample(tokens=[0] * n, group=place // 2, reward=0.0) for place, n in enumerate(lengths)]
    once = config_of(loss={"kind": "clip"}, batch={"samples": 5}, data={"shuffle": False})
    assert [step.tolist() for step in rollout_steps(samples, once).steps] == [[3, 4, 5, 6], [7, 8, 9, 10]]
    parts = config_of(
        loss={"kind": "clip", "epochs": 2, "mini_batches": 2}, batch={"samples": 4}, data={"shuffle": False}
    )
    steps = rollout_steps(samples, parts).steps
    assert [len(step) for step in steps] == [2] * 8
    for first in range(0, 8, 2):
        both = sorted(np.concatenate(steps[first : first + 2]).tolist())
        assert both == ([3, 4, 5, 6] if first < 4 else [7, 8, 9, 10])


def test_lengths_from_npy_and_from_text(tmp_path: Path) -> None:
    np.save(tmp_path / "lengths.npy", np.array([5, 3], np.uint16))
    (tmp_path / "lengths.txt").write_text("5\n3\n")
    for name in ("lengths.npy", "lengths.txt"):
        found = read_lengths(tmp_path / name)
        assert found.dtype == np.int64
        assert found.tolist() == [5, 3]


def test_files_that_hold_no_lengths(tmp_path: Path) -> None:
    np.save(tmp_path / "float.npy", np.array([1.5]))
    np.save(tmp_path / "zero.npy", np.array([4, 0]))
    np.save(tmp_path / "empty.npy", np.array([], np.int64))
    (tmp_path / "broken.npy").write_text("no array")
    (tmp_path / "words.txt").write_text("one two")
    for name, message in (
        ("nowhere.npy", "--lengths: .*nowhere.npy cannot be read"),
        ("float.npy", "float64 array of shape"),
        ("zero.npy", "the length 0; give lengths of 1 or more"),
        ("empty.npy", "give a one-dimensional array of integers"),
        ("broken.npy", "does not hold integers"),
        ("words.txt", "does not hold integers"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            read_lengths(tmp_path / name)
        assert "\n" not in str(error.value)
