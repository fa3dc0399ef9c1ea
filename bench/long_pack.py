"""One long sample over all context ranks of a machine: the time of one rank, and a projection of the step.

    part         what is measured
    pack         one sample of 1,048,576 tokens, 8 context ranks of 131,072 each, Qwen3-8B's shape, bfloat16
    simulated    only the rank with the most work runs; data from other ranks is replaced by data of the right size
    attention    the rank's queries to all earlier keys, forward and backward, for `allgather` and `ring`; checked
                 against float64 at a few positions
    layers       one and two whole decoder layers of a stock model through padfree, each recomputed for backward
                 (checkpointing `full`, the only one that fits); the difference is the time of a layer
    head         the fused loss of the rank's tokens over the whole vocabulary
    step         projected from all layers and the head; prints the arithmetic. The link speed is an assumption (--link)

    PYTHONPATH=src python bench/long_pack.py --device cuda
    PYTHONPATH=src python bench/long_pack.py --device cpu --tokens 4096 --shape tiny

Published for the same size: 380 s and 56 GB per device on 8 H100 (TRL with ring attention).
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any
from unittest import mock

import numpy as np
import torch
from step_ways import SHAPES as STEP_SHAPES
from timer import Stopwatch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from padfree.attention import choose_backend
from padfree.batch import LmHead, LocalBatch, PackedBatch
from padfree.choices import LayoutKind
from padfree.cp import communication_bytes, make_layout, modelled_cost, shard, work
from padfree.cp.allgather import local_attention, prepare_keys
from padfree.cp.context_plan import ContextPlan
from padfree.cp.ring import PlayedRing, prepare_steps, ring_backward, ring_forward
from padfree.head import fused_loss
from padfree.layers.recompute import recompute_layers
from padfree.losses import LossInputs, SFTSettings, make_token_loss
from padfree.model import attach, hidden_states
from padfree.model.structure import layers_of
from padfree.packing import collate
from padfree.sample import Sample

SHAPES: dict[str, dict[str, int]] = {
    "8b": {"num_hidden_layers": 36, "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32,
           "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936},
    "tiny": STEP_SHAPES["tiny"],
}  # fmt: skip
TOKENS, WORLD = 1 << 20, 8
STATE_BYTES = 16  # float32 weights, gradients and two moments
CHECKED = 6
"""The number of queries whose attention is compared with float64."""
BOUND = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Largest accepted error of attention, relative to the largest output; a bfloat16 number has 8 significant bits."""
WARM_UP_TOKENS = 1 << 15
FEW_IDS = 512
"""Size of the embedding's vocabulary in this benchmark; it does not affect the time of a lookup."""
GB = 1e9

Row = dict[str, Any]


class PlayedGroup:
    """A substitute for the process group, because only a single rank is simulated."""

    def __init__(self, rank: int, world: int) -> None:
        self._rank, self._world = rank, world

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._world


def made_up_exchange(rows: Tensor, send: Any, receive: Any, group: Any) -> Tensor:
    """Return made-up data of the size that other ranks would send."""
    wanted = sum(receive)
    received = rows.new_zeros(wanted, *rows.shape[1:])
    if len(rows):
        for start in range(0, wanted, len(rows)):
            received[start : start + len(rows)] = rows[: wanted - start]
    return received


