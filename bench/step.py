"""A whole training step compared with alternatives: tokens/s, model TFLOP/s and memory.

    gradients   of all parameters of a random-weight Qwen3 for one batch of log-normal lengths
      hf        plain transformers: a padded batch (`sdpa`), a pack by position ids (`sdpa`, `flex`)
      public    the best combination of public libraries: packing, Liger's kernels, variable-length attention (built-in,
                fa4), with and without activation checkpointing, layers compiled one by one
      padfree   SFT, and the clipped policy loss with log-probabilities and entropy
    update      padfree's whole update (float32 master weights, clipping, AdamW), the idle time of the device, and how
                many times the host waits for the device
    head        the time of the head if 60% of the tokens are prompts, relative to its time if all tokens are trained
    compile     the number of graphs that are compiled over steps of different lengths

    PYTHONPATH=src python bench/step.py --device cuda --shape 4b --json step.json
    PYTHONPATH=src python bench/step.py --device cpu

Model FLOPs are 6·P·T for all parameters and 6·L·H·d·Σn² for causal attention, forward and backward; recomputation is
not counted. TFLOP/s are also printed relative to a large matmul. GiB is the peak memory minus the weights.

A GPU under load reaches its power limit and lowers its clock. Each way of computing a step therefore starts after a
rest of `REST` seconds and is timed over a few steps.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
import warnings
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from step_ways import (
    POLICY,
    SHAPES,
    Setting,
    Way,
    fresh,
    hf_packed,
    hf_padded,
    log_normal_samples,
    near_uniform_logprobs,
    padfree_gradients,
    public,
    update_engine,
)
from timer import DeviceSpan, Stopwatch, mean_in_a_row, median_seconds

from padfree.attention import choose_backend
from padfree.distributed import distributed, make_mesh
from padfree.head import fused_loss
from padfree.losses import LossInputs, make_token_loss
from padfree.sample import with_arrays
from padfree.train.microbatch import PackSettings, make_micro_batch
from padfree.train.step import PendingStep

SECTIONS = ("gradients", "update", "head", "compile")
SIZES: dict[str, dict[str, int]] = {
    "cuda": {"count": 20, "median": 490, "longest": 8192},
    "cpu": {"count": 20, "median": 200, "longest": 2048},
}
CLOSE = 2e-2  # largest accepted difference between losses in bfloat16
REST = 2.0

Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shape", choices=tuple(SHAPES))
    parser.add_argument("--section", choices=SECTIONS, action="append", help="default: all (on the CPU: gradients)")
    parser.add_argument("--only", action="append", help="only ways whose name contains this text (=NAME: equals)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--compile-steps", type=int, default=200)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    on_cuda = arguments.device == "cuda"
    shape = arguments.shape or ("0.6b" if on_cuda else "tiny")
    vocabulary = SHAPES[shape]["vocab_size"]
    samples = log_normal_samples(vocabulary=vocabulary, **SIZES[arguments.device])
    with distributed(device=arguments.device) as device:
        setting = Setting(
            shape=shape,
            device=device,
            dtype=torch.bfloat16 if on_cuda else torch.float32,
            samples=samples,
            old_logprobs=near_uniform_logprobs(samples, vocabulary),
            mesh=make_mesh(device),
        )
        report = header(setting)
        sections: dict[str, Callable[[], Any]] = {
            "gradients": lambda: gradients_section(setting, report["ceiling"], arguments.repeats, arguments.only),
            "update": lambda: update_section(setting, report["ceiling"]),
            "head": lambda: head_section(setting),
            "compile": lambda: compile_section(setting, arguments.compile_steps),
        }
        for name in arguments.section or (SECTIONS if on_cuda else SECTIONS[:1]):
            print(f"\n{name}", flush=True)
            report[name] = sections[name]()
            if arguments.json:
                arguments.json.write_text(json.dumps(report, indent=1))


def header(setting: Setting) -> dict[str, Any]:
    names = ("torch", "transformers", "triton", "flash-attn-4", "quack-kernels", "liger-kernel")
    packages = {name: installed(name) for name in names}
    on_cuda = setting.device.type == "cuda"
    hardware = torch.cuda.get_device_name() if on_cuda else f"{platform.machine()}, {torch.get_num_threads()} threads"
    tokens = sum(len(sample) for sample in setting.samples)
    longest = max(len(sample) for sample in setting.samples)
    ceiling = matrix_product_ceiling(setting)
    print(f"{hardware}, python {platform.python_version()}, {', '.join(f'{k} {v}' for k, v in packages.items())}")
    print(f"{setting.shape}, {len(setting.samples)} samples, {tokens:,} tokens, longest sample {longest:,}")
    print(f"speed of a large matmul: {ceiling:.3g} TFLOP/s")
    return {"hardware": hardware, **packages, "shape": setting.shape, "tokens": tokens, "ceiling": ceiling}


def installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def matrix_product_ceiling(setting: Setting) -> float:
    size = 8192 if setting.device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=setting.device, dtype=setting.dtype) for _ in range(2))
    return 2 * size**3 / median_seconds(lambda: a @ b, setting.device, repeats=10, warmup=1) / 1e12


def model_flops(setting: Setting) -> float:
    shape = SHAPES[setting.shape]
    hidden, layers, heads = shape["hidden_size"], shape["num_hidden_layers"], shape["num_attention_heads"]
    width, kv_width = heads * shape["head_dim"], shape["num_key_value_heads"] * shape["head_dim"]
    layer = hidden * (2 * width + 2 * kv_width) + 3 * hidden * shape["intermediate_size"]
    parameters = layers * layer + hidden * shape["vocab_size"]
    lengths = np.array([len(sample) for sample in setting.samples], dtype=np.float64)
    return float(6 * parameters * lengths.sum() + 6 * layers * width * (lengths**2).sum())


def rates(setting: Setting, seconds: float, ceiling: float) -> Row:
    """Return the tokens/s and TFLOP/s of a step that takes this many seconds."""
    speed = model_flops(setting) / seconds / 1e12
    tokens = sum(len(sample) for sample in setting.samples)
    return {"tokens/s": tokens / seconds, "TFLOP/s": speed, "share of the ceiling": speed / ceiling}


# Gradients


def ways(setting: Setting) -> list[Way]:
    found = [
        Way(name="hf padded sdpa", kind="hf", build=lambda s: hf_padded(s, small=False)),
        Way(name="hf packed sdpa", kind="hf", build=lambda s: hf_packed(s, "sdpa")),
    ]
    if setting.device.type == "cpu":
        return [
            *found,
            Way(name="padfree sft", kind="padfree", build=lambda s: padfree_gradients(s, loss="sft")),
            Way(name="padfree rl", kind="padfree", loss="rl", build=lambda s: padfree_gradients(s, loss="rl")),
        ]
    found.append(Way(name="hf padded small sdpa", kind="hf", build=lambda s: hf_padded(s, small=True)))
    best = choose_backend(setting.device, setting.dtype, SHAPES[setting.shape]["head_dim"])
    kernels = ("fa4",) if best == "fa4" else ()

    def public_way(attention: str, compile: bool, checkpointing: bool) -> Way:
        parts = ["liger", attention, *(["compile"] if compile else []), *(["checkpoint"] if checkpointing else [])]
        return Way(
            name=f"public {' '.join(parts)}",
            kind="public",
            checkpointing=checkpointing,
            build=lambda s: public(s, attention=attention, compile=compile, checkpointing=checkpointing),
        )

    def padfree_way(loss: str, compile: str, checkpointing: str) -> Way:
        parts = [loss, *([compile] if compile != "none" else []), *([checkpointing] if checkpointing != "none" else [])]
        return Way(
            name=f"padfree {' '.join(parts)}",
            kind="padfree",
            checkpointing=checkpointing != "none",
            loss=loss,
            build=lambda s: padfree_gradients(s, loss=loss, compile=compile, checkpointing=checkpointing),
        )

    found += [public_way(attention, False, False) for attention in ("torch", *kernels)]
    found += [public_way(attention, True, checkpointing) for attention in kernels for checkpointing in (False, True)]
    found += [public_way(attention, False, True) for attention in ("torch", *kernels)]
    found += [padfree_way("rl", "none", "none"), padfree_way("sft", "inductor", "none")]
    found += [padfree_way("rl", "inductor", checkpointing) for checkpointing in ("none", "selective", "host", "full")]
    # This way is last, because its compilation takes minutes.
    found.append(Way(name="hf packed flex", kind="hf", build=lambda s: hf_packed(s, "flex_attention")))
    return found


def gradients_section(setting: Setting, ceiling: float, repeats: int, only: list[str] | None) -> list[Row]:
    rows: list[Row] = []
    for way in ways(setting):
        if only and not any(way.name == part[1:] if part.startswith("=") else part in way.name for part in only):
            continue
        with fresh(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                row = measured(way, setting, repeats)
            except torch.cuda.OutOfMemoryError:
                row = {"way": way.name, "kind": way.kind, "checkpointing": way.checkpointing, "loss": "out of memory"}
        if "seconds" in row:
            row |= rates(setting, row["seconds"], ceiling)
        rows.append(row)
        print(line(row), flush=True)
    assert_same_losses(rows)
    return rows


def measured(way: Way, setting: Setting, repeats: int) -> Row:
    on_cuda = setting.device.type == "cuda"
    gradients = way.build(setting)
    held = torch.cuda.memory_allocated() if on_cuda else 0
    loss = float(gradients())
    if on_cuda:
        gradients()
        torch.cuda.reset_peak_memory_stats()
    if on_cuda:
        seconds = mean_in_a_row(gradients, repeats, rest=REST)
    else:
        seconds = median_seconds(gradients, setting.device, repeats=repeats, warmup=1)
    row: Row = {"way": way.name, "kind": way.kind, "checkpointing": way.checkpointing, "objective": way.loss}
    row |= {"loss": loss, "seconds": seconds}
    if on_cuda:
        row["GiB"] = (torch.cuda.max_memory_allocated() - held) / 2**30
    return row


def line(row: Row) -> str:
    if "seconds" not in row:
        return f"{row['way']:40s} {row['loss']}"
    memory = f"  {row['GiB']:6.1f} GiB" if "GiB" in row else ""
    return (
        f"{row['way']:40s} {row['seconds'] * 1e3:9.1f} ms  {row['tokens/s']:9,.0f} tokens/s  "
        f"{row['TFLOP/s']:7.2f} TFLOP/s ({row['share of the ceiling']:.1%}){memory}  loss {row['loss']:.4f}"
    )


def assert_same_losses(rows: list[Row]) -> None:
    """Check that all ways with the same objective have the same loss."""
    losses = [row["loss"] for row in rows if "seconds" in row and row["objective"] == "sft"]
    assert not losses or max(losses) - min(losses) <= CLOSE * max(losses), losses


# The whole update


def update_section(setting: Setting, ceiling: float) -> list[Row]:
    rows: list[Row] = []
    for loss in ("sft", "rl"):
        with fresh(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            row = pipelined(setting, loss)
        row |= rates(setting, row["seconds"], ceiling)
        rows.append(row)
        print(f"{loss:4s} {row['seconds'] * 1e3:8.1f} ms, {row['tokens/s']:,.0f} tokens/s,", end=" ")
        print(f"{row['TFLOP/s']:.1f} TFLOP/s ({row['share of the ceiling']:.1%}), {row['GiB']:.1f} GiB,", end=" ")
        print(f"host busy {row['host'] * 1e3:.1f} ms,", end=" ")
        print(f"device idle {row['waiting']:.2%}, {row['syncs']} synchronisations", flush=True)
    return rows


def pipelined(setting: Setting, loss: str, steps: int = 10) -> Row:
    """Measure consecutive steps as in a run: the next step is prepared while the device computes this one.

    Also measure how long the device is idle, and how long the host is busy.
    """
    checkpointing = "none" if setting.shape == "0.6b" else "selective"
    engine = update_engine(setting, loss=loss, compile="inductor", checkpointing=checkpointing)
    held = torch.cuda.memory_allocated()
    prepared = engine.prepare(setting.samples_for(loss))
    for _ in range(3):
        engine.begin(prepared).finish()
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        pending = engine.begin(engine.prepare(setting.samples_for(loss)))
        torch.cuda.set_sync_debug_mode("default")
    # Enabling the mode warns that it is a prototype; this warning also contains "synchronizing".
    syncs = [str(warning.message) for warning in caught if "called a synchronizing" in str(warning.message)]
    pending.finish()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    spans = [DeviceSpan() for _ in range(steps)]
    wall, host = Stopwatch(setting.device), Stopwatch()
    time.sleep(REST)
    earlier: PendingStep | None = None
    with wall:
        for span in spans:
            with host:
                with span:
                    pending = engine.begin(prepared, after=earlier)
                prepared = engine.prepare(setting.samples_for(loss))
            if earlier is not None:
                earlier.finish()
            earlier = pending
    busy = sum(span.seconds() for span in spans)
    row: Row = {"update": loss, "seconds": wall.seconds / steps, "host": host.seconds / steps}
    row["checkpointing"] = checkpointing
    row["GiB"] = (torch.cuda.max_memory_allocated() - held) / 2**30
    return row | {"waiting": 1 - busy / wall.seconds, "syncs": len(syncs)}


# The head, and compilation


def head_section(setting: Setting) -> Row:
    """Time `fused_loss` with all tokens trained, and with the first 60% of each sample as prompt."""
    shape, device = SHAPES[setting.shape], setting.device
    times = {}
    for name, share in (("all", 0.0), ("40%", 0.6)):
        samples = log_normal_samples(
            vocabulary=shape["vocab_size"], prompt_share=share, **SIZES["cuda" if device.type == "cuda" else "cpu"]
        )
        samples = with_arrays(samples, old_logprobs=near_uniform_logprobs(samples, shape["vocab_size"]))
        batch = make_micro_batch(samples, np.arange(len(samples)), setting.mesh, PackSettings())
        inputs = LossInputs.from_batch(batch.local)
        hidden = torch.randn(batch.local.labels.numel(), shape["hidden_size"], device=device, dtype=setting.dtype)
        weight = torch.randn(shape["vocab_size"], shape["hidden_size"], device=device, dtype=setting.dtype) * 0.02
        hidden.requires_grad_()
        weight.requires_grad_()

        def run(batch: Any = batch, inputs: Any = inputs, hidden: Any = hidden, weight: Any = weight) -> None:
            hidden.grad = weight.grad = None
            fused_loss(
                hidden, weight, batch.local.labels, make_token_loss(inputs, POLICY), entropy=True,
                num_labels=batch.num_labels,
            ).loss.backward()  # type: ignore[no-untyped-call]  # fmt: skip

        times[name] = median_seconds(run, setting.device, repeats=5, warmup=1)
    ratio = times["40%"] / times["all"]
    print(f"all tokens {times['all'] * 1e3:.1f} ms, 40% of them {times['40%'] * 1e3:.1f} ms: {ratio:.2f}")
    return {**times, "ratio": ratio}


def compile_section(setting: Setting, steps: int) -> Row:
    """Count the graphs compiled over `steps` steps with samples of different lengths."""
    from torch._dynamo.utils import counters

    vocabulary = SHAPES[setting.shape]["vocab_size"]
    rng = np.random.default_rng(1)
    pool = log_normal_samples(400, SIZES["cuda"]["median"], 2048, vocabulary)
    with fresh(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = update_engine(setting, loss="rl", compile="inductor")
        engine.scorer.packer.max_tokens = 16_384
        counters.clear()
        graphs, lengths = [], set()
        for _ in range(steps):
            chosen = [pool[i] for i in rng.choice(len(pool), size=int(rng.integers(2, 9)), replace=False)]
            lengths.add(sum(len(sample) for sample in chosen))
            chosen = with_arrays(chosen, old_logprobs=near_uniform_logprobs(chosen, vocabulary))
            engine.step(chosen)
            graphs.append(counters["stats"]["unique_graphs"])
    later = graphs[-1] - graphs[0]
    print(f"{steps} steps, {len(lengths)} lengths: {graphs[0]} graphs in the first step, {later} after it")
    return {"steps": steps, "lengths": len(lengths), "first": graphs[0], "later": later}


if __name__ == "__main__":
    main()
