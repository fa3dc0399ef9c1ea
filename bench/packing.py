"""Packing: `fill`, `balance`, `plan_step` and `pack` compared with common alternatives.

    PYTHONPATH=src python bench/packing.py [--quick] [--gsm8k ../shared/data/gsm8k] [--json results.json]

The script checks every result: each sample occurs once, and no bin, part or micro-batch exceeds its capacity. The
alternatives are:

    TRL       `trl.pack_dataset(strategy="bfd")`, on one-byte tokens, so that copying them costs little
    BFD, FFD  best-fit and first-fit decreasing, one sample at a time
    KK        textbook Karmarkar-Karp: a heap of k-way partial partitions, as RL frameworks use to balance ranks
    lists     packs built from Python lists and `torch.tensor`, as in frameworks that keep rollouts in lists

Lengths are log-normal (median 490, sigma 1, cut at 8192), or those of GSM8K in words and punctuation marks.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import multiprocessing
import os
import platform
import re
import threading
import tracemalloc
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from timer import quickest

from padfree.packing.balance import balance
from padfree.packing.collate import pack
from padfree.packing.cost import CostModel
from padfree.packing.fill import fill
from padfree.packing.step_plan import plan_step
from padfree.sample import Sample

T = TypeVar("T")
Lengths = NDArray[np.int64]

GSM8K = Path(__file__).resolve().parents[1] / "../shared/data/gsm8k"
CAPACITY = 8192
PACK = 16384
QWEN3_4B: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 2560,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 9728,
    "vocab_size": 151936,
}


@dataclass(frozen=True)
class Sizes:
    fill: int = 1_000_000
    fill_large: int = 10_000_000
    fill_others: int = 100_000  # for TRL and first-fit decreasing, which would take minutes for a million samples
    balance: tuple[int, int] = (8192, 256)
    draws: int = 1000
    plan: tuple[int, int] = (4096, 64)
    pack_tokens: int = 16_000_000
    repeats: int = 5


QUICK = Sizes(200_000, 1_000_000, 10_000, (2048, 64), 50, (1024, 16), 1_000_000, 3)


@dataclass
class Report:
    """Results (section, data, what, value, unit, goal, met), printed at once and kept for the JSON file."""

    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, section: str, data: str, what: str, value: float, unit: str = "", goal: str = "") -> None:
        """Print a result, and keep it. `goal`: a bound of the value, e.g. ">= 50" or "<= 1.03"."""
        sign, _, limit = goal.partition(" ")
        met = bool(goal) and (value >= float(limit) if sign == ">=" else value <= float(limit))
        verdict = ("met" if met else "MISSED") if goal else ""
        self.rows.append({"section": section, "data": data, "what": what, "value": value, "unit": unit, "goal": goal})
        print(f"{section:<10}{data:<12}{what:<60}{value:>12,.6g} {unit:<14}{goal:<10}{verdict}", flush=True)

    def note(self, section: str, text: str) -> None:
        self.rows.append({"section": section, "note": text})
        print(f"{section:<10}{text}", flush=True)


def log_normal(count: int, seed: int) -> Lengths:
    draws: NDArray[np.float64] = np.random.default_rng(seed).standard_normal(count)
    return np.asarray(np.clip(np.rint(490 * np.exp(draws)), 1, CAPACITY), dtype=np.int64)


def gsm8k(folder: Path) -> Lengths | None:
    files = [folder / "train.jsonl", folder / "test.jsonl"]
    if not all(path.is_file() for path in files):
        return None
    rows = [json.loads(line) for path in files for line in path.read_text(encoding="utf-8").splitlines()]
    texts = [f"{row['question']}\n{row['answer']}" for row in rows]
    return np.fromiter((len(re.findall(r"\w+|[^\w\s]", text)) for text in texts), np.int64, len(texts))


def best_fit_decreasing(lengths: Lengths, capacity: int) -> list[list[int]]:
    bins: list[list[int]] = []
    waiting: dict[int, list[list[int]]] = {}
    max_new_tokens_each: list[int] = []
    values = lengths.tolist()
    for index in np.argsort(-lengths, kind="stable").tolist():
        length = values[index]
        place = bisect_left(max_new_tokens_each, length)
        max_new_tokens = max_new_tokens_each[place] if place < len(max_new_tokens_each) else capacity
        if place == len(max_new_tokens_each):
            bins.append([])
            target = bins[-1]
        else:
            target = waiting[max_new_tokens].pop()
            if not waiting[max_new_tokens]:
                del waiting[max_new_tokens], max_new_tokens_each[place]
        target.append(index)
        left = max_new_tokens - length
        if left not in waiting:
            waiting[left] = []
            insort(max_new_tokens_each, left)
        waiting[left].append(target)
    return bins


def first_fit_decreasing(lengths: Lengths, capacity: int) -> list[list[int]]:
    leaves = 1 << (len(lengths) - 1).bit_length()
    tree = [capacity] * (2 * leaves)  # node i: the most free space in any bin of its subtree
    bins: list[list[int]] = [[] for _ in range(len(lengths))]
    values = lengths.tolist()
    for index in np.argsort(-lengths, kind="stable").tolist():
        node = 1
        while node < leaves:
            node *= 2
            if tree[node] < values[index]:
                node += 1
        bins[node - leaves].append(index)
        tree[node] -= values[index]
        while node > 1:
            node //= 2
            tree[node] = max(tree[2 * node], tree[2 * node + 1])
    return [indices for indices in bins if indices]


def karmarkar_karp(lengths: Sequence[int], k: int) -> list[list[int]]:
    """Karmarkar-Karp differencing: merge the two partial partitions with the widest spread, heavy parts with light."""
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for index, length in enumerate(lengths):
        heap.append((-length, index, [(length, [index]), *((0, []) for _ in range(k - 1))]))
    heapq.heapify(heap)
    order = len(heap)
    while len(heap) > 1:
        _, _, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        joined = [(a + b, x + y) for (a, x), (b, y) in zip(first, reversed(second), strict=True)]
        joined.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], order, joined))
        order += 1
    return [indices for _, indices in heap[0][2]]


def lists_to_tensors(
    rows: Sequence[tuple[list[int], list[bool]]], parts: Sequence[Sequence[int]], weight: float
) -> list[tuple[torch.Tensor, ...]]:
    """Build the output of `pack` from Python lists."""
    packs = []
    for part in parts:
        ids: list[int] = []
        positions: list[int] = []
        labels: list[int] = []
        weights: list[float] = []
        owners: list[int] = []
        cu_seqlens = [0]
        for place, index in enumerate(part):
            tokens, mask = rows[index]
            ids.extend(tokens)
            positions.extend(range(len(tokens)))
            labels.extend([token if trained else -100 for token, trained in zip(tokens[1:], mask[1:], strict=True)])
            labels.append(-100)
            weights.extend([weight if trained else 0.0 for trained in mask[1:]])
            weights.append(0.0)
            owners.extend([place] * len(tokens))
            cu_seqlens.append(len(ids))
        long = [torch.tensor(values) for values in (ids, positions, labels)]
        short = [torch.tensor(values, dtype=torch.int32) for values in (owners, cu_seqlens)]
        packs.append((*long, torch.tensor(weights), *short))
    return packs


def trl_pack(lengths: Lengths, batch_size: int) -> tuple[float, int]:
    """Return seconds and number of bins of TRL's packing, without the time to build the data set."""
    import datasets
    from trl import pack_dataset

    pyarrow = import_module("pyarrow")
    datasets.disable_progress_bars()
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    column = pyarrow.ListArray.from_arrays(offsets, np.ones(int(offsets[-1]), np.int8))
    dataset = datasets.Dataset(pyarrow.table({"input_ids": column}))
    options = {"batch_size": batch_size, "load_from_cache_file": False, "keep_in_memory": True}
    seconds, packed = quickest(lambda: pack_dataset(dataset, CAPACITY, "bfd", map_kwargs=options))
    return seconds, len(packed)


