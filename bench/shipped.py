"""The speed of a command such as `padfree sft`, relative to the training engine alone on the same batches.

    run       `padfree sft` or `padfree rl` with a recipe: tokens/s after the first steps, compilations, memory
    engine    then, with the same batches and settings, consecutive updates and nothing else

    PYTHONPATH=src python bench/shipped.py sft model.path=my-model 'data.path=["train.jsonl"]' --steps 60

The first steps are not counted, because they compile and allocate memory.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from timer import Stopwatch
from updates import make_updates

from padfree.config import Config, load_config
from padfree.distributed import distributed, make_mesh
from padfree.estimate.memory import estimate_memory
from padfree.losses import PolicySettings
from padfree.model.structure import skeleton
from padfree.sample import Sample, with_arrays
from padfree.tasks.batch_advantages import with_advantages
from padfree.train import train
from padfree.train.batcher import make_batcher
from padfree.train.engine import Engine
from padfree.train.resolve_auto import device_memory, resolve_auto
from padfree.train.setup import build_engine
from padfree.train.training_data import load_tokenizer, load_training_data

SET_UP = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        fixed = [f"run.folder={folder}/run", f"run.steps={arguments.steps}", "checkpoint.export=false"]
        config = load_config(arguments.recipe, [*arguments.overrides, *fixed])
        shipped = measured_run(config)
    alone = measured_engine(config, arguments.steps)
    ratio = shipped["tokens/s"] / alone["tokens/s"]
    memory = f"{shipped['memory']:.1f} GiB (estimated {alone['estimate']:.1f})"
    print(f"run     {shipped['tokens/s']:10,.0f} tokens/s, {memory}")
    print(f"engine  {alone['tokens/s']:10,.0f} tokens/s; the run reaches {ratio:.3f} of it")
    print(f"compiled in steps {shipped['compiled in steps']}; first step {shipped['first step']:.1f} s")
    if arguments.json:
        arguments.json.write_text(json.dumps({"run": shipped, "engine": alone, "ratio": ratio}, indent=1))


def measured_run(config: Config) -> dict[str, Any]:
    steps: list[Any] = []
    train(config, on_step=steps.append, on_note=print)
    events = [json.loads(line) for line in (Path(config.run.folder) / "events.jsonl").read_text().splitlines()]
    steady = steps[SET_UP:]
    return {
        "tokens/s": sum(step["tokens"] for step in steady) / sum(step["seconds"] for step in steady),
        "compiled in steps": [event["step"] for event in events if event["kind"] == "compile"],
        "first step": steps[0]["seconds"],
        "slowest": max(step["seconds"] for step in steady),
        "memory": steps[-1]["memory_gib"],
    }


def measured_engine(config: Config, num_steps: int) -> dict[str, Any]:
    """Run the updates of the first batches, each prepared while the previous one is computed."""
    with distributed(device=config.run.device) as device:
        mesh = make_mesh(device)
        batcher = make_batcher(config, load_training_data(config, load_tokenizer(config)).samples)
        batches = [[sample for group in groups for sample in group] for groups in islice(batcher, num_steps)]
        model = skeleton(config.model.path)
        config = resolve_auto(config, model, processes=1, device_type=device.type, memory=device_memory(device)).config
        estimate = estimate_memory(config, skeleton(config.model.path), processes=1, device_type=device.type).device
        engine = build_engine(config, mesh)
        prepared = [given(engine, config, batch) for batch in batches]
        make_updates(engine, prepared[:SET_UP])
        with Stopwatch() as watch:
            make_updates(engine, prepared[SET_UP:])
    tokens = sum(len(sample) for samples in prepared[SET_UP:] for sample in samples)
    return {"tokens/s": tokens / watch.seconds, "estimate": estimate / 2**30}


def given(engine: Engine, config: Config, batch: Sequence[Any]) -> list[Sample]:
    """Return the samples of a step, with old log-probabilities for a policy loss."""
    samples = list(batch)
    if not isinstance(engine.settings.loss, PolicySettings):
        return samples
    samples = [
        replace(sample, uid=index) for index, sample in enumerate(with_advantages(samples, config.loss.advantage))
    ]
    vocabulary = engine.model.config.get_text_config().vocab_size
    old = [np.full(len(sample), -np.log(vocabulary), dtype=np.float32) for sample in samples]
    return with_arrays(samples, old_logprobs=old)


if __name__ == "__main__":
    main()
