"""Aggregate token losses: one weighted sum compared with a Python loop over samples.

    loop        Σᵢ mean over the scored tokens of sample i: split by lengths, one masked mean each, sum
    weighted    (weights * losses).sum(); the weights are computed once per global batch

The same number of tokens is divided into 64 to 4,096 samples. Every result is checked against float64. Times are
medians of single synchronised calls. Two more columns are measured:

    make      computing the token weights, once per step
    compat    `padfree.compat.slime.sum_of_sample_mean`, which has the signature of the loop

    PYTHONPATH=src python bench/aggregate.py --device cpu
"""

from __future__ import annotations

import argparse
import json
import platform

import numpy as np
import torch
from timer import median_seconds
from torch import Tensor

from padfree.batch import IGNORE
from padfree.compat.slime_losses import sum_of_sample_mean
from padfree.losses import batch_weights, token_weights

NUM_TOKENS = 600_000
NUM_SAMPLES = (64, 256, 1024, 4096)
HEADLINE = 1024
GOALS = {"cpu": 20.0, "cuda": 200.0}
FLAT = 1.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--tokens", type=int, default=NUM_TOKENS)
    parser.add_argument("--json", help="write the results to this file")
    arguments = parser.parse_args()

    device = torch.device(arguments.device)
    hardware = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or platform.machine()
    threads = torch.get_num_threads()
    print(f"torch {torch.__version__}, python {platform.python_version()}, {hardware}, {threads} CPU threads")
    print(f"{arguments.tokens} tokens, float32, milliseconds per call\n")

    rows = [measure(count, arguments.tokens, device) for count in NUM_SAMPLES]
    columns = list(rows[0])
    print("  ".join(f"{name:>12}" for name in columns))
    for row in rows:
        print("  ".join(f"{row[name]:>12.4g}" for name in columns))

    headline = next(row for row in rows if row["samples"] == HEADLINE)
    times = [row["weighted"] for row in rows]
    flatness = max(times) / min(times)
    print(f"\n{HEADLINE} samples: weighted is {headline['speedup']:.0f} times as fast as the loop", end=" ")
    print(f"(goal: at least {GOALS[device.type]:.0f})")
    print(f"{NUM_SAMPLES[0]} to {NUM_SAMPLES[-1]} samples: slowest / fastest weighted {flatness:.2f} (goal: {FLAT})")
    if arguments.json:
        report = {
            "benchmark": "aggregate",
            "torch": torch.__version__,
            "python": platform.python_version(),
            "hardware": hardware,
            "threads": threads,
            "tokens": arguments.tokens,
            "rows": rows,
            "speedup": headline["speedup"],
            "flatness": flatness,
        }
        with open(arguments.json, "w") as file:
            json.dump(report, file, indent=1)


def measure(num_samples: int, num_tokens: int, device: torch.device) -> dict[str, float]:
    rng = np.random.default_rng(0)
    cuts = np.sort(rng.choice(np.arange(1, num_tokens), num_samples - 1, replace=False))
    lengths = np.diff(cuts, prepend=0, append=num_tokens)
    # Entry t of a pack belongs to the prediction of token t + 1, so the last entry of a sample is never scored.
    masks = [rng.random(length) < 0.8 for length in lengths]
    weights = token_weights("sum-of-sample-mean", masks)
    scored = [np.append(mask[1:], False) for mask in masks]

    losses = torch.from_numpy(rng.normal(size=num_tokens)).to(device, torch.float32)
    row_weights = torch.from_numpy(np.concatenate(weights)).to(device)
    row_masks = [torch.from_numpy(mask).to(device) for mask in scored]
    labels = torch.where(torch.cat(row_masks), 1, IGNORE)
    sample_index = torch.from_numpy(np.repeat(np.arange(num_samples), lengths).astype(np.int32)).to(device)
    sizes = [int(length) for length in lengths]

    def loop() -> Tensor:
        parts = losses.split_with_sizes(sizes)
        means = [(part * mask).sum() / mask.sum().clamp(min=1) for part, mask in zip(parts, row_masks, strict=True)]
        return torch.stack(means).sum()

    def weighted() -> Tensor:
        return (row_weights * losses).sum()

    def make_device() -> Tensor:
        return batch_weights("sum-of-sample-mean", labels, sample_index, num_samples, divisor=1.0)

    wide = losses.double().cpu().numpy()
    exact = sum(float(part[mask].mean()) for part, mask in zip(np.split(wide, cuts), scored, strict=True) if mask.any())
    for name, function in {"loop": loop, "weighted": weighted}.items():
        assert abs(float(function()) - exact) < 1e-4 * max(1.0, abs(exact)), f"{name}: {float(function())}, not {exact}"
    compat = float(sum_of_sample_mean(losses, sizes, row_masks))
    assert abs(compat - exact) < 1e-4 * max(1.0, abs(exact)), f"compat: {compat}, not {exact}"
    torch.testing.assert_close(make_device(), row_weights, rtol=1e-6, atol=0)

    times: dict[str, float] = {
        "samples": num_samples,
        "loop": 1e3 * median_seconds(loop, device, repeats=5),
        "weighted": 1e3 * median_seconds(weighted, device, repeats=50),
        "compat": 1e3 * median_seconds(lambda: sum_of_sample_mean(losses, sizes, row_masks), device, repeats=10),
        "make host": 1e3 * median_seconds(lambda: token_weights("sum-of-sample-mean", masks), device, repeats=10),
        "make device": 1e3 * median_seconds(make_device, device, repeats=10),
    }
    return {**times, "speedup": times["loop"] / times["weighted"]}


if __name__ == "__main__":
    main()
