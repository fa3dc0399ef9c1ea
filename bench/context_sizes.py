"""How long ranks wait for each other, with a fixed number of context ranks or with one that is chosen per pack.

The script plans steps and does not run them. These are the inputs and the columns of its table:

    lengths    log-normal: median 2,500, sigma 1.3, cut at 131,072, and one sample of 131,072 tokens
    cost       FLOPs of an 8B model, from its sizes; the cost of a pack is divided among the ranks that share it
    balance    the cost of the slowest rank, summed over micro-batches, divided by the mean over ranks; 1 is perfect
    time       time of the step, relative to the best in the table
    longest    tokens of the longest sample that the ranks can hold
    over       the number of longer samples, which a run would refuse; here each gets a pack of its own, as if memory
               were unlimited

    PYTHONPATH=src python bench/context_sizes.py
    PYTHONPATH=src python bench/context_sizes.py --ranks 64 --max-tokens 16384 --samples 512 --seeds 4
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path
from typing import Any

import numpy as np
from timer import quickest

from padfree.packing import CostModel, plan_step
from padfree.packing.context_sizes import context_sizes

LONGEST, MEDIAN, SIGMA = 131_072, 2_500, 1.3
QWEN3_8B = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
}
GOAL = 1.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=16384, help="per rank")
    parser.add_argument("--samples", type=int, nargs="+", default=(256, 512, 2048), help="per step")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", help="write the results to this file")
    arguments = parser.parse_args()
    print(f"{platform.machine()}, numpy {np.__version__}, {arguments.ranks} ranks of {arguments.max_tokens:,} tokens\n")
    print(
        f"{'samples':>8}{'seed':>6}{'context':>9}{'micro-batches':>15}{'balance':>9}{'time':>7}{'longest':>11}", end=""
    )
    print(f"{'over':>6}{'plan ms':>9}  widths")
    results: list[dict[str, Any]] = []
    for samples in arguments.samples:
        for seed in range(arguments.seeds):
            rows = [measured(lengths_of(samples, seed), arguments, context) for context in ("auto", 1, 2, 4, 8)]
            best = min(row["cost"] for row in rows)
            for row in rows:
                row |= {"samples": samples, "seed": seed, "time": row["cost"] / best}
                print(
                    f"{samples:>8}{seed:>6}{row['context']:>9}{row['micro_batches']:>15}{row['balance']:>9.3f}"
                    f"{row['time']:>7.2f}{row['longest']:>11,}{row['over']:>6}{row['plan_ms']:>9.0f}  {row['widths']}"
                )
            results += rows
    worst = max(row["balance"] for row in results if row["context"] == "auto")
    print(f"\nauto: balance at most {worst:.3f} (goal {GOAL})")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(results, indent=1))


def lengths_of(samples: int, seed: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(np.log(MEDIAN), SIGMA, samples), 16, LONGEST).astype(np.int64)
    lengths[0] = LONGEST
    return lengths


def measured(lengths: np.ndarray[Any, np.dtype[np.int64]], arguments: argparse.Namespace, context: Any) -> Any:
    cost = CostModel.from_config(QWEN3_8B)
    ranks, cap = arguments.ranks, arguments.max_tokens
    width, sizes = (1, context_sizes(ranks)) if context == "auto" else (context, (1,))
    seconds, plan = quickest(
        lambda: plan_step(
            lengths, ranks=ranks // width, max_tokens=cap * width, cost=cost, overlong="alone", contexts=sizes
        )
    )
    longest = cap * width * sizes[-1]
    widths = "" if plan.widths is None else " ".join(map(str, np.unique(plan.widths)))
    return {
        "context": context,
        "micro_batches": plan.num_micro_batches,
        "balance": plan.imbalance,
        "cost": plan.step_cost / width,
        "longest": longest,
        "over": int((lengths > longest).sum()),
        "plan_ms": seconds * 1e3,
        "widths": widths,
    }


if __name__ == "__main__":
    main()
