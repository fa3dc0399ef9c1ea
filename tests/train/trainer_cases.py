"""Settings, samples and trainers of tiny runs, for the tests of whole runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from padfree.config import Config, config_from_dict
from padfree.distributed import Mesh
from padfree.sample import Sample
from padfree.testing.models import build
from padfree.train.batch_preparer import BatchPreparer
from padfree.train.batch_times import PARTS
from padfree.train.batcher import Batcher, make_batcher
from padfree.train.engine import Engine
from padfree.train.setup import build_engine, build_reference
from padfree.train.start_run import begin_run
from padfree.train.trainer import Trainer
from tests.train.cases import VOCABULARY, make_samples

SFT: dict[str, Any] = {"batch": {"samples": 4, "max_tokens": 16}}
RL: dict[str, Any] = {
    "batch": {"samples": 6, "max_tokens": 16},
    "loss": {"kind": "clip", "epochs": 2, "mini_batches": 2, "aggregation": "sample-mean", "kl_coefficient": 0.1},
}
ONE_UPDATE: dict[str, Any] = {"batch": RL["batch"], "loss": {"kind": "clip", "aggregation": "sample-mean"}}
"""RL with one update per batch."""
TIMES = (
    "seconds",
    "tokens_per_second",
    "sampler/tokens_per_second",
    "tflops_per_device",
    "mfu",
    "memory_gib",
    "imbalance_measured",
    "fill",
    "imbalance",
    "micro_batches",
    "padding_share",
    "computed_tokens",
    "sampler_tokens_per_second",
    *(f"seconds/{part}" for part in PARTS),
)
"""Metrics that depend on the machine or on the layout."""


def save_config(folder: Path) -> Path:
    """Write a config file: load_model initialises the weights from the seed, including tied embeddings."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": VOCABULARY, "num_hidden_layers": 1}
    build("llama_tied", **sizes).config.save_pretrained(folder)
    return folder / "config.json"


def samples() -> list[Sample]:
    """12 samples of 4 groups."""
    found = make_samples((5, 9, 4, 12, 7, 6, 3, 8, 10, 6, 5, 4), seed=3)
    return [
        Sample(
            tokens=sample.tokens,
            loss_mask=sample.mask,
            ref_logprobs=sample.ref_logprobs,
            reward=float(index % 3),
            group=index // 3,
            uid=sample.uid,
        )
        for index, sample in enumerate(found)
    ]


def make_config(folder: Path, model_path: Path, **sections: Any) -> Config:
    values: dict[str, Any] = {
        "model": {"path": str(model_path)},
        "data": {"path": ["in memory"], "epochs": 3},
        "optimizer": {"lr": 5e-3, "eps": 1e-3},
        "run": {"folder": str(folder), "steps": 6, "device": "cpu"},
        "checkpoint": {"every": 1000},  # so that there is a checkpoint at the end
    }
    for section, changes in sections.items():
        values[section] = {**values.get(section, {}), **changes}
    return config_from_dict(values)


class FromFunction:
    """Replaces `Collector`: a function makes the samples of each batch of groups."""

    def __init__(self, make: Any) -> None:
        self._make = make
        self.timings = getattr(make, "timings", {})

    def next(self, batcher: Any, trained: Any, step: int) -> tuple[int, list[Sample]] | None:
        groups = next(batcher, None)
        return None if groups is None else (batcher.step, self._make(groups))

    def cursor(self) -> None:
        """No batch is queued."""

    def metrics(self) -> dict[str, float]:
        return {}

    state = metrics


def begin(config: Config, engine: Engine, batcher: Batcher, **options: Any) -> Trainer:
    """Begin a run. `options`: of `BatchPreparer` and of `begin_run`."""
    models = {name: options.pop(name) for name in ("reference", "critic", "rollouts", "end_tokens") if name in options}
    batches = BatchPreparer(
        engine,
        batcher,
        loss=config.loss,
        data=config.data,
        rollout=config.rollout,
        seed=config.run.seed,
        **models,
    )
    return begin_run(config, batches, **options)


def make_trainer(
    config: Config, mesh: Mesh, found: list[Sample] | None = None, make_samples: Any = None, **options: Any
) -> Trainer:
    batcher, engine = make_batcher(config, samples() if found is None else found), build_engine(config, mesh)
    if make_samples is not None:
        options["rollouts"] = FromFunction(make_samples)
    return begin(config, engine, batcher, reference=build_reference(config, mesh, engine), **options)


def lines(folder: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in TIMES} for line in found]
