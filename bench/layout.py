"""Context-parallel layouts: how evenly a layout divides the work of a pack over ranks, and what it costs.

    column     meaning
    balance    largest causal work of a rank divided by the mean; every rank has the same number of tokens
    cost       largest modelled cost of a rank divided by the mean; counts whole tiles and the cost of reading keys
    total      modelled cost of all ranks divided by the modelled cost of the pack on one rank
    pieces     number of pieces into which documents are cut, on all ranks; at least S, the number of documents
    keys       keys read by all ranks divided by the tokens of the pack: 1 if no document is cut
    most keys  keys of the rank that reads the most, divided by its own tokens
    sent       K and V tokens that `allgather` sends, relative to gathering the whole pack on every rank
    layout ms  time of make_layout, the minimum of several calls
    plan ms    time of the rest of `shard` on the host, for one rank

The packs: many short documents; log-normal lengths; one document of 16k among short ones; and GSM8K solutions (only if
PADFREE_GSM8K names their folder).

    PYTHONPATH=src python bench/layout.py
    PYTHONPATH=src python bench/layout.py --tokens 131072 --world 8 --json layout.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from timer import quickest

from padfree.batch import Layout
from padfree.choices import LayoutKind
from padfree.cp import keys_read, make_layout, modelled_cost, pieces, work
from padfree.cp.context_plan import ContextPlan
from padfree.cp.keys import key_traffic, prepare_keys
from padfree.segments import Segments

TOKENS = (32768, 131072)
WORLDS = (2, 4, 8, 16, 32)
KINDS: tuple[LayoutKind, ...] = get_args(LayoutKind)
GOAL_BALANCE, GOAL_MILLISECONDS = 1.02, 5.0
GSM8K = Path(os.environ.get("PADFREE_GSM8K", Path(__file__).parents[2] / "shared" / "data" / "gsm8k"))

Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="device of the plan")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--world", type=int, nargs="+", default=WORLDS)
    parser.add_argument("--repeats", type=int, default=20, help="timed calls; the minimum counts")
    parser.add_argument("--json", help="write the results to this file")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    versions = {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": torch.__version__,
        "hardware": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
    }
    print(", ".join(f"{name} {value}" for name, value in versions.items()), "\n")

    results: list[Row] = []
    for num_tokens in arguments.tokens:
        for mix, segments in packs_of(num_tokens).items():
            for world in arguments.world:
                if num_tokens % world == 0:
                    results += [measure(mix, segments, world, kind, device, arguments.repeats) for kind in KINDS]
    columns = list(results[0])
    widths = {name: max(len(name), *(len(shown(row[name])) for row in results)) for name in columns}
    print("  ".join(name.rjust(widths[name]) for name in columns))
    for row in results:
        print("  ".join(shown(row[name]).rjust(widths[name]) for name in columns))

    balanced = [row for row in results if row["layout"] == "balanced"]
    worst = max(row["balance"] for row in balanced)
    slowest = max(row["layout ms"] for row in balanced)
    print(f"\nbalanced: balance at most {worst:.4f} (goal {GOAL_BALANCE}), ", end="")
    print(f"layout in at most {slowest:.2f} ms (goal {GOAL_MILLISECONDS:g})")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"versions": versions, "rows": results}, indent=1))


def packs_of(num_tokens: int) -> dict[str, Segments]:
    rng = np.random.default_rng(0)
    log_normal = np.exp(rng.normal(np.log(490), 1.0, num_tokens // 64))
    rows = {
        "short": filled(rng.integers(32, 257, num_tokens // 32), num_tokens),
        "log-normal": filled(np.clip(log_normal, 1, 8192).astype(np.int64), num_tokens),
    }
    if num_tokens > 16384:
        short = rng.integers(64, 513, num_tokens // 64)
        rows["one 16k"] = filled(np.insert(short, 20, 16384), num_tokens)
    if (GSM8K / "solutions.jsonl").exists():
        lengths = gsm8k_lengths()
        rows["GSM8K"] = filled(rng.permutation(np.tile(lengths, 1 + num_tokens // int(lengths.sum()))), num_tokens)
    return rows


def filled(lengths: NDArray[np.int64], num_tokens: int) -> Segments:
    """Return a pack of as many of these documents as fit, and a pad."""
    kept = lengths[: int(np.searchsorted(np.cumsum(lengths), num_tokens, side="right"))]
    return Segments.from_lengths(kept, pad_length=num_tokens - int(kept.sum()))


def gsm8k_lengths() -> NDArray[np.int64]:
    words = re.compile(r"[A-Za-z]+|\d|[^\sA-Za-z\d]")
    lengths = []
    for line in (GSM8K / "solutions.jsonl").read_text().splitlines():
        entry = json.loads(line)
        solutions = [value["solution"] for value in entry.values() if isinstance(value, dict)]
        lengths += [len(words.findall(entry["question"] + solution)) for solution in solutions]
    assert lengths, "no solutions found"
    return np.array(lengths)


def measure(mix: str, segments: Segments, world: int, kind: LayoutKind, device: torch.device, repeats: int) -> Row:
    num_tokens, share = segments.num_tokens, segments.num_tokens // world
    layout = make_layout(segments, world, kind)
    check(layout, segments)
    load, keys, cost = work(layout, segments), keys_read(layout, segments), modelled_cost(layout, segments)
    plan = ContextPlan(layout, segments, 0, device)
    return {
        "tokens": num_tokens,
        "row": mix,
        "S": segments.num_segments,
        "ranks": world,
        "layout": kind,
        "balance": float(load.max() / load.mean()),
        "cost": float(cost.max() / cost.mean()),
        "total": float(cost.sum() / modelled_cost(make_layout(segments, 1), segments).sum()),
        "pieces": int(pieces(layout).sum()),
        "keys": float(keys.sum() / num_tokens),
        "most keys": float(keys.max() / share),
        "sent": float(key_traffic(plan.pieces).sum() / (num_tokens * (world - 1))),
        "layout ms": 1e3 * quickest(lambda: make_layout(segments, world, kind), repeats)[0],
        "plan ms": 1e3 * quickest(lambda: prepare_keys(ContextPlan(layout, segments, world // 2, device)), repeats)[0],
    }


def check(layout: Layout, segments: Segments) -> None:
    """Check that every token is on exactly one rank, that ranks have equally many tokens, and that no work is lost."""
    owner = np.full(layout.num_tokens, -1)
    for rank, (starts, ends) in enumerate(zip(layout.starts, layout.ends, strict=True)):
        for start, end in zip(starts, ends, strict=True):
            assert (owner[start:end] == -1).all(), "a token on two ranks"
            owner[start:end] = rank
    assert (np.bincount(owner, minlength=layout.world) == layout.num_tokens // layout.world).all(), "unequal shares"
    lengths = segments.lengths
    assert work(layout, segments).sum() == (lengths * (lengths + 1) // 2).sum(), "work was lost"


def shown(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