class Clock:
    """Measures the seconds of a call on the device, and its peak memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, call: Callable[[], Any]) -> tuple[float, float, Any]:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        with Stopwatch(self.device) as watch:
            result = call()
        peak = float(torch.cuda.max_memory_allocated()) if self.device.type == "cuda" else float("nan")
        return watch.seconds, peak, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="tokens of the sample; a multiple of 8")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="8b")
    parser.add_argument("--layout", choices=("balanced", "headtail", "contiguous"), default="balanced")
    parser.add_argument("--methods", nargs="+", choices=("allgather", "ring"), default=("allgather", "ring"))
    parser.add_argument("--link", type=float, default=450.0, help="assumed GB/s per device (default: NVLink 4)")
    parser.add_argument("--json", help="write the results to this file")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    dtype = torch.bfloat16 if arguments.device == "cuda" else torch.float32
    hardware = torch.cuda.get_device_name() if arguments.device == "cuda" else platform.machine()
    shape = SHAPES[arguments.shape]
    print(f"{hardware}, torch {torch.__version__}, {dtype}, ", end="")
    print(f"attention {choose_backend(device.type, dtype, shape['head_dim'])}")

    batch = one_sample(arguments.tokens)
    layout = make_layout(batch.segments, WORLD, arguments.layout)
    costs = modelled_cost(layout, batch.segments)
    rank = int(costs.argmax())
    pairs = int(work(layout, batch.segments)[rank])
    print(f"{arguments.tokens:,} tokens over {WORLD} ranks, {arguments.layout}: simulating rank {rank}, ", end="")
    print(f"{pairs:,} pairs of query and key, {costs.max() / costs.mean():.3f} of the mean cost\n")

    with redirect_stdout(None):  # compile kernels and load libraries before timing
        short = one_sample(min(arguments.tokens, WARM_UP_TOKENS))
        short_layout = make_layout(short.segments, WORLD, arguments.layout)
        for method in arguments.methods:
            attention_times(short, short_layout, rank, method, shape, device, dtype, 1)
        layer_times(short, arguments.layout, rank, shape, device, dtype, 1)
    report: Row = {"hardware": hardware, "torch": torch.__version__, "tokens": arguments.tokens, "rank": rank}
    attention = {
        method: attention_times(batch, layout, rank, method, shape, device, dtype, pairs)
        for method in arguments.methods
    }
    one, two = (layer_times(batch, arguments.layout, rank, shape, device, dtype, layers) for layers in (1, 2))
    head = head_times(batch, arguments.layout, rank, shape, device, dtype)
    sent = communication_bytes(
        "allgather", layout, batch.segments, num_heads=shape["num_attention_heads"],
        num_key_heads=shape["num_key_value_heads"], head_dim=shape["head_dim"], element_size=dtype.itemsize,
    )  # fmt: skip
    wire = float((2 * sent.forward + sent.backward).max()) / (arguments.link * GB)
    report |= {"attention": attention, "layers": [one, two], "head": head, "wire_seconds_a_layer": wire}
    report["step"] = projection(shape, one, two, head, wire, arguments.link, device)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(report, file, indent=1)


def one_sample(tokens: int) -> PackedBatch:
    rng = np.random.default_rng(0)
    return collate([Sample(tokens=rng.integers(0, FEW_IDS, tokens))]).padded_to_multiple(WORLD)


# Attention


def attention_times(
    batch: PackedBatch, layout: Any, rank: int, method: str, shape: Row, device: torch.device, dtype: torch.dtype,
    pairs: int,
) -> Row:  # fmt: skip
    """Measure forward and backward of one layer's attention on one rank, without communication."""
    heads, key_heads, dim = shape["num_attention_heads"], shape["num_key_value_heads"], shape["head_dim"]
    plan = ContextPlan(layout, batch.segments.to(device), rank, device)
    generator = torch.Generator(device).manual_seed(0)

    def random(rows: int, width: int) -> Tensor:
        return torch.randn(rows, width, dim, generator=generator, device=device, dtype=dtype)

    k, v = (random(batch.num_tokens, key_heads) for _ in range(2))
    q, dout = (random(len(plan.own), heads) for _ in range(2))
    scale = dim**-0.5
    if method == "allgather":
        keys = prepare_keys(plan)
        foreign = keys.pool_tokens[len(plan.own) :]
        leaves = [x.detach().requires_grad_() for x in (q, *(t[plan.own] for t in (k, v)))]
        received = [x.index_select(0, foreign).requires_grad_() for x in (k, v)]

        def forward() -> Any:
            return local_attention(leaves[0], (leaves[1], received[0]), (leaves[2], received[1]), plan, scale=scale)

        def backward(out: Any) -> Any:
            return torch.autograd.grad(out, [*leaves, *received], dout)

    else:
        steps = prepare_steps(plan)
        share = len(plan.own)
        order = torch.cat([ContextPlan(layout, batch.segments, other, device).own for other in range(WORLD)])
        blocks = [
            (k[order[other * share : (other + 1) * share]], v[order[other * share : (other + 1) * share]])
            for other in range(WORLD)
        ]
        options: Row = {"scale": scale, "softcap": None, "backend": "auto"}

        def forward() -> Any:
            return ring_forward(q, *blocks[rank], steps, PlayedRing(rank, blocks), **options)

        def backward(out: Any) -> Any:
            return ring_backward(
                dout, q, *blocks[rank], out[0].to(dtype), out[1], steps, PlayedRing(rank, blocks), _Forgetful(),
                **options,
            )  # fmt: skip

    clock = Clock(device)
    forward_seconds, forward_peak, out = clock(forward)
    first = out if method == "allgather" else out[0]
    error = checked(first.detach(), q, k, v, plan, scale)
    assert error < BOUND[dtype], f"{method}: attention is off by {error} at one of {CHECKED} positions"
    backward_seconds, backward_peak, _ = clock(lambda: backward(out))
    flops = 4.0 * heads * dim * pairs
    found = {
        "forward_seconds": forward_seconds,
        "backward_seconds": backward_seconds,
        "forward_tflops": flops / forward_seconds / 1e12,
        "backward_tflops": 2.5 * flops / backward_seconds / 1e12,
        "peak_gb": max(forward_peak, backward_peak) / GB,
        "largest_error": error,
    }
    print(
        f"attention, {method:<10} forward {forward_seconds:8.3f} s {found['forward_tflops']:6.0f} TFLOP/s   backward "
        f"{backward_seconds:8.3f} s {found['backward_tflops']:6.0f} TFLOP/s   {found['peak_gb']:5.1f} GB   "
        f"error {error:.1e}"
    )
    return found


