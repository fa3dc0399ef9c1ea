"""Gradients of a hybrid model with the sizes and layer types of Qwen3.5-4B, computed in three ways.

A hybrid model also has mixers: layers that mix tokens by a recurrence or a convolution instead of attention.

    padfree, fast                       flash-linear-attention and the convolution get the segment boundaries
    transformers                        its own packing, with flash-linear-attention if it is installed
    padfree, one sample at a time       the mixer's plain PyTorch code on each segment: the definition of correct
transformers does not pass the sample boundaries to the convolution, so it mixes tokens of neighbouring samples. Without
flash-linear-attention, the recurrence does not get the boundaries either. The attention of transformers is `sdpa`;
`--more` adds variable-length attention.

    PYTHONPATH=src python bench/mixers.py --device cuda
    PYTHONPATH=src python bench/mixers.py --device cpu
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
from side_by_side import ModelWay, assert_same_losses, compare, header, padfree_way, show_ratios
from step_ways import Gradients, Setting, built_in, log_normal_samples, packed_by_hf, public_attention
from transformers import AttentionInterface, AttentionMaskInterface, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from padfree.distributed import distributed, make_mesh
from padfree.packing import collate

SHAPES: dict[str, dict[str, Any]] = {
    "cuda": {"hidden_size": 2560, "intermediate_size": 9216, "num_attention_heads": 16, "num_key_value_heads": 4,
             "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
             "linear_value_head_dim": 128, "vocab_size": 248_320, "num_hidden_layers": 16},
    "cpu": {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
            "linear_value_head_dim": 16, "vocab_size": 256, "num_hidden_layers": 4},
}  # fmt: skip
SAMPLES: dict[str, dict[str, int]] = {
    "cuda": {"count": 20, "median": 490, "longest": 8192},
    "cpu": {"count": 6, "median": 40, "longest": 128},
}
SLOW, FAST, STOCK = "padfree, one sample at a time", "padfree, fast", "transformers, sdpa"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--layers", type=int, help="number of layers (Qwen3.5-4B has 32); every fourth has attention")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--compile", choices=("none", "aot_eager", "inductor"))
    parser.add_argument("--more", action="store_true", help="also run transformers with variable-length attention")
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
        report = header(setting, f"Qwen3.5-4B with {shape['num_hidden_layers']} layers")
        config = cast(Any, Qwen3_5TextConfig)(
            **shape, tie_word_embeddings=True, max_position_embeddings=8192, attn_implementation="sdpa"
        )
        ways = [
            ModelWay(name=FAST, build=partial(padfree_way, setting=setting, compile=compile)),
            ModelWay(name=STOCK, build=partial(stock, setting=setting), note=_note()),
            ModelWay(name=SLOW, build=partial(padfree_way, setting=setting, compile=compile, fast_mixers=False)),
        ]
        if arguments.more:
            ways.append(
                ModelWay(name="transformers, variable-length attention", build=partial(varlen, setting=setting))
            )
        rows = compare(ways, Qwen3_5ForCausalLM, config, setting, arguments.repeats)
        report |= {"ways": rows, "times as fast": show_ratios(rows, FAST)}
    assert_same_losses(rows)
    slow = next(row for row in rows if row["way"] == SLOW)
    # In bfloat16 the gradients differ by rounding, which grows with the number of layers, so only float32 is compared.
    # Tests compare bfloat16 gradients with float32.
    assert dtype != torch.float32 or slow["apart"] < 1e-4, "the two alternatives of padfree differ"
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1))


def _lengths(setting: Setting) -> dict[str, Any]:
    segments = collate(setting.samples).to(setting.device).segments
    cu, longest = segments.cu_seqlens, segments.max_seqlen
    return {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": longest, "max_length_k": longest}


def _note() -> str:
    if find_spec("fla") is None:
        return "without flash-linear-attention: recurrence and convolution leak across samples"
    return "the recurrence gets cu_seq_lens_q; the convolution leaks three tokens into each sample"


def stock(model: Any, setting: Setting) -> Gradients:
    """Use transformers with packing by position ids, and with cumulative lengths for kernels that take them."""
    return packed_by_hf(model, setting, **(_lengths(setting) if find_spec("fla") is not None else {}))


def varlen(model: Any, setting: Setting) -> Gradients:
    """Use transformers with PyTorch's variable-length attention instead of a mask."""
    AttentionInterface.register("bench_varlen", partial(public_attention, built_in))
    AttentionMaskInterface.register("bench_varlen", lambda *args, **kwargs: None)
    model.set_attn_implementation("bench_varlen")
    return packed_by_hf(model, setting, **_lengths(setting))


if __name__ == "__main__":
    main()
