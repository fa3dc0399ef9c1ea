"""In-process rollouts: whether a random model learns a task from rewards, and the speed of sampling.

    PYTHONPATH=src python bench/rollout.py [--seeds 0 1 2] [--steps 40] [--json rollout.json]
    PYTHONPATH=src python bench/rollout.py --shape 0.6b --device cuda [--json sampling.json]      see bench/sampling.py

The prompt has one to four digits. The response should repeat the last digit three times: `4 1 5` -> `555`. Each correct
character earns a third of the reward. The model is a two-layer Qwen3 with random weights, trained with GRPO and 8
responses per prompt. The run fails if the reward of a seed starts above START or ends below END.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from timer import Stopwatch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config

from padfree.config import Config, config_from_dict
from padfree.train.run import train

START, END = 0.2, 0.9
"""The largest mean reward of the first batch, and the smallest of the last five."""

STEPS = 40
RESPONSE = 3
DIGITS = "012345"


def last_digit(response: str, row: Mapping[str, Any]) -> float:
    """Return the reward: the fraction of characters that equal the last character of the prompt."""
    return response.count(row["prompt"][-1]) / RESPONSE


def write_task(folder: Path, seed: int) -> None:
    """Write a model config without weights, a tokenizer, and prompts."""
    letters = {letter: number for number, letter in enumerate(["<eos>", "<unk>", " ", *DIGITS])}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    make: Any = PreTrainedTokenizerFast
    make(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>").save_pretrained(folder)
    Qwen3Config(
        vocab_size=len(letters),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        eos_token_id=0,
        initializer_range=0.08,
    ).save_pretrained(folder)
    generator = np.random.default_rng(seed)
    with (folder / "prompts.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(512):
            prompt = " ".join(generator.choice(list(DIGITS), generator.integers(1, 5)))
            file.write(json.dumps({"prompt": prompt}) + "\n")


def task_config(folder: Path, *, seed: int, steps: int = STEPS) -> Config:
    return config_from_dict(
        {
            "model": {"path": str(folder), "init": "random"},
            "data": {"path": [str(folder / "prompts.jsonl")], "epochs": None},
            "batch": {"samples": 128, "max_tokens": 1024},
            "rollout": {
                "reward": "rollout:last_digit",
                "samples_per_prompt": 8,
                "max_new_tokens": RESPONSE,
                "max_concurrent": 128,
            },
            "loss": {"kind": "clip", "advantage": "grpo", "entropy_coefficient": 0.03},
            "optimizer": {"lr": 5e-3},
            "checkpoint": {"export": False},
            "run": {"folder": str(folder / "run"), "steps": steps, "seed": seed, "device": "cpu"},
        }
    )


def rewards_of(config: Config) -> list[float]:
    """Return the mean reward of every step of a run."""
    found: list[float] = []
    train(config, on_step=lambda metrics: found.append(metrics["reward"]))
    return found


def sampling(arguments: argparse.Namespace) -> None:
    """Measure the speed of the in-process sampler."""
    from sampling import measure  # imports the shapes of another benchmark

    found = measure(
        arguments.shape,
        device=torch.device(arguments.device),
        responses=arguments.responses,
        tokens=arguments.tokens,
        prompt_tokens=arguments.prompt_tokens,
        longest=arguments.longest,
        slots=arguments.slots or arguments.responses,
        with_hf=not arguments.no_hf,
    )
    about = {"torch": torch.__version__, "transformers": transformers.__version__}
    if arguments.device == "cuda":
        about["gpu"] = torch.cuda.get_device_name()
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({**about, **found}, indent=1), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument(
        "--shape", choices=["tiny", "0.6b", "1.7b", "4b"], help="measure the sampler on a model of this shape"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--responses", type=int, default=256, help="responses of equal length, sampled at the same time"
    )
    parser.add_argument("--lanes", type=int, help="slots for responses of random lengths (default: --responses)")
    parser.add_argument("--tokens", type=int, default=256, help="tokens per response, or their mean")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--longest", type=int, default=2048, help="longest response of random length")
    parser.add_argument("--no-hf", action="store_true", help="skip HF generate")
    arguments = parser.parse_args()
    torch.set_num_threads(min(2, os.cpu_count() or 1))
    if arguments.shape is not None:
        sampling(arguments)
        return
    runs = []
    print("seed   first   last 5   seconds")
    for seed in arguments.seeds:
        with tempfile.TemporaryDirectory() as name:
            write_task(Path(name), seed)
            with Stopwatch() as watch:
                rewards = rewards_of(task_config(Path(name), seed=seed, steps=arguments.steps))
        last = sum(rewards[-5:]) / len(rewards[-5:])
        runs.append({"seed": seed, "first": rewards[0], "last": last, "seconds": watch.seconds, "rewards": rewards})
        print(f"{seed:4d}  {rewards[0]:6.3f}  {last:7.3f}  {watch.seconds:8.1f}", flush=True)
    if arguments.json is not None:
        about = {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "machine": platform.machine(),
            "threads": torch.get_num_threads(),
        }
        arguments.json.write_text(json.dumps({**about, "runs": runs}, indent=1), encoding="utf-8")
    for run in runs:
        if run["first"] > START or run["last"] < END:
            raise SystemExit(
                f"seed {run['seed']}: from {run['first']:.3f} to {run['last']:.3f}; {START} to {END} wanted"
            )


if __name__ == "__main__":
    main()