class _Forgetful:
    """Stands for the ring of gradients. Other ranks add nothing, and gradients are not kept."""

    def post(self, *tensors: Tensor) -> None:
        self._posted = tensors

    def collect(self) -> tuple[Tensor, ...]:
        return tuple(tensor.zero_() for tensor in self._posted)


def checked(out: Tensor, q: Tensor, k: Tensor, v: Tensor, plan: ContextPlan, scale: float) -> float:
    """Return the largest error of some queries, relative to the largest output."""
    groups = q.shape[1] // k.shape[1]
    worst = 0.0
    for place in np.linspace(0, len(plan.own) - 1, CHECKED).astype(int).tolist():
        position = int(plan.own[place])
        keys, values = (x[: position + 1].double() for x in (k, v))
        query = q[place].double().view(k.shape[1], groups, -1)
        weights = torch.softmax(torch.einsum("hgd,nhd->hgn", query, keys) * scale, dim=-1)
        expected = torch.einsum("hgn,nhd->hgd", weights, values).flatten(0, 1)
        worst = max(worst, float((out[place].double() - expected).abs().max() / expected.abs().max()))
    return worst


# Layers


def layer_times(
    batch: PackedBatch, kind: LayoutKind, rank: int, shape: Row, device: torch.device, dtype: torch.dtype, layers: int
) -> Row:
    """Measure forward and backward of `layers` decoder layers on one rank, with recomputation."""
    torch.manual_seed(0)
    sizes = {**shape, "num_hidden_layers": layers, "vocab_size": FEW_IDS}
    rope = {"rope_type": "yarn", "factor": batch.num_tokens / 40_960, "original_max_position_embeddings": 40_960}
    rope = {"rope_type": "default"} if rope["factor"] <= 1 else rope  # type: ignore[operator]
    make: Any = Qwen3Config
    config = make(**sizes, max_position_embeddings=batch.num_tokens, rope_parameters={"rope_theta": 1e6, **rope})
    with torch.device(device):
        plain: Any = Qwen3ForCausalLM(config)  # type: ignore[no-untyped-call]
    model = attach(plain.to(dtype))
    recompute_layers(layers_of(model), "full")
    model.train()
    local = local_batch(batch, kind, rank, device)
    standing = sum(parameter.numel() * parameter.itemsize for parameter in model.parameters())

    def both() -> None:
        hidden = hidden_states(model, local)
        hidden.backward(torch.ones_like(hidden) / hidden.numel())  # type: ignore[no-untyped-call]

    clock = Clock(device)
    with mock.patch("padfree.cp.allgather.exchange_rows", made_up_exchange):
        seconds, peak, _ = clock(both)
    finite = all(
        parameter.grad is not None and bool(torch.isfinite(parameter.grad).all())
        for parameter in layers_of(model)[0].parameters()
    )
    assert finite, "a gradient is not finite"
    found = {"layers": layers, "seconds": seconds, "peak_gb": (peak - 2 * standing) / GB}
    print(f"layers, {layers:<14} {seconds:8.3f} s, {found['peak_gb']:5.1f} GB besides weights and gradients")
    return found


