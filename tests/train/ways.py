"""Small runs of every training command on the same problems."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from padfree.config import Config, config_from_dict
from padfree.rollout import Prompt
from padfree.rollout.environment import Policy, Trajectory
from padfree.rollout.environment.calculator import calculate

PLAYED: dict[str, Any] = {
    "rollout": {"environment": "tests.train.ways:tool", "samples_per_prompt": 2, "max_new_tokens": 40}
}
WAYS: Mapping[str, dict[str, Any]] = {
    "sft": {"loss": {"kind": "sft"}},
    "dpo": {"loss": {"kind": "dpo"}, "data": {"columns": {"margin": "unused"}}},  # for reward models
    "reward": {"loss": {"kind": "reward", "reward": {"margin": 0.1}}, "batch": {"share_prefixes": True}},
    "adapters": {"loss": {"kind": "reward"}, "lora": {"rank": 4}},
    "distill": {"loss": {"kind": "distill", "distill": {"divergence": "jsd"}}},
    "clip": {"loss": {"kind": "clip", "mini_batches": 2, "aggregation": "token-mean", "low": 0.2, "high": 0.28}},
    "gspo": {"loss": {"kind": "gspo", "mini_batches": 2, "aggregation": "sample-mean", "low": 3e-4, "high": 4e-4}},
    "cispo": {"loss": {"kind": "cispo", "mini_batches": 2, "aggregation": "group-mean", "high": 0.2}},
    "environment": {"loss": {"kind": "clip", "temperature": 0.8}, **PLAYED},
    "critic": {
        "loss": {"kind": "clip", "advantage": "gae", "mini_batches": 2},
        "critic": {"lr": 1e-2, "warmup": 1},
        **PLAYED,
    },
}
DATA = {"sft": "texts", "dpo": "pairs", "reward": "pairs", "adapters": "pairs", "distill": "texts"}
DATA |= dict.fromkeys(("environment", "critic"), "prompts") | dict.fromkeys(("clip", "gspo", "cispo"), "rollouts")
HELD_OUT: Mapping[str, Sequence[str]] = {
    "sft": ("texts", "guesses"),
    "dpo": ("pairs",),
    "reward": ("pairs",),
    "distill": ("texts",),
    "environment": ("prompts",),
}


async def tool(prompt: Prompt, policy: Policy) -> Trajectory:
    """The policy begins, a calculator adds the first two numbers of the problem, and two branches continue."""
    await policy.generate(max_tokens=6)
    question = "+".join(re.findall(r"\d+", prompt.row["prompt"])[:2])
    policy.add(f"<<{question}={calculate(question)}>>")
    branches = [policy.branch(), policy.branch()]
    await asyncio.gather(*(branch.generate(max_tokens=8) for branch in branches))
    for branch in branches:
        branch.reward = sum(letter in "aeiou0123456789" for letter in branch.text) / 20
    return policy.trajectory(metrics={"calls": 1})


def write_data(folder: Path, problems: Sequence[tuple[str, str]]) -> None:
    """Write problems and solutions as prompts, pairs, SFT texts, and rollouts with right and wrong answers."""
    shifted = [solution for _, solution in (*problems[1:], problems[0])]
    pairs, rollouts = [], []
    for number, ((problem, solution), other) in enumerate(zip(problems, shifted, strict=True)):
        pairs.append({"prompt": problem, "chosen": solution, "rejected": other, "margin": number % 3 / 4})
        for response, reward in ((solution, 1.0), (other, 0.0)):
            rollouts.append({"prompt": problem, "response": response, "reward": reward, "group": f"problem {number}"})
    write(folder, "pairs", pairs)
    write(folder, "rollouts", rollouts)
    write(folder, "prompts", [{"prompt": problem} for problem, _ in problems])
    write(folder, "texts", [{"prompt": problem, "response": solution} for problem, solution in problems])
    write(folder, "guesses", [row for row in rollouts if not row["reward"]])


def write(folder: Path, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def way_config(folder: Path, way: str, name: str, **sections: Any) -> Config:
    """A run of `way` in `folder / name`; `folder` has the data, `model` and `teacher`."""
    values: dict[str, Any] = {
        "model": {"path": str(folder / "model")},
        "data": {"path": [str(folder / f"{DATA[way]}.jsonl")], "epochs": None},
        "batch": {"samples": 4, "max_tokens": 1024},
        "optimizer": {"lr": 2e-3, "eps": 1e-3},
        "checkpoint": {"every": 1000},  # so that there is a checkpoint at the end
        "run": {"folder": str(folder / name), "steps": 2, "device": "cpu"},
    }
    if way in ("dpo", "distill"):  # a reference other than the model, so that no difference is 0 except for rounding
        values["reference" if way == "dpo" else "teacher"] = {"path": str(folder / "teacher")}
    for given in (WAYS[way], sections):
        for section, changes in given.items():
            values[section] = {**values.get(section, {}), **changes}
    return config_from_dict(values)


def held_out(folder: Path, way: str) -> dict[str, Any]:
    """Settings of an evaluation at the start and at the end; empty for commands without evaluation."""
    names = HELD_OUT.get(way, ())
    return {"path": [str(folder / f"{name}.jsonl") for name in names], "samples": 4} if names else {}