def peak_memory(function: Callable[[], T]) -> tuple[int, T]:
    """Return the growth of the peak memory during the call, in bytes, and the result of the call."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def watch() -> None:
        while not done.wait(0.002):
            seen.append(resident())

    seen, done = [resident()], threading.Event()
    thread = threading.Thread(target=watch)
    thread.start()
    result = function()
    seen.append(resident())
    done.set()
    thread.join()
    return max(seen) - seen[0], result


def check_parts(parts: Sequence[Sequence[int] | Lengths], lengths: Lengths, capacity: int | None = None) -> Lengths:
    """Check that every sample occurs once and no part exceeds the capacity. Return the sums of the parts."""
    flat = np.concatenate([np.asarray(part, dtype=np.int64) for part in parts])
    assert np.array_equal(np.sort(flat), np.arange(len(lengths))), "a sample is missing or there twice"
    part_of = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    sums = np.bincount(part_of, weights=lengths[flat], minlength=len(parts)).astype(np.int64)
    assert capacity is None or sums.max() <= capacity, "a part is above its capacity"
    return sums


def bench_fill(report: Report, data: str, lengths: Lengths, sizes: Sizes) -> None:
    count = len(lengths)
    seconds, bins = quickest(lambda: list(fill(lengths, CAPACITY)), sizes.repeats)
    check_parts(bins, lengths, CAPACITY)
    utilisation = float(lengths.sum() / (len(bins) * CAPACITY))
    report.add("fill", data, f"fill, {count:,} samples", seconds / count * 1e6, "us/sample")
    bfd_seconds, bfd = quickest(lambda: best_fit_decreasing(lengths, CAPACITY))
    check_parts(bfd, lengths, CAPACITY)
    assert len(bins) <= len(bfd), "more bins than best-fit decreasing"
    report.add("fill", data, f"BFD, {count:,} samples", bfd_seconds / count * 1e6, "us/sample")
    report.add("fill", data, "bins of fill", len(bins), "", f"<= {len(bfd)}")
    report.add("fill", data, "lower bound of bins", -(-int(lengths.sum()) // CAPACITY))
    # The goal holds for many bins only, because how full a single bin is depends on chance.
    report.add("fill", data, "utilisation", utilisation, "", ">= 0.998" if len(bins) > 1000 else "")
    assert len(bins) <= 1000 or utilisation >= 0.998

    few = lengths[: sizes.fill_others]
    few_seconds, few_bins = quickest(lambda: list(fill(few, CAPACITY)), sizes.repeats)
    ffd_seconds, ffd = quickest(lambda: first_fit_decreasing(few, CAPACITY))
    check_parts(ffd, few, CAPACITY)
    report.add("fill", data, f"fill, {len(few):,} samples", few_seconds / len(few) * 1e6, "us/sample")
    report.add("fill", data, f"FFD, {len(few):,} samples", ffd_seconds / len(few) * 1e6, "us/sample")
    report.add("fill", data, f"bins of fill, {len(few):,} samples", len(few_bins), "", f"<= {len(ffd)}")
    if find_spec("trl") is None or find_spec("datasets") is None:
        report.note("fill", "TRL skipped: trl or datasets is not installed (pip install padfree[dev])")
        return
    default_seconds, default_bins = trl_pack(few, 1000)
    whole_seconds, whole_bins = trl_pack(few, len(few))
    report.add("fill", data, f"TRL, {len(few):,} samples by 1,000", default_seconds / len(few) * 1e6, "us/sample")
    report.add("fill", data, f"TRL, {len(few):,} samples at once", whole_seconds / len(few) * 1e6, "us/sample")
    report.add("fill", data, "bins of TRL, by 1,000", default_bins)
    report.add("fill", data, "bins of TRL, at once", whole_bins)
    fastest = min(default_seconds, whole_seconds) / len(few)
    goal = ">= 50" if count >= 1_000_000 else ""
    report.add("fill", data, "times TRL's speed, per sample", fastest / (seconds / count), "x", goal)
    report.add("fill", data, f"times TRL's speed, both {len(few):,} samples", fastest / (few_seconds / len(few)), "x")


def bench_fill_memory(report: Report, sizes: Sizes) -> None:
    lengths = log_normal(sizes.fill_large, 1)
    seconds, bins = quickest(lambda: fill(lengths, CAPACITY))
    tracemalloc.start()
    fill(lengths, CAPACITY)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert int(bins.sums(lengths).max()) <= CAPACITY
    assert np.array_equal(np.sort(bins.indices), np.arange(len(lengths)))
    report.add("fill", "log-normal", f"fill, {len(lengths):,} samples", seconds, "s")
    report.add("fill", "log-normal", "its peak memory beyond the lengths", peak / len(lengths), "bytes/sample")


def bench_balance(report: Report, data: str, lengths: Lengths, k: int, sizes: Sizes) -> None:
    seconds, parts = quickest(lambda: balance(lengths, k), sizes.repeats)
    sums = check_parts(parts, lengths)
    kk_seconds, kk = quickest(lambda: karmarkar_karp(lengths.tolist(), k))
    kk_sums = check_parts(kk, lengths)
    equal_seconds, equal = quickest(lambda: balance(lengths, k, equal_count=True), sizes.repeats)
    equal_sums = check_parts(equal, lengths)
    assert max(map(len, equal)) - min(map(len, equal)) <= 1
    assert sums.max() / sums.mean() <= 1.001
    name = f"n = {len(lengths)}, k = {k}"
    report.add("balance", data, f"balance, {name}", seconds * 1e3, "ms")
    report.add("balance", data, f"balance with equal counts, {name}", equal_seconds * 1e3, "ms")
    report.add("balance", data, f"KK, {name}", kk_seconds * 1e3, "ms")
    report.add("balance", data, "times KK's speed", kk_seconds / seconds, "x", ">= 100" if k >= 256 else "")
    report.add("balance", data, "max/mean of balance", sums.max() / sums.mean(), "", "<= 1.001")
    report.add("balance", data, "max/mean of balance with equal counts", equal_sums.max() / equal_sums.mean())
    report.add("balance", data, "max/mean of KK", kk_sums.max() / kk_sums.mean())


def bench_caps(report: Report, sizes: Sizes) -> None:
    """Count how many times each method exceeds a cap slightly above the mean, for random inputs."""
    for count, k, slack in ((256, 16, 1.0002), (128, 16, 1.003)):
        refused = exceeded = kk_exceeded = 0
        for draw in range(sizes.draws):
            lengths = log_normal(count, 1000 + draw)
            cap = max(math.ceil(slack * lengths.sum() / k), int(lengths.max()))
            kk_exceeded += int(check_parts(karmarkar_karp(lengths.tolist(), k), lengths).max()) > cap
            try:
                parts = balance(lengths, k, cap=cap)
            except ValueError:
                refused += 1
                continue
            exceeded += int(check_parts(parts, lengths).max()) > cap
        assert exceeded == 0, "balance exceeded a cap"
        name = f"of {sizes.draws}, n = {count}, k = {k}, cap {slack} mean"
        report.add("balance", "log-normal", f"above the cap: balance, {name}", exceeded, "draws", "<= 0")
        report.add("balance", "log-normal", f"above the cap: KK, {name}", kk_exceeded, "draws")
        report.add("balance", "log-normal", "balance found no assignment", refused, "draws")


def bench_plan(report: Report, data: str, lengths: Lengths, ranks: int, caps: Sequence[int], sizes: Sizes) -> None:
    cost = CostModel.from_config(QWEN3_4B)
    for max_tokens in caps:
        call = partial(plan_step, lengths, ranks=ranks, max_tokens=max_tokens, cost=cost)
        seconds, plan = quickest(call, sizes.repeats)
        check_parts([batch for row in plan.micro_batches for batch in row], lengths, max_tokens)
        assert {len(row) for row in plan.micro_batches} == {plan.num_micro_batches}
        assert plan.imbalance <= 1.03
        name = f"{len(lengths)} samples, {ranks} ranks, {max_tokens} tokens"
        report.add("plan_step", data, f"time, {name}", seconds * 1e3, "ms")
        report.add("plan_step", data, "sum of max cost / (total / ranks)", plan.imbalance, "", "<= 1.03")
        least = -(-int(lengths.sum()) // (ranks * max_tokens))
        report.add("plan_step", data, "micro-batches per rank", plan.num_micro_batches, "", f"<= {least}")


def bench_pack(report: Report, sizes: Sizes) -> None:
    samples = random_samples(sizes.pack_tokens)
    lengths = np.array([len(sample) for sample in samples])
    seconds, batches = quickest(lambda: pack(samples, max_tokens=PACK), sizes.repeats)
    parts = [[info.index for info in batch.samples] for batch in batches]
    check_parts(parts, lengths, PACK)

    rows = [(sample.tokens.tolist(), sample.mask.tolist()) for sample in samples]
    weight = 1.0 / sum(sample.num_labels for sample in samples)
    list_seconds, packs = quickest(lambda: lists_to_tensors(rows, parts, weight))
    for batch, tensors in zip(batches, packs, strict=True):
        ours = (batch.input_ids, batch.position_ids, batch.labels, batch.weights, batch.sample_index)
        for one, other in zip((*ours, batch.segments.cu_seqlens), tensors, strict=True):
            assert torch.equal(one, other), "pack and lists differ"
    name = f"{int(lengths.sum()):,} tokens in {len(batches)} packs"
    report.add("pack", "log-normal", f"pack, {name}", seconds, "s")
    report.add("pack", "log-normal", "lists", list_seconds, "s")
    report.add("pack", "log-normal", "times the speed of lists", list_seconds / seconds, "x", ">= 20")
    if not Path("/proc/self/statm").exists():
        report.note("pack", "memory skipped: this system has no /proc")
        return
    # In a new process, because this one would reuse memory that it has freed.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        ratio = pool.submit(pack_memory, sizes.pack_tokens).result()
    report.add("pack", "log-normal", "peak memory beyond the samples / output", ratio, "x", "<= 2")


def random_samples(num_tokens: int) -> list[Sample]:
    """Return samples of log-normal lengths. The last two thirds of each sample are trained."""
    rng = np.random.default_rng(2)
    lengths = log_normal(num_tokens // 780, 2).tolist()
    vocabulary = QWEN3_4B["vocab_size"]
    return [Sample(tokens=rng.integers(0, vocabulary, n), loss_mask=np.arange(n) >= n // 3) for n in lengths]


def pack_memory(num_tokens: int) -> float:
    """Return the peak memory of `pack` beyond its input, divided by the size of its output."""
    samples = random_samples(num_tokens)
    peak, batches = peak_memory(lambda: pack(samples, max_tokens=PACK))
    output = sum(int(getattr(batch, name).nbytes) for batch in batches for name in batch.TOKEN_FIELDS)
    return peak / output


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu",), default="cpu", help="packing runs on the host")
    parser.add_argument("--quick", action="store_true", help="small sizes, to test the script")
    parser.add_argument("--gsm8k", type=Path, default=GSM8K)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    arguments = parser.parse_args()
    sizes = QUICK if arguments.quick else Sizes()

    versions = {"python": platform.python_version(), "hardware": f"{platform.machine()} {platform.processor()}".strip()}
    for package in ("numpy", "torch", "trl", "datasets"):
        versions[package] = version(package) if find_spec(package) else "missing"
    print(", ".join(f"{name} {value}" for name, value in versions.items()))
    report = Report()
    real = gsm8k(arguments.gsm8k)
    if real is None:
        report.note("gsm8k", f"skipped: no train.jsonl and test.jsonl in {arguments.gsm8k}")

    bench_fill(report, "log-normal", log_normal(sizes.fill, 0), sizes)
    if real is not None:
        bench_fill(report, "gsm8k", real, sizes)
    bench_fill_memory(report, sizes)
    count, k = sizes.balance
    bench_balance(report, "log-normal", log_normal(count, 0), k, sizes)
    if real is not None:
        bench_balance(report, "gsm8k", real[:count], k, sizes)
    bench_caps(report, sizes)
    count, ranks = sizes.plan
    bench_plan(report, "log-normal", log_normal(count, 0), ranks, (16384, 32768), sizes)
    if real is not None:
        bench_plan(report, "gsm8k", real[:count], ranks, (4096, 16384), sizes)
    bench_pack(report, sizes)
    if arguments.json:
        arguments.json.write_text(json.dumps({"versions": versions, "rows": report.rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
