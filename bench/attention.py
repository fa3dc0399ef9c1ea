"""Packed attention compared with alternatives.

    section   runs on    what is measured
    model     CPU        forward and backward of a 4-layer Qwen3 on a pack: padfree, HF's own packing (`sdpa` with a
                         dense [T, T] mask from restarting position_ids), and a padded batch
    kernels   CUDA       padfree's backends on packs compared with padded batches; TFLOP/s count the causal work of real
                         tokens: 4·H·d·Σn²/2 forward, 3.5 times that forward and backward; errors relative to float32
    wrapper   CUDA       the overhead of `varlen_attention` over calling the same kernel directly
    context   CUDA       8 context ranks of a pack of 128k tokens, simulated one after the other: the attention time of
                         the slowest rank, divided by an eighth of the time of the whole pack; includes copying keys,
                         but not communication

    PYTHONPATH=src python bench/attention.py --device cpu
    PYTHONPATH=src python bench/attention.py --device cuda --section kernels --json attention.json

Times are medians after a warm-up. All alternatives are measured in one run.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, get_args

import numpy as np
import torch
from timer import median_event_seconds, median_seconds
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import pad_sequence

from padfree.attention import choose_backend, varlen_attention, varlen_forward
from padfree.choices import LayoutKind
from padfree.sample import Sample
from padfree.segments import Segments

SECTIONS = {"cpu": ("model",), "cuda": ("kernels", "wrapper", "context")}
NUM_HEADS, NUM_KEY_HEADS, HEAD_DIM = 32, 8, 128
WORLD, ROW = 8, 131_072
MODEL_TOKENS, VOCABULARY = 9_000, 512
AHEAD_CYCLES = 10_000_000  # about 5 ms, in which the host runs ahead of the device
LAYOUTS: tuple[LayoutKind, ...] = get_args(LayoutKind)
GOALS = {"model": 4.0, "wrapper": 0.03, "context": 1.10}

Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=tuple(SECTIONS), default="cpu")
    parser.add_argument("--section", choices=[name for names in SECTIONS.values() for name in names])
    parser.add_argument("--tokens", type=int, default=MODEL_TOKENS, help="tokens in the model section")
    parser.add_argument("--row", type=int, default=ROW, help="tokens of the pack in the context section")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=LAYOUTS, help="layouts of the context section")
    parser.add_argument("--repeats", type=int, default=3, help="in the model section; CUDA sections repeat 20 times")
    parser.add_argument("--json", help="write the results to this file")
    arguments = parser.parse_args()
    sections = SECTIONS[arguments.device] if arguments.section is None else (arguments.section,)
    if not set(sections) <= set(SECTIONS[arguments.device]):
        parser.error(f"--section {arguments.section} does not run on {arguments.device}")

    hardware = torch.cuda.get_device_name() if arguments.device == "cuda" else platform.machine()
    packages = {name: installed(name) for name in ("torch", "transformers", "triton", "flash-attn-4")}
    print(f"{hardware}, {torch.get_num_threads()} CPU threads, python {platform.python_version()}")
    print(", ".join(f"{name} {number}" for name, number in packages.items()))
    report: dict[str, Any] = {"benchmark": "attention", "hardware": hardware, **packages}
    for section in sections:
        print(f"\n{section}")
        run: dict[str, Callable[[], Any]] = {
            "model": lambda: model_section(arguments.tokens, arguments.repeats),
            "kernels": kernels_section,
            "wrapper": wrapper_section,
            "context": lambda: context_section(arguments.row, arguments.layouts),
        }
        report[section] = run[section]()
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(report, file, indent=1)


def installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def table(rows: list[Row]) -> None:
    """Print the rows as aligned columns. A row may lack some of the columns."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[_cell(row.get(name, "")) for name in names] for row in rows]
    widths = [max(len(name), *(len(line[i]) for line in cells)) for i, name in enumerate(names)]
    for line in [names, *cells]:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.1e}" if 0 < abs(value) < 0.01 else f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
    return str(value)


# Length mixes


def log_normal(rng: np.random.Generator, total: int, median: int) -> list[int]:
    """Return log-normal document lengths that fill `total` tokens."""
    lengths: list[int] = []
    while sum(lengths) < total:
        lengths.append(int(np.clip(rng.lognormal(np.log(median), 0.8), 16, total)))
    lengths[int(np.argmax(lengths))] -= sum(lengths) - total
    return lengths


