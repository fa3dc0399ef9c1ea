"""What is written of each step: one line of JSON, by the first rank alone.

    {"step": 3, "loss": 2.1, "gradient_norm": 0.8, "lr": 1e-05, "tokens": 4096, "tokens_per_second": 9100.0, ...}

A resumed run drops the lines of steps that will be done again, so that the file is that of an undisturbed run.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from padfree.batch import TOKEN_ARRAYS, Sample
from padfree.data.records import line_number
from padfree.train.engine import StepReport
from padfree.train.flops import Flops

FILE = "metrics.jsonl"


def step_metrics(
    step: int,
    report: StepReport,
    *,
    lr: float,
    seconds: float,
    flops: Flops | None = None,
    busy_seconds: Sequence[float] = (),
    memory_gib: float | None = None,
) -> dict[str, Any]:
    """The numbers of one step, by name. `busy_seconds` are the data ranks' own, without waiting for each other."""
    found = {
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
    if sum(busy_seconds) > 0:
        found["imbalance_measured"] = max(busy_seconds) * len(busy_seconds) / sum(busy_seconds)
    if flops is not None:
        found |= flops.metrics(report.plan.lengths, report.num_labels, seconds)
    if memory_gib is not None:
        found["memory_gib"] = memory_gib
    return found


def peak_memory_gib(device: torch.device) -> float:
    """The most that this process has held so far: of the GPU's memory, or of the machine's where there is no GPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    import resource  # not there on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**30 if sys.platform == "darwin" else peak / 2**20  # bytes there, KiB elsewhere


def reward_metrics(samples: Sequence[Sample], *, end_tokens: Collection[int] = ()) -> dict[str, float]:
    """What a rollout batch earned, and how long its responses are, in trained tokens.

    Given the tokens that end a response, also the share of responses that were cut before one.
    """
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    lengths = [int(sample.mask.sum()) for sample in samples]
    found = {
        "response_length": sum(lengths) / len(lengths),
        "response_length_min": float(min(lengths)),
        "response_length_max": float(max(lengths)),
    }
    if rewards:
        mean = sum(rewards) / len(rewards)
        found["reward"] = mean
        found["reward_std"] = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / len(rewards))
        found["reward_min"] = min(rewards)
        found["reward_max"] = max(rewards)
    if end_tokens:
        found["response_cut"] = sum(int(sample.tokens[-1]) not in end_tokens for sample in samples) / len(samples)
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
            for number, line in enumerate(self.path.read_text(encoding="utf-8").splitlines(keepends=True), start=1):
                if not line.endswith("\n") or line_number(self.path, number, line, "step") >= step:
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
