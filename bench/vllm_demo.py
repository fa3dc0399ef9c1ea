"""RL on the demo's task with the in-process sampler and with a vLLM server, and the reward curves of both.

    python bench/vllm_demo.py --python .venv-vllm/bin/python [--steps 20] [--seeds 0 1] [--output curves.json]
        [--folder kept]

A small Qwen3 is fine-tuned on the demo's problems and then trained with the demo's reward: 128 responses per step in
groups of 8. Both engines start from the same weights with the same prompts. The sampled tokens differ, because vLLM has
its own random numbers.

`--folder` keeps the runs, and a second call skips finished ones.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from padfree.config import Config, LaunchConfig
from padfree.testing.arithmetic import Sizes, rl_config, sft_config, write_task
from padfree.train.run import train

SOURCE = Path(__file__).parents[1] / "src"
HIDDEN, HEAD = 128, 64
PATIENCE = 900.0  # seconds; a server needs a minute of CPU time to start
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "PYTHONPATH": str(SOURCE),
}


def fine_tuned(folder: Path, sizes: Sizes) -> None:
    """Make the demo's data, and a model that knows the format of the answers but is mostly wrong."""
    if (folder / "sft" / "model").exists():
        return
    write_task(folder, replace(sizes, hidden=HIDDEN), head=HEAD)
    config = sft_config(folder, sizes)
    train(replace(config, optimizer=replace(config.optimizer, lr=4e-3)))


def server_settings(config: Config, python: str) -> Config:
    command = (python, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager", "--max-model-len", "512")
    launch = LaunchConfig(command=command, devices=("cpu",), environment=ENVIRONMENT)
    served = replace(config.rollout, engine="vllm", launch=launch, timeout=PATIENCE)
    return replace(config, rollout=served, run=replace(config.run, timeout=PATIENCE))


def run(config: Config, folder: Path, seed: int) -> list[dict[str, Any]]:
    """Train with this config, and return the metrics of every step."""
    config = replace(
        config,
        run=replace(config.run, folder=str(folder), seed=seed),
        checkpoint=replace(config.checkpoint, export=False),
    )
    assert config.run.steps is not None
    if len(metrics_of(folder)) < config.run.steps:
        train(config)
    return metrics_of(folder)


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """Return the metrics of the steps of the run in this folder."""
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--python", default=".venv-vllm/bin/python", help="Python of the environment with vLLM")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--sft-steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=3e-4, help="learning rate of RL")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--output", type=Path, help="write the curves to this JSON file")
    parser.add_argument("--folder", help="keep the runs in this folder; by default they are removed")
    settings = parser.parse_args()
    sizes = Sizes(rl_steps=settings.steps, sft_steps=settings.sft_steps)
    curves: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() if settings.folder is None else nullcontext(settings.folder) as place:
        folder = Path(place).resolve()
        fine_tuned(folder, sizes)
        plain = rl_config(folder, sizes)
        plain = replace(plain, optimizer=replace(plain.optimizer, lr=settings.lr))
        for seed in settings.seeds:
            for name, config in (
                ("in_process", plain),
                ("vllm", server_settings(plain, os.path.abspath(settings.python))),
            ):
                lines = run(config, folder / f"{name}-{seed}", seed)
                curves[f"{name}, seed {seed}"] = [line["reward"] for line in lines]
                curve = " ".join(f"{line['reward']:.2f}" for line in lines)
                print(f"{name}, seed {seed}: {curve}", flush=True)
                for metric in ("seconds/sampling", "sampler/canary_difference", "loss/sampler_difference"):
                    if metric in lines[0]:
                        values = [line[metric] for line in lines]
                        print(f"  {metric}: {mean(values):.3g} on average, {max(values):.3g} at most", flush=True)
    if settings.output is not None:
        settings.output.write_text(json.dumps(curves, indent=1), encoding="utf-8")
    print("mean reward of the first five and the last five steps")
    for name, rewards in curves.items():
        print(f"  {name:<24}{mean(rewards[:5]):.3f}  {mean(rewards[-5:]):.3f}")


if __name__ == "__main__":
    main()