def length_mixes() -> dict[str, list[int]]:
    rng = np.random.default_rng(0)
    return {
        "24 log-normal": rng.lognormal(np.log(1_024), 0.8, size=24).astype(int).tolist(),
        "8 long": rng.integers(3_072, 5_121, size=8).tolist(),
        "one 16k": [16_384],
    }


def long_packs(total: int) -> dict[str, list[int]]:
    """Return three mixes of lengths, each of which fills one pack of `total` tokens."""
    rng = np.random.default_rng(0)
    return {
        "log-normal": log_normal(rng, total, 1024),
        "8 long": [total // 8] * 8,
        "one 16k": [total // 8, *log_normal(rng, total - total // 8, 512)],
    }


def causal_flops(lengths: list[int], *, backward: bool) -> float:
    forward = 4 * NUM_HEADS * HEAD_DIM * sum(length**2 for length in lengths) / 2
    return forward * (3.5 if backward else 1.0)


# The model on the CPU


def model_section(num_tokens: int, repeats: int) -> Row:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    import padfree

    rng = np.random.default_rng(0)
    lengths: list[int] = []
    while sum(lengths) < num_tokens:
        lengths.append(int(rng.integers(64, 513)))
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
    )
    torch.manual_seed(0)
    stock = Qwen3ForCausalLM(config).train()  # type: ignore[no-untyped-call]
    assert config._attn_implementation == "sdpa"  # HF's default
    attached = padfree.attach(copy.deepcopy(stock))
    batch = padfree.collate([Sample(tokens=rng.integers(0, VOCABULARY, size=length)) for length in lengths])
    local = padfree.shard(batch)
    row = {"input_ids": batch.input_ids[None], "position_ids": batch.position_ids[None], "use_cache": False}
    ids, ones = (
        pad_sequence(batch.unpack(x), batch_first=True) for x in (batch.input_ids, torch.ones_like(batch.input_ids))
    )

    def padded() -> Tensor:
        logits: Tensor = stock(input_ids=ids, attention_mask=ones, use_cache=False).logits
        return logits[ones.bool()]

    ways: dict[str, tuple[Callable[[], Tensor], torch.nn.Module]] = {
        "padfree": (lambda: attached(**local.model_inputs()).logits[0], attached),
        "HF packed sdpa": (lambda: stock(**row).logits[0], stock),
        "HF padded sdpa": (padded, stock),
    }
    results = {name: train_time(function, model, batch.labels, repeats) for name, (function, model) in ways.items()}
    _, expected, gradient = results["padfree"]
    rows = []
    for name, (seconds, logits, norm) in results.items():
        error = float((logits - expected).abs().max())
        assert error < 1e-3, f"{name}: logits differ by {error}"
        assert abs(norm - gradient) < 1e-4 * gradient, f"{name}: gradient norm {norm} against {gradient}"
        ratio = seconds / results["padfree"][0]
        rows.append({"way": name, "seconds": seconds, "ratio": ratio, "logits differ by": error})
    table(rows)
    wasted = 1 - batch.num_tokens / ids.numel()
    print(f"{batch.num_tokens} tokens, {len(lengths)} samples of 64 to 512; the padded batch is {wasted:.0%} padding")
    print(f"padfree is {rows[1]['ratio']:.2f} times as fast as HF's packing (goal: at least {GOALS['model']})")
    return {"tokens": batch.num_tokens, "samples": len(lengths), "wasted": wasted, "rows": rows}


def train_time(
    forward: Callable[[], Tensor], model: torch.nn.Module, labels: Tensor, repeats: int
) -> tuple[float, Tensor, float]:
    """Return the seconds of forward and backward, the logits [T, V], and the norm of all gradients."""
    logits = torch.empty(0)

    def both() -> None:
        nonlocal logits
        logits = forward()
        F.cross_entropy(logits, labels, reduction="sum").backward()  # type: ignore[no-untyped-call]

    seconds = median_seconds(both, labels.device, repeats=repeats, warmup=1, before=model.zero_grad)
    norms = [parameter.grad.norm() for parameter in model.parameters() if parameter.grad is not None]
    return seconds, logits.detach(), float(torch.stack(norms).norm())


# Kernels


class Inputs:
    """Random bfloat16 tensors of the attention of a pack, on the device."""

    def __init__(self, mix: str, lengths: list[int]) -> None:
        torch.manual_seed(0)
        self.mix, self.lengths, self.segments = mix, lengths, Segments.from_lengths(lengths, device="cuda")
        tokens = sum(lengths)
        heads = (NUM_HEADS, NUM_KEY_HEADS, NUM_KEY_HEADS, NUM_HEADS)
        self.tensors = [torch.randn(tokens, n, HEAD_DIM, device="cuda", dtype=torch.bfloat16) for n in heads]
        self.q, self.k, self.v, self.dout = self.tensors

    def padded(self, x: Tensor) -> Tensor:
        """Pad the samples of a pack to the longest one: [T, H, d] -> [B, H, longest, d]."""
        return pad_sequence(list(x.split_with_sizes(self.lengths)), batch_first=True).transpose(1, 2)

    def packed(self, x: Tensor) -> Tensor:
        """Remove the padding: [B, H, longest, d] -> [T, H, d]."""
        return torch.cat([row[:, :length].transpose(0, 1) for row, length in zip(x, self.lengths, strict=True)])


def event_times(*functions: Callable[[], Any], repeats: int = 20, calls: int = 1, ahead: bool = False) -> list[float]:
    """Return the median milliseconds of each function. `ahead`: the host runs ahead, so launches are not measured."""
    cycles = AHEAD_CYCLES if ahead else 0
    times = median_event_seconds(*functions, repeats=repeats, calls=calls, warmup=3, sleep_cycles=cycles)
    return [1e3 * seconds for seconds in times]


def with_gradient(function: Callable[..., Tensor], leaves: list[Tensor], dout: Tensor) -> Callable[[], list[Tensor]]:
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]

    def both() -> list[Tensor]:
        out = function(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    return both


def packed_backend(inputs: Inputs, backend: str) -> Callable[..., Tensor]:
    segments = inputs.segments
    return lambda q, k, v: varlen_attention(q, k, v, segments, segments, backend=backend)


def refusal(backend: str) -> str | None:
    try:
        choose_backend("cuda", torch.bfloat16, HEAD_DIM, requested=backend)
    except ValueError as error:
        return "not installed" if "not installed" in str(error) else str(error)
    return None


def kernels_section() -> list[Row]:
    rows: list[Row] = []
    for mix, lengths in length_mixes().items():
        inputs = Inputs(mix, lengths)
        truth = float32_results(inputs)
        timed: dict[str, float] = {}
        for name in ("fa4", "torch", "flex"):
            reason = refusal(name)
            if reason is None:
                row = kernel_row(name, inputs, packed_backend(inputs, name), inputs.tensors, truth)
                timed[name] = row["both ms"]
            else:
                row = {"mix": mix, "kernel": name, "fwd ms": reason}
            rows.append(row)
        rows.extend(padded_rows(inputs, truth))
        chosen = choose_backend("cuda", torch.bfloat16, HEAD_DIM)
        best = min(timed, key=lambda name: timed[name])
        assert timed[chosen] <= 1.05 * timed[best], f"auto takes {chosen}, but {best} is faster on {mix}: {timed}"
        rows.append({"mix": mix, "kernel": f"auto = {chosen}"})
        del inputs, truth
        torch.cuda.empty_cache()
    table(rows)
    print(f"bfloat16, {NUM_HEADS} heads, {NUM_KEY_HEADS} key heads of {HEAD_DIM}; dense cuDNN has K and V expanded")
    return rows


def padded_rows(inputs: Inputs, truth: list[Tensor]) -> list[Row]:
    q, k, v, dout = (inputs.padded(x) for x in inputs.tensors)
    rows = []
    for name, kernel, expanded in (
        ("padded SDPA", SDPBackend.FLASH_ATTENTION, False),
        ("dense cuDNN", SDPBackend.CUDNN_ATTENTION, True),
    ):
        group = NUM_HEADS // NUM_KEY_HEADS if expanded else 1
        keys = [x.repeat_interleave(group, dim=1) for x in (k, v)]

        def function(q: Tensor, k: Tensor, v: Tensor, kernel: SDPBackend = kernel, gqa: bool = not expanded) -> Tensor:
            with sdpa_kernel(kernel):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)

        rows.append(kernel_row(name, inputs, function, [q, *keys, dout], truth))
    return rows


