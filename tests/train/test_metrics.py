"""What is written of steps and samples."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from train_cases import make_samples

from padfree.data import read_rollouts
from padfree.packing import plan_step
from padfree.train.engine import StepReport
from padfree.train.metrics import MetricsFile, reward_metrics, step_metrics, write_samples


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_a_resumed_file_keeps_whole_lines_of_earlier_steps(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path, rank=0)
    for step in range(5):
        metrics.write({"step": step})
    assert steps(metrics.path) == [0, 1, 2, 3, 4]
    with metrics.path.open("a") as file:
        file.write('{"step":')
    assert steps(MetricsFile(tmp_path, rank=0, step=9).path) == [0, 1, 2, 3, 4]
    assert steps(MetricsFile(tmp_path, rank=0, step=3).path) == [0, 1, 2]
    assert steps(MetricsFile(tmp_path, rank=0).path) == []


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    MetricsFile(tmp_path / "run", rank=1).write({"step": 0})
    assert not (tmp_path / "run").exists()


def test_numbers_of_a_step() -> None:
    report = StepReport(
        loss=2.0,
        gradient_norm=0.5,
        statistics={"nll": 2.5},
        num_samples=3,
        num_tokens=30,
        num_labels=20,
        padding_share=0.25,
        plan=plan_step([10, 10, 10], ranks=1, max_tokens=20),
    )
    found = step_metrics(7, report, lr=1e-3, seconds=2.0)
    assert (found["step"], found["tokens_per_second"], found["loss/nll"]) == (7, 15.0, 2.5)
    assert (found["fill"], found["micro_batches"], found["padding_share"]) == (0.75, 2, 0.25)
    assert step_metrics(7, report, lr=1e-3, seconds=0.0)["tokens_per_second"] == 0.0
    json.dumps(found)


def test_rewards() -> None:
    samples = make_samples()
    found = reward_metrics(samples)
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    assert found["reward"] == np.mean(rewards)
    assert found["response_length_max"] == 10.0


def test_written_samples_can_be_read_as_rollouts(tmp_path: Path) -> None:
    samples = make_samples()
    write_samples(tmp_path / "new" / "batch.jsonl", samples)
    found = read_rollouts(tmp_path / "new" / "batch.jsonl").samples
    assert [sample.uid for sample in found] == [sample.uid for sample in samples]
    for mine, other in zip(found, samples, strict=True):
        assert mine.group == other.group
        np.testing.assert_array_equal(mine.tokens, other.tokens)
        np.testing.assert_array_equal(mine.mask, other.mask)
        np.testing.assert_array_equal(mine.advantages, other.advantages)
