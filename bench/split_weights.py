"""Float32 master weights stored in 4 1/8 bytes on a GPU, compared with separate masters and bfloat16 copies.

    separate        float32 master and bfloat16 copy: 6 bytes per weight      AdamW, then copies are written
    split           bfloat16 copy and the missing bits: 4 1/8 bytes           AdamW joins and splits blocks of weights

First, every float32 number, i.e. each of 2^32 bit patterns, is split and joined again. Then both ways take the same
five steps from the same weights. Afterwards all bits of masters, copies and optimizer state must agree, which is
checked by sums over all bits. Then whole optimizer steps are timed. Every seventh weight lies half-way between two
bfloat16 numbers, and one step is skipped. The shapes "135m", "0.6b" and "4b" have 0.28B, 0.71B and
4.02B weights.

    PYTHONPATH=src python bench/split_weights.py
    PYTHONPATH=src python bench/split_weights.py --shape 0.6b
"""

from __future__ import annotations

import argparse
import gc
import json
from pathlib import Path
from typing import Any

import torch
from gpu_only import cuda_device
from timer import Stopwatch, synchronize
from torch import Tensor

from padfree.model.split_weight import SplitStorage, is_split
from padfree.optim.adamw import AdamW
from padfree.optim.master_weights import split_weights

GIB = 2**30
# layers, hidden size, columns of queries, columns of keys, columns of the MLP, vocabulary
SHAPES = {
    "135m": (30, 576, 4096, 1024, 1536, 49_152),
    "0.6b": (28, 1024, 4096, 1024, 3072, 151_936),
    "4b": (36, 2560, 4096, 1024, 9728, 151_936),
}
TIMED = {"135m": 10, "0.6b": 10, "4b": 5}
STEPS = 5
SKIPPED = 2
"""The number of the step whose gradients count as not finite, so that the step is skipped."""

HEAD_SIZE = 128
PATTERNS_AT_ONCE = 1024
Checksums = list[tuple[int, ...]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), help="run only this shape, and not all bit patterns")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device, report = cuda_device()
    if arguments.shape is None:
        all_patterns(device)
    for shape in [arguments.shape] if arguments.shape else SHAPES:
        report[shape] = compare(shape, sizes_of(*SHAPES[shape]), TIMED[shape], device)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1))


def all_patterns(device: torch.device, first: int = -(1 << 15), end: int = 1 << 15) -> int:
    """Split and join the float32 numbers whose upper 16 bits are from `first` to `end` - 1. Return their number."""
    count, wrong_masters, wrong_copies = 0, 0, 0
    low = torch.arange(1 << 16, dtype=torch.int32, device=device)
    for start in range(first, end, PATTERNS_AT_ONCE):
        high = torch.arange(start, min(end, start + PATTERNS_AT_ONCE), dtype=torch.int32, device=device) << 16
        values = (high[:, None] | low).reshape(-1).view(torch.float32)
        storage = SplitStorage(values.numel(), device)
        storage.split(values, 0)
        joined = storage.join(0, values.numel())
        number = ~values.isnan()  # a NaN stays a NaN, but may get other bits
        wrong_masters += int(((joined.view(torch.int32) != values.view(torch.int32)) & number).sum())
        wrong_masters += int((~joined.isnan() & ~number).sum())
        plain = values.bfloat16().view(torch.int16)
        wrong_copies += int(((storage.rounded.view(torch.int16) != plain) & number).sum())
        count += values.numel()
    print(f"{count:,} bit patterns: {wrong_masters} wrong masters, {wrong_copies} wrong copies", flush=True)
    assert wrong_masters == wrong_copies == 0
    assert count == (end - first) << 16
    return count


def sizes_of(layers: int, hidden: int, queries: int, keys: int, inner: int, vocabulary: int) -> list[tuple[int, ...]]:
    """Return the sizes of all weights of a model with tied embeddings and QK-norm."""
    layer: list[tuple[int, ...]] = [
        (queries, hidden), (keys, hidden), (keys, hidden), (hidden, queries), (HEAD_SIZE,), (HEAD_SIZE,),
        (inner, hidden), (inner, hidden), (hidden, inner), (hidden,), (hidden,),
    ]  # fmt: skip
    return [(vocabulary, hidden), (hidden,), *layers * layer]


