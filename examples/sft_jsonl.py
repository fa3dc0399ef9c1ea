"""Fine-tune a model on a JSONL file.

    python examples/sft_jsonl.py --model Qwen/Qwen3-0.6B --data train.jsonl --folder runs/sft
    torchrun --nproc-per-node 8 examples/sft_jsonl.py --model Qwen/Qwen3-0.6B --data train.jsonl --folder runs/sft

A row of the file has `messages`, or `prompt` and `response`, or `text`. Run the same command again to resume a stopped
run. `padfree sft` does the same without a script.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from padfree.config import config_from_dict
from padfree.train.run import train


def main(arguments: Sequence[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description="Fine-tune a model on a JSONL file.")
    parser.add_argument("--model", required=True, help="a folder or a Hub id")
    parser.add_argument("--data", required=True, nargs="+", help="JSONL files")
    parser.add_argument("--folder", default="runs/sft", help="output folder (default %(default)s)")
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
            "model": {"path": given.model, "dtype": given.dtype},
            "data": {"path": given.data, "epochs": given.epochs},
            "batch": {"samples": given.samples, "max_tokens": given.max_tokens},
            "optimizer": {"lr": given.lr},
            "checkpoint": {"every": 200},
            "run": {"folder": given.folder},
        }
    )
    losses: list[float] = []

    def on_step(metrics: Mapping[str, Any]) -> None:
        losses.append(metrics["loss"])
        print(f"step {metrics['step'] + 1}  loss {metrics['loss']:.4f}  {metrics['tokens_per_second']:,.0f} tokens/s")

    result = train(config, on_step=on_step)
    print(f"{result.step} steps; transformers can load the model from {given.folder}/model")
    return losses


if __name__ == "__main__":
    main()