def kernel_row(
    name: str, inputs: Inputs, function: Callable[..., Tensor], tensors: list[Tensor], truth: list[Tensor]
) -> Row:
    """Times and errors of attention on `tensors`: q, k, v and dout, packed [T, H, d] or padded [B, H, longest, d]."""
    *leaves, dout = tensors
    both = with_gradient(function, leaves, dout)
    results = [inputs.packed(x) if x.ndim == 4 else x for x in both()]
    if results[2].shape[1] == NUM_HEADS:  # expanded keys: sum their gradients over the group
        results[2:] = [x.float().view(len(x), NUM_KEY_HEADS, -1, HEAD_DIM).sum(dim=2) for x in results[2:]]
    errors = [relative_error(got, want) for got, want in zip(results, truth, strict=True)]
    assert max(errors) < 1e-2, f"{name} on {inputs.mix}: relative errors {errors}"
    forward_ms, both_ms = event_times(lambda: function(*leaves), both)
    row: Row = {"mix": inputs.mix, "kernel": name}
    for part, taken in (("fwd", forward_ms), ("both", both_ms)):
        flops = causal_flops(inputs.lengths, backward=part == "both")
        row |= {f"{part} ms": taken, f"{part} TFLOP/s": flops / taken / 1e9}
    return {**row, **{f"err {part}": error for part, error in zip(("out", "dq", "dk", "dv"), errors, strict=True)}}


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got.float() - want).norm() / want.norm())


