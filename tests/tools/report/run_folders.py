"""Run folders for tests, with any number of steps and metrics and all files of a run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

VERSIONS = {
    "python": "3.11.9",
    "torch": "2.13.0",
    "transformers": "5.22.0",
    "padfree": "0.1.0",
    "device": "NVIDIA H200",
    "processes": 8,
    "layout": "1 replicate x 4 shard x 2 context",
}


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def sft_step(step: int, rng: np.random.Generator) -> dict[str, Any]:
    tokens, seconds = int(rng.integers(30_000, 32_768)), float(rng.normal(1.4, 0.05))
    return {
        "step": step,
        "loss": 0.5 + 2 * math.exp(-step / 50) + float(rng.normal(0, 0.05)),
        "gradient_norm": float(rng.uniform(0.5, 1.5)),
        "lr": 1e-5 * min(1, (step + 1) / 20),
        "samples": 128,
        "tokens": tokens,
        "scored_tokens": tokens // 2,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "micro_batches": 4,
        "fill": float(rng.uniform(0.95, 1)),
        "imbalance": 1 + float(rng.uniform(0, 0.05)),
        "imbalance_measured": 1 + float(rng.uniform(0, 0.08)),
        "padding_share": 0.0,
        "mfu": float(rng.normal(0.41, 0.01)),
        "memory_gib": 60.0 + min(step, 5),
    }


def rl_step(step: int, rng: np.random.Generator) -> dict[str, Any]:
    return {
        **sft_step(step, rng),
        "reward": 0.2 + step / 1000,
        "reward_min": 0.0,
        "reward_max": 1.0,
        "response_length": 300.0 + step,
        "loss/kl": float(rng.uniform(0, 0.02)),
        "loss/entropy": float(rng.uniform(0.5, 1)),
        "loss/clip_fraction": float(rng.uniform(0, 0.02)),
    }


def timed_rl_step(step: int, rng: np.random.Generator) -> dict[str, Any]:
    """Metrics of batches with two updates: the first one has the times of the batch."""
    line = rl_step(step, rng) | {"seconds/update": 2.0}
    if step % 2 == 0:
        line |= {"seconds/sampling": 20.0 + step, "seconds/old_logprobs": 1.5, "sampler_tokens_per_second": 1e4 + step}
    return line


def write_sft_run(folder: Path, num_steps: int = 30, **config: Any) -> Path:
    rng = np.random.default_rng(0)
    write_lines(folder / "metrics.jsonl", [sft_step(step, rng) for step in range(num_steps)])
    settings = {"model": {"path": "a-model"}, "loss": {"kind": "sft"}, "run": {"steps": num_steps}, **config}
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def write_rl_run(folder: Path, num_steps: int, *, uid: str = "sample 7") -> Path:
    """A run that was resumed after 10 steps and ended with a non-finite loss."""
    rng = np.random.default_rng(1)
    write_lines(folder / "metrics.jsonl", [rl_step(step, rng) for step in range(num_steps)])
    settings = {"model": {"path": "a-model"}, "loss": {"kind": "clip"}, "run": {"steps": 1000}}
    (folder / "config.json").write_text(json.dumps(settings))
    day = "2026-03-01T1{}:00:00+00:00"
    events = [
        {"time": day.format(0), "kind": "start", "step": 0, **VERSIONS},
        {"time": day.format(1), "kind": "stop", "step": 10, "reason": "signal"},
        {"time": day.format(2), "kind": "start", "step": 10, **VERSIONS, "processes": 16},
        {"time": day.format(2), "kind": "resume", "step": 10, "checkpoint": "step-00000010"},
        {"time": day.format(3), "kind": "nonfinite", "step": num_steps, "file": "nonfinite"},
    ]
    write_lines(folder / "events.jsonl", events)
    rows = [{"action": "skipped", "file": "a.jsonl", "line": i, "reason": f"no text, {uid}"} for i in range(1, 151)]
    write_lines(folder / "rows.jsonl", rows)
    samples = [{"uid": uid, "tokens": [1, 2]}, {"uid": 8, "tokens": [3]}]
    write_lines(folder / f"nonfinite-step-{num_steps:08d}.jsonl", samples)
    (folder / "checkpoints" / "step-00000010").mkdir(parents=True)
    (folder / "checkpoints" / "step-00000020.partial").mkdir()
    return folder
