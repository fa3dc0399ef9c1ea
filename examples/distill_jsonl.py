"""Distil a teacher into a student on a JSONL file.

    python examples/distill_jsonl.py --student Qwen/Qwen3-0.6B --teacher Qwen/Qwen3-4B --data train.jsonl
    torchrun --nproc-per-node 8 examples/distill_jsonl.py --student Qwen/Qwen3-0.6B --teacher Qwen/Qwen3-4B --data ...

The two models must have the same vocabulary. `padfree distill` does the same without a script.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from padfree.config import config_from_dict
from padfree.train.run import train


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Train the student, and return the mean divergence from the teacher in every step."""
    parser = argparse.ArgumentParser(description="Distil a teacher into a student on a JSONL file.")
    parser.add_argument("--student", required=True, help="a folder or a Hub id")
    parser.add_argument("--teacher", required=True, help="a folder or a Hub id with the same vocabulary")
    parser.add_argument("--data", required=True, nargs="+", help="JSONL files")
    parser.add_argument("--folder", default="runs/distill", help="output folder (default %(default)s)")
    parser.add_argument("--divergence", default="forward-kl", choices=["forward-kl", "reverse-kl", "jsd"])
    parser.add_argument("--samples", type=int, default=64, help="samples per step (default %(default)s)")
    parser.add_argument(
        "--max-tokens", type=int, default=16384, help="tokens per device and micro-batch (default %(default)s)"
    )
    parser.add_argument("--lr", type=float, default=1e-5, help="learning rate (default %(default)s)")
    parser.add_argument("--epochs", type=int, default=3, help="passes over the data (default %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    given = parser.parse_args(arguments)
    config = config_from_dict(
        {
            "model": {"path": given.student, "dtype": given.dtype},
            "teacher": {"path": given.teacher},
            "loss": {"kind": "distill", "distill": {"divergence": given.divergence}},
            "data": {"path": given.data, "epochs": given.epochs},
            "batch": {"samples": given.samples, "max_tokens": given.max_tokens},
            "optimizer": {"lr": given.lr},
            "run": {"folder": given.folder},
        }
    )
    divergences: list[float] = []

    def show(metrics: Mapping[str, Any]) -> None:
        divergences.append(metrics["loss/divergence"])
        print(f"step {metrics['step'] + 1}  divergence {metrics['loss/divergence']:.4f}")

    train(config, on_step=show)
    return divergences


if __name__ == "__main__":
    main()