def local_batch(batch: PackedBatch, kind: LayoutKind, rank: int, device: torch.device) -> LocalBatch:
    group: Any = PlayedGroup(rank, WORLD)
    return shard(batch.to(device), world=WORLD, rank=rank, group=group, kind=kind)


def head_times(
    batch: PackedBatch, kind: LayoutKind, rank: int, shape: Row, device: torch.device, dtype: torch.dtype
) -> Row:
    """Measure the loss of this rank's tokens and its gradients, without storing all logits."""
    local = local_batch(batch, kind, rank, device)
    torch.manual_seed(0)
    width = shape["hidden_size"]
    weight = (torch.randn(shape["vocab_size"], width, device=device, dtype=dtype) / width**0.5).requires_grad_()
    hidden = torch.randn(len(local.labels), width, device=device, dtype=dtype).requires_grad_()
    inputs = LossInputs.from_batch(local)
    loss = make_token_loss(inputs, SFTSettings(), reduce=lambda values: values)
    standing = weight.numel() * weight.itemsize

    def both() -> Tensor:
        found = fused_loss(hidden, LmHead(weight=weight), local.labels, loss, memory="low").loss
        found.backward()  # type: ignore[no-untyped-call]
        return found

    clock = Clock(device)
    clock(both)  # compile the kernels
    weight.grad = hidden.grad = None
    seconds, peak, value = clock(both)
    assert bool(torch.isfinite(value)), "the loss is not finite"
    found = {"seconds": seconds, "peak_gb": (peak - 2 * standing) / GB}
    print(f"head {'':<17} {seconds:8.3f} s, {found['peak_gb']:5.1f} GB besides its weight and gradient\n")
    return found


# The step


def projection(shape: Row, one: Row, two: Row, head: Row, wire: float, link: float, device: torch.device) -> Row:
    layers, hidden, mlp = shape["num_hidden_layers"], shape["hidden_size"], shape["intermediate_size"]
    heads = (2 * shape["num_attention_heads"] + 2 * shape["num_key_value_heads"]) * shape["head_dim"]
    weights = layers * hidden * (heads + 3 * mlp) + 2 * hidden * shape["vocab_size"]
    layer = two["seconds"] - one["seconds"]
    kept = two["peak_gb"] - one["peak_gb"]
    seconds = layers * (layer + wire) + head["seconds"]
    print(f"a layer    {two['seconds']:.2f} s - {one['seconds']:.2f} s = {layer:.2f} s measured")
    print(
        f"links      {wire * 1e3:.1f} ms per layer at {link:.0f} GB/s: keys and values for forward, again for backward,"
    )
    print("           and their gradients. Assumed: this speed, no overlap with compute, and no other waiting")
    print(
        f"step       {layers} x ({layer:.2f} + {wire:.3f}) s + {head['seconds']:.2f} s head = {seconds:.0f} s; "
        "gathering weights and reducing gradients overlaps with compute"
    )
    found: Row = {"seconds": seconds, "layer_seconds": layer}
    if device.type == "cuda":
        states = weights * STATE_BYTES / WORLD / GB
        gathered = (2 * hidden * (heads + 3 * mlp) * (2 + 2 + 4) / 2 + 2 * hidden * shape["vocab_size"] * 2) / GB
        inside = max(one["peak_gb"] + (layers - 1) * kept, head["peak_gb"])
        total = states + gathered + inside
        print(
            f"memory     {weights / 1e9:.2f} billion weights x {STATE_BYTES} bytes / {WORLD} = {states:.1f} GB states"
        )
        print(f"           {gathered:.1f} GB gathered: two layers with a gradient, embeddings and head, bfloat16")
        print(
            f"           {one['peak_gb']:.1f} GB with one layer + {layers - 1} x {kept:.2f} GB for each further layer"
        )
        print(f"           {total:.0f} GB in all")
        found |= {"memory_gb": total, "states_gb": states, "kept_gb_a_layer": kept}
    print("published  380 s and 56 GB per device on 8 H100 (TRL, ring attention); not measured here")
    return found


if __name__ == "__main__":
    main()