def float32_results(inputs: Inputs) -> list[Tensor]:
    """Return out, dq, dk, dv of the reference in float32, computed one key head at a time to save memory."""
    parts = []
    group = NUM_HEADS // NUM_KEY_HEADS
    for head in range(NUM_KEY_HEADS):
        queries, keys = slice(head * group, (head + 1) * group), slice(head, head + 1)
        leaves = [inputs.q[:, queries].float(), inputs.k[:, keys].float(), inputs.v[:, keys].float()]
        parts.append(with_gradient(packed_backend(inputs, "reference"), leaves, inputs.dout[:, queries].float())())
    return [torch.cat(tensors, dim=1) for tensors in zip(*parts, strict=True)]


# The wrapper


def wrapper_section() -> list[Row]:
    rows: list[Row] = []
    for mix, lengths in length_mixes().items():
        inputs = Inputs(mix, lengths)
        for name, bare in (("torch", bare_torch(inputs)), ("fa4", bare_flash4(inputs))):
            if bare is None:
                rows.append({"mix": mix, "kernel": name, "bare ms": refusal(name)})
                continue
            ours = with_gradient(packed_backend(inputs, name), inputs.tensors[:3], inputs.dout)
            for got, want in zip(ours(), bare(), strict=True):
                assert relative_error(got, want.float()) < 5e-3
            ours_ms, bare_ms = event_times(ours, bare, calls=10)
            cost = ours_ms / bare_ms - 1
            rows.append({"mix": mix, "kernel": name, "bare ms": bare_ms, "ours ms": ours_ms, "cost": cost})
    table(rows)
    print(f"forward and backward, 10 calls in a row; goal: a cost below {GOALS['wrapper']}")
    return rows


def bare_torch(inputs: Inputs) -> Callable[[], list[Tensor]]:
    offsets, longest, scale = inputs.segments.cu_seqlens, inputs.segments.max_seqlen, HEAD_DIM**-0.5
    call = (offsets, offsets, longest, longest, 0.0, True)

    def both() -> list[Tensor]:
        q, k, v = inputs.q, inputs.k, inputs.v
        out, lse, state, unused, _ = torch.ops.aten._flash_attention_forward(q, k, v, *call, False, scale=scale)
        arguments = (inputs.dout, q, k, v, out, lse, *call, state, unused)
        return [out, *torch.ops.aten._flash_attention_backward(*arguments, scale=scale)]

    return both


def bare_flash4(inputs: Inputs) -> Callable[[], list[Tensor]] | None:
    if refusal("fa4") is not None:
        return None
    from flash_attn.cute import flash_attn_varlen_func

    offsets, longest = inputs.segments.cu_seqlens, inputs.segments.max_seqlen

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        lengths = {"max_seqlen_q": longest, "max_seqlen_k": longest}
        out = flash_attn_varlen_func(q, k, v, cu_seqlens_q=offsets, cu_seqlens_k=offsets, causal=True, **lengths)
        result: Tensor = out[0] if isinstance(out, tuple) else out
        return result

    return with_gradient(function, inputs.tensors[:3], inputs.dout)


