"""Gradients of a mixture of experts with the sizes of Qwen3-30B-A3B, computed by padfree and by transformers.

    transformers      packed by position ids (`sdpa`), experts with its `grouped_mm`
    padfree           the same experts in compiled layers, fused head
    floor             only the grouped matmuls of the experts, forward and backward, on tokens sorted by expert

The floor is the time of the matmuls of the experts, with tokens routed at random. The printed share is the floor
divided by the time of padfree's step.

    PYTHONPATH=src python bench/moe.py --device cuda
    PYTHONPATH=src python bench/moe.py --device cpu
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from side_by_side import ModelWay, assert_same_losses, compare, header, padfree_way, show_ratios
from step_ways import Setting, log_normal_samples, packed_by_hf
from timer import median_on
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from padfree.distributed import distributed, make_mesh

SHAPES: dict[str, dict[str, Any]] = {
    "cuda": {"hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
             "num_experts_per_tok": 8, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
             "vocab_size": 151_936, "num_hidden_layers": 12},
    "cpu": {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "num_experts": 8,
            "num_experts_per_tok": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
            "vocab_size": 256, "num_hidden_layers": 2},
}  # fmt: skip
SAMPLES: dict[str, dict[str, int]] = {
    "cuda": {"count": 20, "median": 490, "longest": 8192},
    "cpu": {"count": 6, "median": 40, "longest": 128},
}
STOCK, OURS = "transformers, grouped_mm", "padfree"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--layers", type=int, help="number of layers (Qwen3-30B-A3B has 48)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--compile", choices=("none", "aot_eager", "inductor"))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    shape = dict(SHAPES[arguments.device])
    shape["num_hidden_layers"] = arguments.layers or shape["num_hidden_layers"]
    compile = arguments.compile or ("inductor" if arguments.device == "cuda" else "none")
    samples = log_normal_samples(vocabulary=shape["vocab_size"], **SAMPLES[arguments.device])
    with distributed(device=arguments.device) as device:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        setting = Setting(
            shape="", device=device, dtype=dtype, samples=samples, old_logprobs=[], mesh=make_mesh(device)
        )
        report = header(setting, f"Qwen3-30B-A3B with {shape['num_hidden_layers']} layers")
        config = cast(Any, Qwen3MoeConfig)(
            **shape, norm_topk_prob=True, tie_word_embeddings=False, max_position_embeddings=8192,
            attn_implementation="sdpa", experts_implementation="grouped_mm",
        )  # fmt: skip
        ways = [
            ModelWay(name=STOCK, build=partial(packed_by_hf, setting=setting)),
            ModelWay(name=OURS, build=partial(padfree_way, setting=setting, compile=compile)),
        ]
        rows = compare(ways, Qwen3MoeForCausalLM, config, setting, arguments.repeats)
        report |= {"ways": rows, "times as fast": show_ratios(rows, OURS)}
        floor = shape["num_hidden_layers"] * experts_floor(shape, setting, arguments.repeats)
    assert_same_losses(rows)
    ours = next(row for row in rows if row["way"] == OURS)
    share = floor / ours["seconds"]
    print(f"grouped matmuls only: {floor * 1e3:.1f} ms, {share:.1%} of padfree's step")
    report |= {"floor": floor, "share of the floor": share}
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1))


def experts_floor(shape: dict[str, Any], setting: Setting, repeats: int) -> float:
    """Return the seconds of the matmuls of the experts: two in forward and four in backward."""
    hidden, inner, experts = shape["hidden_size"], shape["moe_intermediate_size"], shape["num_experts"]
    tokens = sum(len(sample) for sample in setting.samples)
    make = partial(torch.randn, device=setting.device, dtype=setting.dtype)
    rows = tokens * shape["num_experts_per_tok"]
    counts = torch.bincount(torch.randint(0, experts, (rows,)), minlength=experts)
    offsets = counts.cumsum(0).to(device=setting.device, dtype=torch.int32)
    inputs = {
        "up": (make(rows, hidden, requires_grad=True), make(experts, 2 * inner, hidden, requires_grad=True)),
        "down": (make(rows, inner, requires_grad=True), make(experts, hidden, inner, requires_grad=True)),
    }
    grouped: Any = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
    gradients = {name: make(rows, weight.shape[1]) for name, (_, weight) in inputs.items()}

    def call() -> None:
        for name, (values, weight) in inputs.items():
            output = grouped(values, weight.transpose(-2, -1), offs=offsets)
            torch.autograd.grad(output, (values, weight), gradients[name])

    return median_on(call, setting.device, repeats=repeats)


if __name__ == "__main__":
    main()
