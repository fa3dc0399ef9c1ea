"""Fine-tuning with AdamW's moments in float32, bfloat16 and int8 (`optimizer.state`): loss on held-out data, and speed.

    float32     a run of `padfree sft` from the same weights, with the same batches and learning rates
    bfloat16    the same, with moments in 2 + 2 bytes per weight
    int8        the same, with moments in about 1 + 1 bytes per weight

Each run evaluates the held-out data at its start, every `--every` steps, and at its end. The speed is the median of all
steps after the first 20, which compile and allocate memory.

    PYTHONPATH=src python bench/optimizer_state.py --model SMOLLM2 --train train.jsonl --test test.jsonl
    PYTHONPATH=src python bench/optimizer_state.py --model SMOLLM2 --train train.jsonl --test test.jsonl --device cpu \
        --steps 3 --samples 4 --held-out 8
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from timer import Stopwatch

import padfree
from padfree.optim.optimizer_settings import StateFormat
from padfree.record.file_names import EVALUATION

SET_UP = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--train", required=True)
    parser.add_argument("--test", required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--held-out", type=int, default=None, help="number of held-out samples; default: all")
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    print(
        f"torch {torch.__version__}, {torch.cuda.get_device_name() if torch.cuda.is_available() else 'CPU'}", flush=True
    )
    found = {state: run(state, arguments) for state in get_args(StateFormat)}
    plain = found["float32"]["held-out losses"]
    for state, own in found.items():
        losses = own["held-out losses"]
        print(
            f"{state:9s} held-out loss {' '.join(f'{each:.4f}' for each in losses.values())} at steps "
            f"{' '.join(losses)}; {losses[str(arguments.steps)] / plain[str(arguments.steps)] - 1:+.2%} of float32; "
            f"{own['ms']:.1f} ms per step, peak {own['GiB']:.2f} GiB, {own['seconds']:.0f} s",
            flush=True,
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))


def run(state: str, arguments: argparse.Namespace) -> dict[str, Any]:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder, Stopwatch() as watch:
        result = padfree.sft(
            model={"path": arguments.model, "dtype": "bfloat16"},
            data={"path": [arguments.train], "epochs": "none"},
            batch={"samples": arguments.samples, "max_tokens": 32768},
            optimizer={"lr": arguments.lr, "state": state},
            schedule={"kind": "cosine", "warmup": min(20, arguments.steps)},
            eval={"path": [arguments.test], "every": arguments.every, "samples": arguments.held_out or "none"},
            checkpoint={"every": "none", "export": False},
            run={"folder": f"{folder}/run", "steps": arguments.steps, "device": arguments.device},
        )
        lines = (Path(folder) / "run" / EVALUATION).read_text().splitlines()
    evaluations = [json.loads(line) for line in lines]
    losses = [step["loss"] for step in result.metrics]
    steady = [step["seconds"] for step in result.metrics[SET_UP:]] or [step["seconds"] for step in result.metrics]
    return {
        "held-out losses": {str(each["step"]): each["eval/loss"] for each in evaluations},
        "losses": losses,
        "ms": 1e3 * float(np.median(steady)),
        "GiB": max(step["memory_gib"] for step in result.metrics),
        "seconds": watch.seconds,
    }


if __name__ == "__main__":
    main()
