"""Times of a batch: measured for each phase and written with the right update."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from padfree.distributed import Mesh, distributed, make_mesh
from padfree.sample import Sample
from padfree.train.batch_times import PARTS, BatchTimes
from tests.train.trainer_cases import RL, SFT, make_config, make_trainer, save_config

WAIT = 0.05


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    with distributed(device="cpu") as device:
        yield make_mesh(device)


def test_timings_divide_what_was_measured_as_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([10.0, 18.0, 20.0, 21.5])
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    times = BatchTimes()
    assert times.metrics(100) == {}
    with times.measure("sampling"):
        pass
    with times.measure("reference"):
        pass
    assert times.metrics(100) == {
        "seconds/sampling": 8.0,
        "seconds/reference": 1.5,
        "sampler_tokens_per_second": 12.5,
    }
    times.split_sampling({"rewards": 1.0, "weight_sync": 2.0})
    assert times.seconds == {"sampling": 5.0, "rewards": 1.0, "weight_sync": 2.0, "reference": 1.5}
    assert times.metrics(100)["sampler_tokens_per_second"] == 20.0
    with pytest.raises(AssertionError):
        times.split_sampling({"coffee": 1.0})


def test_timings_that_name_sampling_are_taken_as_they_are() -> None:
    times = BatchTimes()
    times.seconds["sampling"] = 8.0
    times.split_sampling({"sampling": 3.0, "waiting": 4.0})
    assert times.seconds == {"sampling": 3.0, "waiting": 4.0}
    times.seconds["sampling"] = 1.0
    times.split_sampling({"rewards": 1.5})  # longer than the measured time
    assert times.seconds["sampling"] == 0.0


class SlowSampling:
    """Returns the samples unchanged after a delay."""

    timings = {"rewards": 0.01}  # noqa: RUF012 - read by the trainer

    def __call__(self, groups: Sequence[Any]) -> list[Sample]:
        time.sleep(WAIT)
        return [sample for group in groups for sample in group]


def lines_of(mesh: Mesh, folder: Path, sections: dict[str, Any], **options: Any) -> list[dict[str, float]]:
    config = make_config(folder / "run", save_config(folder / "model"), **sections)
    make_trainer(config, mesh, **options).run()
    found = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    names = {f"seconds/{part}" for part in PARTS} | {"sampler_tokens_per_second", "seconds"}
    return [{name: value for name, value in line.items() if name in names} for line in found]


def test_the_line_of_a_batchs_first_update_has_its_times(mesh: Mesh, tmp_path: Path) -> None:
    """Two batches of four updates."""
    lines = lines_of(mesh, tmp_path, {**RL, "run": {"steps": 8}}, make_samples=SlowSampling())
    assert len(lines) == 8
    for number, line in enumerate(lines):
        assert line["seconds/update"] == pytest.approx(line["seconds"])
        if number % 4:
            assert set(line) == {"seconds", "seconds/update", "seconds/logging", "seconds/other"}
            continue
        parts = {"sampling", "rewards", "old_logprobs", "preparing", "update"}
        parts |= {"logging", "other"} if number else set()
        assert set(line) == {"seconds", "sampler_tokens_per_second", *(f"seconds/{part}" for part in parts)}
        assert line["seconds/sampling"] >= WAIT - 0.01
        assert line["seconds/rewards"] == 0.01
        assert line["seconds/old_logprobs"] > 0
        assert line["sampler_tokens_per_second"] > 0


def test_rollouts_from_files_and_references_and_fine_tuning(mesh: Mesh, tmp_path: Path) -> None:
    reference = {"path": str(save_config(tmp_path / "reference"))}
    lines = lines_of(mesh, tmp_path / "rl", {**RL, "reference": reference, "run": {"steps": 1}})
    parts = ("reference", "old_logprobs", "preparing", "update")
    assert set(lines[0]) == {"seconds", *(f"seconds/{part}" for part in parts)}
    (line,) = lines_of(mesh, tmp_path / "sft", {**SFT, "run": {"steps": 1}})
    assert set(line) == {"seconds"}


def test_the_phases_add_up_to_the_wall_clock(mesh: Mesh, tmp_path: Path) -> None:
    """With sampling, old log-probabilities, a reference, evaluations, checkpoints and slow logging.

    Whatever a phase does not measure is `seconds/other`, which is small. The sum is therefore exact between the ends of
    two updates, except for the time between the clock's readings at the beginning of a phase and at the end of another.
    """
    ends: list[float] = []

    def slow_logging(metrics: Any) -> None:
        assert trainer.updates.last_end is not None
        ends.append(trainer.updates.last_end)
        time.sleep(WAIT / 5)

    def slow_evaluation(step: int) -> dict[str, float]:
        time.sleep(WAIT / 2)
        return {"eval/reward": 1.0}

    sections: dict[str, Any] = {
        **RL,
        "run": {"steps": 20},
        "data": {"epochs": 10},
        "reference": {"path": str(save_config(tmp_path / "reference")), "refresh": 1},
        "checkpoint": {"every": 3},
    }
    config = make_config(tmp_path / "run", save_config(tmp_path / "model"), **sections)
    object.__setattr__(config.eval, "every", 4)  # without eval.path, which needs a sampler
    trainer = make_trainer(config, mesh, make_samples=SlowSampling(), on_step=slow_logging, evaluate=slow_evaluation)
    trainer.run()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == len(ends) == 20
    found = sum(seconds for line in lines[1:] for name, seconds in line.items() if name.startswith("seconds/"))
    assert found == pytest.approx(ends[-1] - ends[0], rel=0.02)
    assert sum(line["seconds/other"] for line in lines[1:]) < 0.1 * found
    for number, line in enumerate(lines[1:], 1):
        assert line["seconds/logging"] >= WAIT / 5
        assert ("seconds/checkpoint" in line) == (number % 3 == 0)
        assert ("seconds/evaluation" in line) == (number % 4 == 0)
        assert ("seconds/preparing" in line) == (number % 4 == 0)
        assert line.get("seconds/evaluation", WAIT) >= WAIT / 2
