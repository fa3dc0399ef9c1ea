"""Train a model on preference pairs with DPO.

    python examples/dpo_pairs.py --model Qwen/Qwen3-0.6B --data pairs.jsonl --folder runs/dpo
    torchrun --nproc-per-node 8 examples/dpo_pairs.py --model Qwen/Qwen3-0.6B --data pairs.jsonl --folder runs/dpo

A row of the file has `prompt`, `chosen` and `rejected`. The reference is the initial model. `padfree dpo` does the same
without a script.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from padfree.config import config_from_dict
from padfree.train.run import train


def main(arguments: Sequence[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description="Train a model on preference pairs with DPO.")
    parser.add_argument("--model", required=True, help="a folder or a Hub id")
    parser.add_argument("--data", required=True, nargs="+", help="JSONL files")
    parser.add_argument("--folder", default="runs/dpo", help="output folder (default %(default)s)")
    parser.add_argument("--variant", default="sigmoid", help="sigmoid, hinge, ipo, simpo or orpo (default %(default)s)")
    parser.add_argument("--beta", type=float, default=0.1, help="strength of the KL constraint (default %(default)s)")
    parser.add_argument("--samples", type=int, default=64, help="answers per step (default %(default)s)")
    parser.add_argument(
        "--max-tokens", type=int, default=16384, help="tokens per device and micro-batch (default %(default)s)"
    )
    parser.add_argument("--lr", type=float, default=5e-7, help="learning rate (default %(default)s)")
    parser.add_argument("--epochs", type=int, default=1, help="passes over the data (default %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    given = parser.parse_args(arguments)

    config = config_from_dict(
        {
            "model": {"path": given.model, "dtype": given.dtype},
            "data": {"path": given.data, "epochs": given.epochs},
            "loss": {"kind": "dpo", "dpo": {"variant": given.variant, "beta": given.beta}},
            "batch": {"samples": given.samples, "max_tokens": given.max_tokens},
            "optimizer": {"lr": given.lr},
            "run": {"folder": given.folder},
        }
    )
    margins: list[float] = []

    def on_step(metrics: Mapping[str, Any]) -> None:
        margins.append(metrics["loss/margin"])
        right = f"the chosen answer is preferred in {metrics['loss/accuracy']:.0%} of the pairs"
        print(f"step {metrics['step'] + 1}  loss {metrics['loss']:.4f}  {right}")

    result = train(config, on_step=on_step)
    print(f"{result.step} steps; transformers can load the model from {given.folder}/model")
    return margins


if __name__ == "__main__":
    main()
