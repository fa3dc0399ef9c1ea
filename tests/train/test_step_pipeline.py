"""What is written of steps and samples."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from padfree.data import read_rollouts
from padfree.estimate.flops import Flops
from padfree.packing import CostModel, plan_step
from padfree.record.metric_table import unknown_metrics
from padfree.record.metrics_file import MetricsFile, write_samples
from padfree.train.batch_preparer import reward_metrics
from padfree.train.step import StepReport
from padfree.train.step_pipeline import peak_memory_gib, step_metrics
from tests.refused import refused
from tests.train.cases import make_samples

CPU = torch.device("cpu")
RATES = {"lr": 1e-3, "lr/adamw": 1e-4}


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


def make_report() -> StepReport:
    return StepReport(
        loss=2.0,
        gradient_norm=0.5,
        statistics={"nll": 2.5},
        num_samples=3,
        num_tokens=30,
        num_labels=20,
        padding_share=0.25,
        plan=plan_step([10, 10, 10], ranks=1, max_tokens=20),
        stop_votes=0,
    )


def test_numbers_of_a_step() -> None:
    report = make_report()
    found = step_metrics(7, report, rates=RATES, seconds=2.0)
    assert (found["step"], found["tokens_per_second"], found["loss/nll"]) == (7, 15.0, 2.5)
    assert (found["fill"], found["micro_batches"], found["padding_share"]) == (0.75, 2, 0.25)
    assert step_metrics(7, report, rates=RATES, seconds=0.0)["tokens_per_second"] == 0.0
    json.dumps(found)


def test_measured_imbalance_flops_and_memory_are_there_when_known() -> None:
    report = make_report()
    assert not {"imbalance_measured", "tflops_per_device", "mfu", "memory_gib"} & set(
        step_metrics(7, report, rates=RATES, seconds=2.0)
    )
    flops = Flops(cost=CostModel(linear=1e12), head=0.5e12, devices=2, peak=None)
    found = step_metrics(
        7,
        report,
        rates=RATES,
        seconds=2.0,
        flops=flops,
        compute_seconds=(1.0, 3.0),
        memory_gib=peak_memory_gib(CPU),
    )
    assert found["imbalance_measured"] == 1.5
    assert found["tflops_per_device"] == (30 - 0.5 * 10) / 2 / 2
    assert "mfu" not in found
    assert 0.05 < found["memory_gib"] < 1000
    json.dumps(found)


def test_every_metric_is_in_the_reference() -> None:
    flops = Flops(cost=CostModel(linear=1.0), head=0.0, devices=1, peak=1.0)
    found = step_metrics(
        0, make_report(), rates=RATES, seconds=1.0, flops=flops, compute_seconds=(1.0,), memory_gib=1.0
    )
    found |= reward_metrics(make_samples(), end_tokens=(1,))
    assert unknown_metrics(found) == []


def test_rewards() -> None:
    samples = make_samples()
    found = reward_metrics(samples)
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    assert found["reward"] == np.mean(rewards)
    assert found["reward_std"] == pytest.approx(np.std(rewards))
    assert (found["reward_min"], found["reward_max"]) == (min(rewards), max(rewards))
    assert (found["response_length_min"], found["response_length_max"]) == (0.0, 10.0)
    assert "response_cut" not in found
    last = {int(sample.tokens[-1]) for sample in samples[:6]}
    rest = sum(int(sample.tokens[-1]) not in last for sample in samples)
    assert reward_metrics(samples, end_tokens=last)["response_cut"] == rest / len(samples)
    assert rest > 0


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


@pytest.mark.parametrize("line", ["not JSON", '{"accuracy": 1}', "[1]", '{"step": "one"}'])
def test_a_line_that_no_run_wrote_is_refused_and_kept(line: str, tmp_path: Path) -> None:
    content = '{"step": 0}\n' + line + "\n"
    (tmp_path / "metrics.jsonl").write_text(content)
    with refused("run.folder", r"line 2 of .*metrics\.jsonl has no 'step', .*"):
        MetricsFile(tmp_path, rank=0, step=5)
    assert (tmp_path / "metrics.jsonl").read_text() == content
