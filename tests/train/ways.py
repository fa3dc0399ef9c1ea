"""Small runs of every way to train besides SFT and plain RL, all on the same problems."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from padfree.config import Config, config_from_dict

WAYS = ("dpo", "distill", "reward", "critic")
LOSSES: Mapping[str, dict[str, Any]] = {
    "dpo": {"loss": {"kind": "dpo"}},
    "reward": {"loss": {"kind": "reward", "reward": {"margin": 0.1}}},
    "distill": {"loss": {"kind": "distill", "distill": {"divergence": "jsd"}}},
    "critic": {
        "loss": {"kind": "clip", "advantage": "gae", "mini_batches": 2},
        "critic": {"lr": 1e-2, "warmup": 1},
    },
}


def write_data(folder: Path, problems: Sequence[tuple[str, str]]) -> None:
    """Problems and their solutions as pairs, as text to learn, and as rollouts: right ones, and some of other ones."""
    shifted = [solution for _, solution in (*problems[1:], problems[0])]
    pairs, texts, rollouts = [], [], []
    for number, ((problem, solution), other) in enumerate(zip(problems, shifted, strict=True)):
        pairs.append({"prompt": problem, "chosen": solution, "rejected": other, "margin": number % 3 / 4})
        texts.append({"prompt": problem, "response": solution})
        for response, reward in ((solution, 1.0), (other, 0.0)):
            rollouts.append({"prompt": problem, "response": response, "reward": reward, "group": f"problem {number}"})
    for name, rows in (("pairs", pairs), ("texts", texts), ("rollouts", rollouts)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def way_config(folder: Path, way: str, name: str, **sections: Any) -> Config:
    """A run of `way` in `folder / name`; `folder` has the data, `model` and `teacher`."""
    data = {"distill": "texts", "critic": "rollouts"}.get(way, "pairs")
    values: dict[str, Any] = {
        "model": {"path": str(folder / "model")},
        "data": {"path": [str(folder / f"{data}.jsonl")], "epochs": None},
        "batch": {"samples": 4, "max_tokens": 1024},
        "optimizer": {"lr": 2e-3, "eps": 1e-3},
        "run": {"folder": str(folder / name), "steps": 2, "device": "cpu"},
        **LOSSES[way],
    }
    if way in ("dpo", "distill"):  # a reference that is not the model itself: no difference is 0 but for rounding
        values["reference" if way == "dpo" else "teacher"] = {"path": str(folder / "teacher")}
    for section, changes in sections.items():
        values[section] = {**values.get(section, {}), **changes}
    return config_from_dict(values)
