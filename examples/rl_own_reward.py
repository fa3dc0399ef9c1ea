"""Train a model with your own reward function.

    python examples/rl_own_reward.py --model Qwen/Qwen3-0.6B --prompts prompts.jsonl --folder runs/rl

    python examples/rl_own_reward.py --model padfree-demo/sft/model --prompts padfree-demo/data/prompts.jsonl

The first command trains a model of the Hub, the second one the model of `padfree demo`. A row of the file has a
`prompt`, and an `answer` that ends with the right number. The reward is called with the text of a response and the row
of its prompt. `rollout.reward` names it as `module:function`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from padfree.config import config_from_dict
from padfree.train.run import train


def reward(response: str, row: Mapping[str, Any]) -> float:
    """Return 1 if the last number of the response is the answer, 0.1 for another number, 0 without a number."""
    numbers = re.findall(r"-?\d+", response)
    if not numbers:
        return 0.0
    answer = re.findall(r"-?\d+", str(row["answer"]))[-1]  # alone, or after "####"
    return 1.0 if int(numbers[-1]) == int(answer) else 0.1


def main(arguments: Sequence[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description="Train a model with your own reward function.")
    parser.add_argument("--model", required=True, help="a folder or a Hub id")
    parser.add_argument("--prompts", required=True, nargs="+", help="JSONL files with prompt and answer")
    parser.add_argument("--folder", default="runs/rl", help="output folder (default %(default)s)")
    parser.add_argument("--samples", type=int, default=256, help="responses per step (default %(default)s)")
    parser.add_argument("--group", type=int, default=8, help="responses per prompt (default %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="tokens per response (default %(default)s)")
    parser.add_argument(
        "--max-tokens", type=int, default=16384, help="tokens per device and micro-batch (default %(default)s)"
    )
    parser.add_argument("--lr", type=float, default=1e-6, help="learning rate (default %(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps (default %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    given = parser.parse_args(arguments)

    config = config_from_dict(
        {
            "model": {"path": given.model, "dtype": given.dtype},
            "data": {"path": given.prompts, "epochs": None},
            "batch": {"samples": given.samples, "max_tokens": given.max_tokens},
            "rollout": {
                "reward": f"{Path(__file__).stem}:reward",
                "samples_per_prompt": given.group,
                "max_new_tokens": given.max_new_tokens,
            },
            "loss": {"kind": "clip", "advantage": "grpo", "clip": {"low": 0.2, "high": 0.28}},
            "optimizer": {"lr": given.lr},
            "checkpoint": {"every": 50},
            "run": {"folder": given.folder, "steps": given.steps},
        }
    )
    rewards: list[float] = []

    def on_step(metrics: Mapping[str, Any]) -> None:
        rewards.append(metrics["reward"])
        print(f"step {metrics['step'] + 1}  reward {metrics['reward']:.3f}  loss {metrics['loss']:+.4f}")

    result = train(config, on_step=on_step)
    print(f"{result.step} steps; some of the responses are in {given.folder}/rollouts.jsonl")
    return rewards


if __name__ == "__main__":
    main()
