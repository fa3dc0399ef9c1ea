"""What is written of each step: one line of JSON, by the first rank alone.

    {"step": 3, "loss": 2.1, "gradient_norm": 0.8, "lr": 1e-05, "tokens": 4096, "tokens_per_second": 9100.0, ...}

A resumed run drops the lines of steps that will be done again, so that the file is that of an undisturbed run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from padfree.batch import TOKEN_ARRAYS, Sample
from padfree.train.engine import StepReport

FILE = "metrics.jsonl"


def step_metrics(step: int, report: StepReport, *, lr: float, seconds: float) -> dict[str, Any]:
    """The numbers of one step, by name."""
    return {
        "step": step,
        "loss": report.loss,
        "gradient_norm": report.gradient_norm,
        "lr": lr,
        "samples": report.num_samples,
        "tokens": report.num_tokens,
        "scored_tokens": report.num_labels,
        "seconds": seconds,
        "tokens_per_second": report.num_tokens / seconds if seconds > 0 else 0.0,
        "micro_batches": report.plan.num_micro_batches,
        "fill": report.plan.fill,
        "imbalance": report.plan.imbalance,
        "padding_share": report.padding_share,
        **{f"loss/{name}": value for name, value in report.statistics.items()},
    }


def reward_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """What a rollout batch earned, and how long its responses are."""
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    lengths = [int(sample.mask.sum()) for sample in samples]
    found = {"response_length": sum(lengths) / len(lengths), "response_length_max": float(max(lengths))}
    if rewards:
        found["reward"] = sum(rewards) / len(rewards)
        found["reward_max"] = max(rewards)
        found["reward_min"] = min(rewards)
    return found


class MetricsFile:
    """`metrics.jsonl` in the run folder; ranks other than the first write nothing."""

    def __init__(self, folder: Path, *, rank: int, step: int = 0) -> None:
        self.path = folder / FILE
        self._writes = rank == 0
        if self._writes:
            folder.mkdir(parents=True, exist_ok=True)
            self._keep_before(step)

    def _keep_before(self, step: int) -> None:
        """Only whole lines of earlier steps; the rest is of a run that did not save them."""
        kept = []
        if self.path.exists():
            for line in self.path.read_text(encoding="utf-8").splitlines(keepends=True):
                if not line.endswith("\n") or json.loads(line)["step"] >= step:
                    break
                kept.append(line)
        beside = self.path.with_suffix(".writing")
        beside.write_text("".join(kept), encoding="utf-8")
        beside.replace(self.path)

    def write(self, metrics: Mapping[str, Any]) -> None:
        if self._writes:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(metrics) + "\n")


def write_samples(path: Path, samples: Sequence[Sample]) -> None:
    """Samples as rollout rows, one line each, to look at them or to train on them alone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for sample in samples:
            arrays = {name: array.tolist() for name in TOKEN_ARRAYS if (array := getattr(sample, name)) is not None}
            row = {
                "uid": sample.uid,
                "group": sample.group,
                "source": sample.source,
                "reward": sample.reward,
                "tokens": sample.tokens.tolist(),
                "loss_mask": sample.mask.astype(int).tolist(),
                **arrays,
            }
            file.write(json.dumps(row) + "\n")
