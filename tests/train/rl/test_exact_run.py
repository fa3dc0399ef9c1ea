"""Runs with `rollout.exact=true` on a CPU: sampler and trainer compute the same bits of every log-probability."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from padfree.config import config_from_dict
from padfree.testing.models import save_with_tokenizer
from padfree.train.run import train
from tests.ranks import run_ranks


def share_of_digits(response: str, row: Mapping[str, Any]) -> float:
    return sum(letter.isdigit() for letter in response) / 8


def settings_of(folder: Path, model: Path, **sections: Any) -> dict[str, Any]:
    data = folder.parent / "prompts.jsonl"
    rows = [{"prompt": f"{a}+{'1' * 7 * a}", "answer": str(a + 1)} for a in range(4)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings: dict[str, Any] = {
        "model": {"path": str(model), "dtype": "float32", "attention": "tiles"},
        "data": {"path": [str(data)], "epochs": None},
        "batch": {"samples": 6, "max_tokens": 60},
        "rollout": {
            "reward": "tests.train.rl.test_exact_run:share_of_digits",
            "samples_per_prompt": 3,
            "max_new_tokens": 8,
            "max_concurrent": 5,
            "exact": True,
        },
        "loss": {"kind": "clip", "temperature": 0.8},
        "optimizer": {"lr": 2e-3},
        "checkpoint": {"every": 1000, "export": False},
        "run": {"folder": str(folder), "steps": 2, "device": "cpu"},
    }
    for section, changes in sections.items():
        settings[section] = {**settings.get(section, {}), **changes}
    return settings


def run(rank: int, world: int, settings: dict[str, Any]) -> None:
    train(config_from_dict(settings))


def differences(folder: Path) -> list[float]:
    return [json.loads(line)["loss/sampler_difference"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_two_context_ranks_agree_with_the_sampler(tmp_path: Path) -> None:
    """The weights are sharded, and the sampler has copies of them and of the adapters."""
    model = save_with_tokenizer(tmp_path / "model", architecture="gemma2", writes_back=True)
    folder = tmp_path / "run"
    run_ranks(2, run, settings_of(folder, model, parallel={"context": 2}, lora={"rank": 4}))
    assert differences(folder) == [0.0] * 2


def test_adapters_agree_with_the_sampler(tmp_path: Path) -> None:
    """The first step of two has no gradient for A, because B begins with zeros; the third one has both."""
    model = save_with_tokenizer(tmp_path / "model", architecture="llama", writes_back=True)
    folder = tmp_path / "run"
    changes: dict[str, Any] = {"lora": {"rank": 4}, "run": {"folder": str(folder), "steps": 3, "device": "cpu"}}
    train(config_from_dict(settings_of(folder, model, **changes)))
    assert differences(folder) == [0.0] * 3
    merged = tmp_path / "merged"
    changes["run"]["folder"] = str(merged)
    train(config_from_dict(settings_of(merged, model, rollout={"exact": False}, **changes)))
    assert max(differences(merged)) > 0, "a difference is measured at all"


def test_experts_agree_with_the_sampler(tmp_path: Path) -> None:
    model = save_with_tokenizer(tmp_path / "model", architecture="qwen2_moe", writes_back=True)
    folder = tmp_path / "run"
    train(config_from_dict(settings_of(folder, model)))
    assert differences(folder) == [0.0] * 2
