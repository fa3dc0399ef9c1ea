"""How much a demo does, and the settings of its three runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from padfree.config import Config, config_from_dict


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """How much is done."""

    rows: int = 4000
    prompts: int = 512
    hidden: int = 64
    samples: int = 40  # of a step of fine-tuning
    sft_steps: int = 200
    compared: int = 12  # of them padded, too
    responses: int = 128  # of a step of RL
    group: int = 8
    rl_steps: int = 20
    max_new_tokens: int = 64
    gpu_hidden: int = 1024  # of the model for a GPU
    gpu_layers: int = 8
    gpu_samples: int = 512  # of one of its steps
    gpu_steps: int = 16


SIZES = Sizes()


def sft_config(folder: Path, sizes: Sizes) -> Config:
    """The settings of the fine-tuning run."""
    return config_from_dict(
        {
            "model": {"path": str(folder / "model")},
            "data": {"path": [str(folder / "data" / "train.jsonl")], "epochs": None},
            "batch": {"samples": sizes.samples, "max_tokens": 8192},
            "optimizer": {"lr": 8e-3, "eps": 1e-6},
            "schedule": {"kind": "linear", "warmup": sizes.sft_steps // 20, "final": 0.1},
            "checkpoint": {"every": 25},
            "run": {"folder": str(folder / "sft"), "steps": sizes.sft_steps, "device": "cpu"},
        }
    )


def rl_config(folder: Path, sizes: Sizes) -> Config:
    """The settings of the run with rewards; it begins with the fine-tuned model."""
    return config_from_dict(
        {
            "model": {"path": str(folder / "sft" / "model")},
            "data": {"path": [str(folder / "data" / "prompts.jsonl")], "epochs": None},
            "batch": {"samples": sizes.responses, "max_tokens": 8192},
            "rollout": {
                "reward": "number_after_hashes",
                "group": sizes.group,
                "max_new_tokens": sizes.max_new_tokens,
            },
            "loss": {"kind": "clip", "advantage": "grpo"},
            "optimizer": {"lr": 1e-3},
            "checkpoint": {"every": 5},
            "run": {"folder": str(folder / "rl"), "steps": sizes.rl_steps, "device": "cpu"},
        }
    )


def gpu_config(folder: Path, sizes: Sizes) -> Config:
    """The settings of the larger model's steps."""
    return config_from_dict(
        {
            "model": {"path": str(folder / "gpu" / "model"), "dtype": "bfloat16"},
            "data": {"path": [str(folder / "data" / "train.jsonl")], "epochs": None},
            "batch": {"samples": sizes.gpu_samples, "max_tokens": 65536},
            "optimizer": {"lr": 1e-4},
            "checkpoint": {"export": False},
            "run": {"folder": str(folder / "gpu" / "run"), "steps": sizes.gpu_steps, "device": "cuda"},
        }
    )