# Context ranks


def context_section(total: int, layouts: Sequence[LayoutKind]) -> list[Row]:
    from padfree.cp import make_layout
    from padfree.cp.context_plan import ContextPlan

    rows: list[Row] = []
    for mix, lengths in long_packs(total).items():
        inputs = Inputs(mix, lengths)
        segments = inputs.segments
        whole, _ = varlen_forward(inputs.q, inputs.k, inputs.v, segments, segments)
        both = with_gradient(packed_backend(inputs, "auto"), inputs.tensors[:3], inputs.dout)
        whole_ms, cold_whole_ms = (event_times(both, repeats=5, calls=10, ahead=ahead)[0] for ahead in (True, False))
        for kind in layouts:
            layout = make_layout(segments, WORLD, kind)
            plans = [ContextPlan(layout, segments, rank, inputs.q.device) for rank in range(WORLD)]
            times, cold = zip(*(rank_times(inputs, plan, whole) for plan in plans), strict=True)
            row = {"mix": mix, "layout": kind, "whole / 8 ms": whole_ms / WORLD, "slowest ms": max(times)}
            row |= {"mean ms": statistics.mean(times), "ratio": max(times) * WORLD / whole_ms}
            row |= {"mean ratio": sum(times) / whole_ms, "cold ratio": max(cold) * WORLD / cold_whole_ms}
            row["most pieces"] = max(plan.queries.num_segments for plan in plans)
            row["ranks"] = [{"ms": ms, **rank_facts(plan)} for ms, plan in zip(times, plans, strict=True)]
            rows.append(row)
        del inputs, whole, both
    table([{name: value for name, value in row.items() if name != "ranks"} for row in rows])
    print(f"{WORLD} ranks, {total} tokens, {choose_backend('cuda', torch.bfloat16, HEAD_DIM)}; ", end="")
    print(f"goal: a ratio of at most {GOALS['context']} for balanced")
    print("cold: the device is idle before the first of ten calls")
    return rows


def rank_times(inputs: Inputs, plan: Any, whole: Tensor) -> tuple[float, float]:
    """Return the milliseconds of one rank's forward and backward with the copies of keys, warm and cold.

    Keys of other ranks are copied from the whole pack, as if the rank had received them.
    """
    from padfree.cp.allgather import local_attention
    from padfree.cp.keys import prepare_keys

    own = [x[plan.own] for x in (inputs.q, inputs.k, inputs.v)]
    foreign, dout = prepare_keys(plan).pool_tokens[len(plan.own) :], inputs.dout[plan.own]

    def both() -> list[Tensor]:
        if not len(foreign):
            return with_gradient(lambda q, k, v: local_attention(q, k, v, plan), own, dout)()
        received = [x.index_select(0, foreign) for x in (inputs.k, inputs.v)]
        return with_gradient(
            lambda q, k, v, other_k, other_v: local_attention(q, (k, other_k), (v, other_v), plan),
            [*own, *received],
            dout,
        )()

    error = relative_error(both()[0], whole[plan.own].float())
    assert error < 5e-3, f"{plan.layout.kind} layout, rank {plan.rank}: relative error {error}"
    warm, cold = (event_times(both, repeats=10, calls=10, ahead=ahead)[0] for ahead in (True, False))
    return warm, cold


def rank_facts(plan: Any) -> Row:
    """Return the quantities that determine a rank's time, such as its numbers of queries and keys."""
    from padfree.cp import keys_read, modelled_cost, work
    from padfree.cp.keys import prepare_keys

    rank, keys = plan.rank, prepare_keys(plan)
    pairs, read, cost = (int(count(plan.layout, plan.segments)[rank]) for count in (work, keys_read, modelled_cost))
    return {
        "pairs": pairs,
        "modelled pairs": cost,
        "keys before pieces": read - len(plan.own),
        "received keys": sum(keys.receive),
        "copied keys": 0 if keys.selection.is_everything else keys.segments.num_tokens,
        "pieces": plan.queries.num_segments,
    }


if __name__ == "__main__":
    main()