def compare(shape: str, sizes: list[tuple[int, ...]], timed: int, device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {}
    checksums: dict[str, Checksums] = {}
    for name in ("separate", "split"):
        found[name], checksums[name] = run(sizes, timed, device, split=name == "split")
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        own = found[name]
        print(
            f"{shape}, {name:8s}  {own['weights'] / 1e9:.2f}B weights  {own['ms']:5.1f} ms per step "
            f"(host {own['host ms']:.1f} ms)  {own['bytes per weight']:.3f} bytes per weight with gradients and state  "
            f"{own['GiB in the step']:.2f} GiB more in the step  peak {own['peak GiB']:.2f} GiB",
            flush=True,
        )
    assert checksums["separate"] == checksums["split"], f"{shape}: updates have other bits"
    print(f"{shape}: all bits are equal", flush=True)
    return found


def run(
    sizes: list[tuple[int, ...]], timed: int, device: torch.device, *, split: bool
) -> tuple[dict[str, float], Checksums]:
    """Take the steps and measure further ones. Return the measurements, and checksums of all bits."""
    cuda = device.type == "cuda"
    generator = torch.Generator(device).manual_seed(0)

    def random(size: tuple[int, ...]) -> Tensor:
        return torch.randn(size, device=device, generator=generator)

    parameters = [torch.nn.Parameter(halfway(random(size) * 0.02)) for size in sizes]
    copies: list[Tensor] = []
    if split:
        split_weights(parameters)
    else:
        copies = [parameter.detach().bfloat16() for parameter in parameters]
    for parameter in parameters:
        parameter.grad = random(tuple(parameter.shape))
    rule = AdamW()
    state: dict[Tensor, dict[str, Any]] = {parameter: {} for parameter in parameters}
    groups: list[dict[str, Any]] = [
        {"params": [each for each in parameters if (each.ndim < 2) == vectors], "betas": (0.9, 0.95), "eps": 1e-8,
         "lr": 1e-3, "weight_decay": 0.0 if vectors else 0.1, "state": "float32"}
        for vectors in (False, True)
    ]  # fmt: skip
    finite = torch.ones((), dtype=torch.bool, device=device)
    scale = torch.full((), 0.37, dtype=torch.float64, device=device)

    def step(*, skipped: bool = False) -> None:
        for group in groups:
            rule.step(group, state, ~finite if skipped else finite, scale)
        if copies:
            torch._foreach_copy_(copies, [parameter.detach() for parameter in parameters])

    for number in range(STEPS):
        step(skipped=number == SKIPPED)
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad.mul_(-0.7).add_(1e-3)
    checksums: Checksums = []
    for number, parameter in enumerate(parameters):
        copy = parameter.rounded if is_split(parameter) else copies[number]
        own = state[parameter]
        bits = (parameter.detach().clone(), copy, own["exp_avg"], own["exp_avg_sq"])
        checksums.append((*(checksum(each) for each in bits), int(own["step"])))

    count = sum(parameter.numel() for parameter in parameters)
    measured: dict[str, float] = {"weights": count}
    standing = peak = 0
    if cuda:
        torch.cuda.synchronize()
        standing = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    step()
    if cuda:
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
    host, whole = Stopwatch(), Stopwatch(device)
    with whole:
        for _ in range(timed):
            with host:
                step()
    synchronize(device)
    measured |= {"ms": 1e3 * whole.seconds / timed, "host ms": 1e3 * host.seconds / timed}
    measured |= {"bytes per weight": standing / count, "GiB in the step": (peak - standing) / GIB}
    return measured | {"peak GiB": peak / GIB}, checksums


def halfway(values: Tensor) -> Tensor:
    """Move every seventh value to the middle between two bfloat16 numbers."""
    bits = values.view(torch.int32).view(-1)[::7]
    bits.copy_((bits & -(1 << 16)) | 1 << 15)
    return values


def checksum(values: Tensor) -> int:
    """Return a weighted sum of all elements as integers, modulo 2^64."""
    kind = torch.int32 if values.itemsize == 4 else torch.int16
    total = 0
    for start, part in enumerate(torch.split(values.reshape(-1).view(kind), 1 << 26)):
        weights = torch.arange(part.numel(), device=part.device) % 1_000_003 + 1 + start
        total += int((part.long() * weights).sum())
    return total


if __name__ == "__main__":
    main()
