"""Experts in decode steps, and routing replay, with the sizes of Qwen3-30B-A3B and 12 of its 48 layers.

    section    what is measured
    kernel     the grouped matmuls of a decode step compared with a loop over the experts, and their speed
    decode     tokens/s of the in-process sampler: experts of transformers without CUDA graphs, padfree's experts
               without and with CUDA graphs; 256 responses, 8 per prompt of 128 tokens
    routes     a decode step with and without recording the routes (the experts that each token uses)
    update     gradients of 14,918 tokens in compiled layers: without replay of routes, with layers that can replay but
               get no routes, and with random routes

    PYTHONPATH=src python bench/decode_experts.py
    PYTHONPATH=src python bench/decode_experts.py --section kernel

Weights are random, and no token ends a response. Kernels are compiled and graphs captured before timing. Responses have
32 tokens without graphs and 128 with graphs.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from gpu_only import cuda_device
from moe import SAMPLES, SHAPES
from step_ways import fresh, log_normal_samples
from timer import Stopwatch, mean_in_a_row, median_event_seconds
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from padfree.distributed import Mesh, distributed, make_mesh
from padfree.losses import SFTSettings
from padfree.model.route_replay import RouteRecorder
from padfree.model.stacked_experts import stacked_experts
from padfree.optim.optimizer import make_optimizer
from padfree.optim.optimizer_settings import OptimizerConfig
from padfree.rollout import SamplingRequest
from padfree.rollout.engines.in_process import decode_experts
from padfree.rollout.engines.in_process.cached_model import CachedModel
from padfree.rollout.engines.in_process.decode import Decoder
from padfree.rollout.sampling_rng import response_keys
from padfree.sample import Sample
from padfree.sharding.parallelize import parallelize, transformations
from padfree.train.engine import Engine, LossSettings
from padfree.train.microbatch import PackSettings
from padfree.train.scorer import Scorer

SECTIONS = ("kernel", "decode", "routes", "update")
KERNEL_TOKENS = (1, 16, 256, 8192)
KERNEL_ERROR = 1e-2  # largest accepted difference from the loop, relative to the largest element
RESPONSES, GROUP, PROMPT_TOKENS = 256, 8, 128
FEW_SLOTS = 16
EAGER_TOKENS, CAPTURED_TOKENS, RECORDED_TOKENS = 32, 128, 64
STEPS, REPEATS = 20, 5
MAX_TOKENS = 16_384
GIB = 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--section", choices=SECTIONS, help="run only this section")
    parser.add_argument("--layers", type=int, default=12, help="number of layers (Qwen3-30B-A3B has 48)")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device, report = cuda_device()
    shape = {**SHAPES["cuda"], "num_hidden_layers": arguments.layers}
    with distributed(device="cuda"):
        for section in [arguments.section] if arguments.section else SECTIONS:
            with fresh():
                if section == "kernel":
                    report["kernel"] = kernel(shape, device)
                elif section == "decode":
                    report["decode"] = decode(shape, device)
                elif section == "routes":
                    report["routes"] = recorded(shape, device)
                else:
                    report["update"] = update(shape, make_mesh(device))
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1))


def make_model(shape: dict[str, Any], device: torch.device) -> Any:
    config = cast(Any, Qwen3MoeConfig)(
        **shape, max_position_embeddings=40_960, norm_topk_prob=True, tie_word_embeddings=False,
        experts_implementation="grouped_mm",
    )  # fmt: skip
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if device.type == "cuda" else torch.float32)
    try:
        with device:
            return cast(Any, Qwen3MoeForCausalLM)(config)
    finally:
        torch.set_default_dtype(default)


# Grouped matmuls


def kernel(shape: dict[str, Any], device: torch.device) -> dict[int, dict[str, float]]:
    """Time the two grouped matmuls of the experts of a layer, and compare them with the reference."""
    hidden, inner, experts = shape["hidden_size"], shape["moe_intermediate_size"], shape["num_experts"]
    top, dtype = shape["num_experts_per_tok"], torch.bfloat16
    found = {}
    torch.manual_seed(0)

    def random(*sizes: int) -> Tensor:
        return torch.randn(*sizes, device=device, dtype=dtype)

    up, down = random(experts, 2 * inner, hidden) * 0.02, random(experts, hidden, inner) * 0.02
    for tokens in KERNEL_TOKENS:
        choices = torch.rand(tokens, experts, device=device).topk(top).indices
        order, starts = decode_experts.sorted_rows(choices, experts)
        arguments = {
            "up": (random(tokens, hidden), up, None, order, starts, top, False, False),
            "down": (random(tokens * top, inner), down, None, order, starts, 0, True, False),
        }
        line, ms = f"{tokens:5d} tokens:", {}
        for name, given in arguments.items():
            exact = decode_experts.reference(*given).float()
            difference = float((decode_experts.grouped_linear(*given).float() - exact).abs().max() / exact.abs().max())
            assert difference < KERNEL_ERROR, (name, tokens, difference)
            ms[name] = 1e3 * median_event_seconds(partial(decode_experts.grouped_linear, *given), repeats=10)[0]
            line += f"  {name} {ms[name]:.3f} ms (difference {difference:.1e})"
        seconds = (ms["up"] + ms["down"]) / 1e3
        weights = int((starts.diff() > 0).sum()) * 3 * hidden * inner * up.element_size()
        ms["TB/s"] = weights / seconds / 1e12
        ms["TFLOP/s"] = 2 * tokens * top * 3 * hidden * inner / seconds / 1e12
        sort = partial(decode_experts.sorted_rows, choices, experts)
        ms["sorting"] = 1e3 * median_event_seconds(sort, repeats=STEPS)[0]
        print(
            f"{line}  {ms['TB/s']:.2f} TB/s of weights  {ms['TFLOP/s']:.0f} TFLOP/s  sorting {ms['sorting']:.3f} ms",
            flush=True,
        )
        found[tokens] = ms
    return found


# Sampling


def make_requests(vocabulary: int, new_tokens: int) -> list[SamplingRequest]:
    generator = np.random.default_rng(0)
    prompts = [generator.integers(0, vocabulary, PROMPT_TOKENS) for _ in range(RESPONSES // GROUP)]
    keys = response_keys(1, 2, np.arange(RESPONSES))
    return [
        SamplingRequest(tokens=prompts[number // GROUP], max_new_tokens=new_tokens, key=int(key))
        for number, key in enumerate(keys)
    ]


def make_decoder(
    model: Any, *, captured: bool, experts_of_hf: bool = False, recorder: RouteRecorder | None = None
) -> Decoder:
    cached = CachedModel(model, recorder=recorder)
    if experts_of_hf:
        for module in stacked_experts(model):
            module.__dict__.pop("forward")  # padfree's experts, which CachedModel sets
    return Decoder(cached, num_slots=RESPONSES, temperature=1.0, stops=[model.config.vocab_size], captured=captured)


def tokens_per_second(decoder: Decoder, requests: list[SamplingRequest]) -> tuple[float, list[Any]]:
    decoder.prepare(requests)
    decoder.sample(requests[:4])
    with Stopwatch(decoder.device) as watch:
        responses = decoder.sample(requests)
    return sum(len(response.tokens) for response in responses) / watch.seconds, responses


def step_ms(decoder: Decoder, slots: int) -> float:
    return 1e3 * mean_in_a_row(lambda: decoder.run_steps(1, slots), STEPS)


def decode(shape: dict[str, Any], device: torch.device) -> dict[str, Any]:
    cuda = device.type == "cuda"
    model = make_model(shape, device).eval()
    ways: dict[str, dict[str, Any]] = {
        "experts of transformers, no graphs": {"captured": False, "experts_of_hf": True},
        "padfree, no graphs": {"captured": False},
        "padfree, graphs": {"captured": cuda},
    }
    found: dict[str, Any] = {}
    sampled: dict[str, list[Any]] = {}
    for name, options in ways.items():
        new_tokens = CAPTURED_TOKENS if options["captured"] else EAGER_TOKENS
        requests = make_requests(shape["vocab_size"], new_tokens)
        decoder = make_decoder(model, **options)
        rate, sampled[name] = tokens_per_second(decoder, requests)
        found[name] = {"tokens/s": rate, "ms per step with prefill": 1e3 * RESPONSES / rate}
        line = f"{name:36s} {rate:9,.0f} tokens/s  {1e3 * RESPONSES / rate:6.2f} ms per step with prefill"
        if cuda:
            line += f"  peak {torch.cuda.max_memory_allocated() / GIB:.1f} GiB"
        if options["captured"]:
            for slots in (RESPONSES, FEW_SLOTS):
                found[name][f"step of {slots} slots"] = ms = step_ms(decoder, slots)
                line += f"  a step of {slots} slots {ms:.2f} ms"
        print(line, flush=True)
        decoder.free()
        del decoder
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
    stock, eager, graphs = sampled.values()
    equal = np.mean(
        [np.mean(one.tokens == two.tokens[: len(one.tokens)]) for one, two in zip(eager, graphs, strict=True)]
    )
    first = [abs(one.logprobs[0] - two.logprobs[0]) for one, two in zip(stock, graphs, strict=True)]
    print(
        f"tokens equal with and without graphs: {equal:.4f}; first log-probability against the experts of "
        f"transformers: largest difference {np.max(first):.1e}",
        flush=True,
    )
    assert equal == 1.0
    return {**found, "equal tokens": float(equal), "first log-probability": float(np.max(first))}


def recorded(shape: dict[str, Any], device: torch.device) -> dict[str, float]:
    model = make_model(shape, device).eval()
    requests = make_requests(shape["vocab_size"], RECORDED_TOKENS)
    found = {}
    for records in (False, True):
        recorder = RouteRecorder(model) if records else None
        decoder = make_decoder(model, captured=device.type == "cuda", recorder=recorder)
        _, responses = tokens_per_second(decoder, requests)
        routes = responses[0].routes
        assert (routes is not None) == (recorder is not None)
        name = "without routes" if routes is None else f"with routes {list(routes.shape)} per response"
        if decoder.captured:
            found[name] = step_ms(decoder, RESPONSES)
            print(f"a step of {RESPONSES} slots {name}: {found[name]:.2f} ms", flush=True)
        decoder.free()
    return found


# Updates


def routed(samples: list[Sample], shape: dict[str, Any]) -> list[Sample]:
    """Return the samples with random routes [n, layers, k], in which the experts of a token are distinct."""
    layers, experts, top = shape["num_hidden_layers"], shape["num_experts"], shape["num_experts_per_tok"]
    assert experts <= 1 << 8

    def routes(number: int, length: int) -> Any:
        scores = np.random.default_rng(number).random((length, layers, experts), dtype=np.float32)
        return np.argsort(scores, axis=-1)[..., :top].astype(np.uint8)

    return [replace(sample, routes=routes(number, len(sample))) for number, sample in enumerate(samples)]


def update(shape: dict[str, Any], mesh: Mesh, kind: str = "cuda") -> dict[str, float]:
    samples = log_normal_samples(vocabulary=shape["vocab_size"], **SAMPLES[kind])
    with_routes = routed(samples, shape)
    tokens = sum(len(sample) for sample in samples)
    found = {}
    for replay in (False, True):
        model = make_model(shape, mesh.device)
        parallelize(model, transformations(mesh, compile="inductor" if kind == "cuda" else "none", replay=replay))
        scorer = Scorer(model, mesh, max_tokens=MAX_TOKENS, pack_settings=PackSettings(routes=replay))
        engine = Engine(scorer, make_optimizer(model, OptimizerConfig()), LossSettings(loss=SFTSettings()))
        # run other lengths first, so that layers are compiled for any length, as in a run
        engine.gradients(engine.prepare((with_routes if replay else samples)[1:]))
        ways = (
            {"replay, no routes": samples, "replay, random routes": with_routes} if replay else {"no replay": samples}
        )
        for name, given in ways.items():
            prepared = engine.prepare(given)

            def gradients(engine: Engine = engine, prepared: Any = prepared) -> object:
                return engine.gradients(prepared)

            found[name] = seconds = seconds_of(gradients, mesh.device)
            print(f"{name:24s} {1e3 * seconds:7.1f} ms  {tokens / seconds:9,.0f} tokens/s", flush=True)
        del model, scorer, engine, prepared, gradients
        with fresh():
            pass  # free the model, and forget its compiled layers
    return found


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    call()
    if device.type == "cuda":
        return mean_in_a_row(call, REPEATS)
    with Stopwatch() as watch:
        call()
    return watch.seconds


if __name__ == "__main__":
    main()
