"""Compare ways to compute the gradients of a model with random weights. `bench/mixers.py` and `bench/moe.py` use this.

Each way builds the model from the same seed and computes the gradients of one batch. The module prints the time and the
loss of each way, and how much its gradients of the first layer differ from those of the first way.
"""

from __future__ import annotations

import platform
import warnings
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from step_ways import HEAD_MEMORY, Gradients, Setting, fresh, make_engine
from timer import mean_in_a_row, median_seconds
from torch import Tensor

from padfree.estimate.flops import Flops
from padfree.model import attach
from padfree.sharding.parallelize import parallelize, transformations

REST = 1.0
CLOSE = 2e-2  # largest accepted difference between losses in bfloat16
PACKAGES = ("torch", "transformers", "triton", "fla-core", "flash-attn-4", "quack-kernels")

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class ModelWay:
    name: str
    build: Callable[[Any], Gradients]  # takes the stock model
    note: str = ""


def random_model(model_class: Any, config: Any, setting: Setting) -> Any:
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(setting.dtype)
    try:
        with setting.device:
            model = model_class(deepcopy(config))  # a copy, because the model stores its attention in the config
    finally:
        torch.set_default_dtype(default)
    model.config.use_cache = False
    return model.train()


def padfree_way(model: Any, setting: Setting, *, compile: str, fast_mixers: bool = True) -> Gradients:
    """Return a function that computes the gradients of a step as in a run, without master weights and optimizer."""
    parallelize(model, transformations(setting.mesh, compile=compile))
    attach(model, fast_mixers=fast_mixers)
    engine = make_engine(model, setting, "sft", memory=HEAD_MEMORY["none"])
    prepared = engine.prepare(setting.samples)
    if compile != "none":  # run other lengths first, so that layers are compiled for any length, as in a run
        engine.gradients(engine.prepare(setting.samples[1:]))
    return lambda: engine.gradients(prepared).loss


def compare(ways: list[ModelWay], model_class: Any, config: Any, setting: Setting, repeats: int) -> list[Row]:
    """Run all ways, and compare the gradients of each with those of the first one."""
    flops = Flops.of(config, devices=1, device=setting.device, dtype=setting.dtype)
    lengths = [len(sample) for sample in setting.samples]
    work = flops.step(lengths, sum(sample.num_labels for sample in setting.samples))
    rows: list[Row] = []
    reference: dict[str, Tensor] = {}
    for way in ways:
        with fresh(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            row, gradients = _measured(way, random_model(model_class, config, setting), setting, repeats)
        if gradients:
            reference = reference or gradients
            row["apart"] = max(_apart(gradients[name], reference[name]) for name in reference)
            row |= {"tokens/s": sum(lengths) / row["seconds"], "TFLOP/s": work / row["seconds"] / 1e12}
        row["said"] = sorted({str(each.message) for each in caught if each.category.__name__ == "PadfreeWarning"})
        rows.append(row)
        _show(row, way.note)
    return rows


def _measured(way: ModelWay, model: Any, setting: Setting, repeats: int) -> tuple[Row, dict[str, Tensor]]:
    on_cuda = setting.device.type == "cuda"
    if on_cuda:
        torch.cuda.reset_peak_memory_stats()
    try:
        gradients = way.build(model)
        loss = float(gradients())
        first = model.get_submodule(f"{model.base_model_prefix}.layers.0")
        kept = {
            name: parameter.grad.detach().float().cpu()
            for name, parameter in first.named_parameters()
            if parameter.grad is not None
        }
        if on_cuda:
            gradients()
            seconds = mean_in_a_row(gradients, repeats, rest=REST)
        else:
            seconds = median_seconds(gradients, setting.device, repeats=repeats, warmup=0)
    except torch.cuda.OutOfMemoryError:
        return {"way": way.name, "failed": "out of memory"}, {}
    row: Row = {"way": way.name, "seconds": seconds, "loss": loss}
    if on_cuda:
        row["GiB"] = torch.cuda.max_memory_allocated() / 2**30
    return row, kept


def _apart(values: Tensor, expected: Tensor) -> float:
    return float((values - expected).norm() / expected.norm().clamp(min=1e-12))


def _show(row: Row, note: str) -> None:
    if "failed" in row:
        print(f"{row['way']:44s} {row['failed']}", flush=True)
        return
    memory = f"  {row['GiB']:6.1f} GiB" if "GiB" in row else ""
    print(
        f"{row['way']:44s} {row['seconds'] * 1e3:9.1f} ms  {row['tokens/s']:9,.0f} tokens/s  "
        f"{row['TFLOP/s']:7.2f} TFLOP/s{memory}  loss {row['loss']:.4f}  gradients differ by {row['apart']:.1e}",
        flush=True,
    )
    for line in (note, *row["said"]):
        if line:
            print(f"    {line}", flush=True)


def ratio(rows: list[Row], way: str, other: str) -> float | None:
    """Return how many times as fast `way` is as `other`, or None if one of them failed."""
    seconds = {row["way"]: row.get("seconds") for row in rows}
    one, two = seconds.get(way), seconds.get(other)
    return None if not one or not two else two / one


def show_ratios(rows: list[Row], way: str) -> dict[str, float]:
    found = {}
    for row in rows:
        value = ratio(rows, way, row["way"])
        if value is not None and row["way"] != way:
            found[row["way"]] = value
            print(f"{way}: {value:.2f} times as fast as {row['way']}")
    return found


def assert_same_losses(rows: list[Row]) -> None:
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses, "no way ran"
    assert max(losses) - min(losses) <= CLOSE * max(losses), losses


def header(setting: Setting, shape: str) -> dict[str, Any]:
    report = machine(setting.device)
    tokens = sum(len(sample) for sample in setting.samples)
    print(f"{shape}, {len(setting.samples)} samples, {tokens:,} tokens", flush=True)
    return {**report, "shape": shape, "tokens": tokens}


def machine(device: torch.device) -> dict[str, Any]:
    """Print the hardware and the versions of the packages, and return them."""
    packages = {name: _installed(name) for name in PACKAGES}
    on_cuda = device.type == "cuda"
    hardware = torch.cuda.get_device_name() if on_cuda else f"{platform.machine()}, {torch.get_num_threads()} threads"
    versions = ", ".join(f"{name} {version}" for name, version in packages.items())
    print(f"{hardware}, python {platform.python_version()}, {versions}", flush=True)
    return {"hardware": hardware, **packages}


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
