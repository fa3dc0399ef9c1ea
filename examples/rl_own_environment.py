"""Train a model with a tool: it can call a calculator while it answers.

    python examples/rl_own_environment.py --model Qwen/Qwen3-0.6B --prompts prompts.jsonl --folder runs/tool

A row of the file has a `prompt`, and an `answer` that ends with the right number. `episode` is the environment: it asks
the policy for tokens and inserts the results of the calculator. Only tokens of the policy are trained.
`rollout.environment` names it as `module:function`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from padfree.config import config_from_dict
from padfree.rollout import Prompt
from padfree.rollout.environment import Policy, Trajectory
from padfree.rollout.environment.calculator import calculate
from padfree.train.run import train

MOST_QUESTIONS = 8


async def episode(prompt: Prompt, policy: Policy) -> Trajectory:
    """If a turn ends with `12*3=`, append `36` and let the policy continue. Any other turn is the answer."""
    questions = 0
    turn = await policy.generate()
    while turn.ended and questions < MOST_QUESTIONS and (asked := re.search(r"([\d+*/ -]+)=$", turn.text)):
        questions += 1
        if not policy.reply(calculate(asked[1]) or "error"):
            break  # no tokens left
        turn = await policy.generate()
    return policy.trajectory(reward=reward(turn.text, prompt.row), metrics={"questions": questions})


def reward(response: str, row: Mapping[str, Any]) -> float:
    """Return 1 if the last number of the response is the answer, 0.1 for another number, 0 without a number."""
    numbers = re.findall(r"-?\d+", response)
    if not numbers:
        return 0.0
    return 1.0 if int(numbers[-1]) == int(re.findall(r"-?\d+", str(row["answer"]))[-1]) else 0.1


def main(arguments: Sequence[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description="Train a model that can call a calculator.")
    parser.add_argument("--model", required=True, help="a folder or a Hub id")
    parser.add_argument("--prompts", required=True, nargs="+", help="JSONL files with prompt and answer")
    parser.add_argument("--folder", default="runs/tool", help="output folder (default %(default)s)")
    parser.add_argument("--samples", type=int, default=256, help="episodes per step (default %(default)s)")
    parser.add_argument("--group", type=int, default=8, help="episodes per prompt (default %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=512, help="tokens of all turns (default %(default)s)")
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
                "environment": f"{Path(__file__).stem}:episode",
                "samples_per_prompt": given.group,
                "max_new_tokens": given.max_new_tokens,
                "on_failure": "skip",
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
        questions = metrics["environment/questions"]
        print(f"step {metrics['step'] + 1}  reward {metrics['reward']:.3f}  questions {questions:.2f}")

    result = train(config, on_step=on_step)
    print(f"{result.step} steps; some of the episodes are in {given.folder}/rollouts.jsonl")
    return rewards


if __name__ == "__main__":
    main()
