"""Tokens per second of the in-process sampler and of HF `generate` in one run, for `bench/rollout.py --shape`.

    equal lengths     256 responses of 256 tokens, 8 per prompt          padfree, and HF generate (sampling, batch 256)
    random lengths    1,024 responses, log-normal with mean 256, at most 2,048 tokens; 256 slots        padfree

Weights are random, and no token ends a response. Kernels are compiled and graphs captured before timing. Then a
profiler measures the parts of a decode step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from step_ways import SHAPES
from timer import Stopwatch, median_event_seconds
from transformers import Qwen3Config, Qwen3ForCausalLM

from padfree.rollout import SamplingRequest
from padfree.rollout.engines.in_process import sample_token
from padfree.rollout.engines.in_process.cached_model import CachedModel
from padfree.rollout.engines.in_process.decode import Decoder
from padfree.rollout.engines.in_process.policy_model import PolicyModel
from padfree.rollout.sampling_rng import response_keys

GROUP = 8
SPREAD = 1.0
"""The standard deviation of the logarithm of the lengths."""

GOALS = {"tokens/s": 40_000.0, "times HF generate": 15.0, "uneven over equal": 0.6}
"""Goals of the results on an H200, for the 0.6b shape. The script prints them."""

MATMULS = ("gemm", "nvjet", "cutlass", "xmma", "cublas", "splitk")
ATTENTION = ("_attend_kernel", "_join_kernel")


def measure(
    shape: str,
    *,
    device: torch.device,
    responses: int,
    slots: int,
    tokens: int,
    prompt_tokens: int,
    longest: int,
    with_hf: bool,
) -> dict[str, Any]:
    """Measure and print everything that the module's docstring lists. Return the results."""
    model = make_model(shape, device)
    policy = PolicyModel(model, model.dtype, device)
    policy.update(model)
    assert policy.is_shared, "the sampler has a copy of its own"
    cuda = device.type == "cuda"
    decoder = Decoder(
        CachedModel(policy.model, compiled=cuda),
        num_slots=responses,
        temperature=1.0,
        stops=[model.config.vocab_size],
    )
    vocabulary = int(model.config.vocab_size)
    equal = make_requests([tokens] * responses, prompt_tokens, vocabulary)
    with Stopwatch(device) as watch:
        decoder.prepare(equal)
        decoder.sample(equal[:GROUP])
    print(f"compiled and captured in {watch.seconds:.1f} s", flush=True)
    found: dict[str, Any] = {"equal": rate(decoder, equal)}
    step = found["equal"]["seconds"] / found["equal"]["steps"] * 1e3
    report("equal lengths", found["equal"], f"{step:.2f} ms per step")
    if cuda:
        found["step"] = split_of_a_step(decoder, equal)
        parts = ", ".join(f"{name} {ms:.2f}" for name, ms in found["step"].items())
        print(f"  a step of {responses} slots, ms:  {parts}", flush=True)
    decoder.free()
    decoder.num_slots = slots
    uneven = make_requests(drawn_lengths(4 * responses, tokens, longest), prompt_tokens, vocabulary)
    decoder.prepare(uneven)
    found["uneven"] = rate(decoder, uneven)
    busy = found["uneven"]["tokens"] / found["uneven"]["slot_steps"]
    report("random lengths", found["uneven"], f"{busy:.2f} of the slots were busy")
    found["uneven over equal"] = found["uneven"]["tokens/s"] / found["equal"]["tokens/s"]
    decoder.free()
    if with_hf:
        found["hf"] = hf_rate(model, equal, tokens)
        report("HF generate", found["hf"])
        found["times HF generate"] = found["equal"]["tokens/s"] / found["hf"]["tokens/s"]
        print(f"padfree is {found['times HF generate']:.1f} times as fast as HF generate")
    print(f"random lengths reach {found['uneven over equal']:.2f} of the speed of equal lengths")
    print(f"goals on an H200, 0.6b: {GOALS}")
    return found


def make_model(shape: str, device: torch.device) -> Any:
    torch.manual_seed(0)
    make_config, make = cast(Any, Qwen3Config), cast(Any, Qwen3ForCausalLM)
    config = make_config(**SHAPES[shape], tie_word_embeddings=True, max_position_embeddings=8192)
    with device:
        model = make(config)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return model.to(dtype).eval().requires_grad_(False)


def make_requests(max_new_tokens_each: Sequence[int], prompt_tokens: int, vocabulary: int) -> list[SamplingRequest]:
    generator = np.random.default_rng(0)
    prompts = [generator.integers(0, vocabulary, prompt_tokens) for _ in range(-(-len(max_new_tokens_each) // GROUP))]
    keys = response_keys(0, 0, np.arange(len(max_new_tokens_each)))
    return [
        SamplingRequest(tokens=prompts[number // GROUP], max_new_tokens=int(max_new_tokens), key=int(keys[number]))
        for number, max_new_tokens in enumerate(max_new_tokens_each)
    ]


def drawn_lengths(count: int, mean: float, longest: int) -> list[int]:
    """Return log-normal lengths with the given mean, cut at `longest`."""
    values = np.random.default_rng(1).lognormal(0.0, SPREAD, count)
    factor = mean / values.mean()
    for _ in range(20):
        factor *= mean / np.clip(values * factor, 1, longest).mean()
    lengths = np.clip(np.rint(values * factor), 1, longest).astype(int)
    found: list[int] = lengths.tolist()
    return found


def rate(decoder: Decoder, requests: Sequence[SamplingRequest]) -> dict[str, float]:
    with Stopwatch(decoder.device) as watch:
        responses = decoder.sample(requests)
    seconds = watch.seconds
    tokens = sum(len(response.tokens) for response in responses)
    assert tokens == sum(request.max_new_tokens for request in requests)
    statistics = decoder.statistics
    return {
        "tokens": tokens,
        "seconds": seconds,
        "tokens/s": tokens / seconds,
        "steps": statistics.steps,
        "slot_steps": statistics.slot_steps,
        "prefilled": statistics.prefilled,
        "captures": statistics.captures,
    }


@torch.no_grad()
def hf_rate(model: Any, requests: Sequence[SamplingRequest], tokens: int) -> dict[str, float]:
    """Return the tokens/s of HF generate. All prompts have the same length, so that padding does not slow it down."""
    input_ids = torch.from_numpy(np.stack([request.tokens for request in requests])).to(model.device)
    options: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "pad_token_id": 0}
    model.generation_config.eos_token_id = None
    model.generate(input_ids, max_new_tokens=4, **options)
    with Stopwatch(model.device) as watch:
        output = model.generate(input_ids, max_new_tokens=tokens, **options)
    seconds = watch.seconds
    written = output.shape[0] * (output.shape[1] - input_ids.shape[1])
    return {"tokens": written, "seconds": seconds, "tokens/s": written / seconds}


def split_of_a_step(decoder: Decoder, requests: Sequence[SamplingRequest]) -> dict[str, float]:
    """Return the milliseconds of the parts of a decode step, averaged over 32 tokens."""
    short = [SamplingRequest(tokens=request.tokens, max_new_tokens=32, key=request.key) for request in requests]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        decoder.sample(short)
        torch.cuda.synchronize()
    steps = decoder.statistics.steps
    times = {"attention": 0.0, "matmuls": 0.0, "draw": 0.0, "rest": 0.0}
    for event in profile.key_averages():
        name, milliseconds = event.key.lower(), event.self_device_time_total / 1e3 / steps
        if any(part in name for part in ATTENTION):
            times["attention"] += milliseconds
        elif "_sample_kernel" in name:
            times["draw"] += milliseconds
        elif any(part in name for part in MATMULS):
            times["matmuls"] += milliseconds
        else:
            times["rest"] += milliseconds
    head = decoder.model.head()
    hidden = torch.zeros(len(requests), head.weight.shape[1], dtype=head.weight.dtype, device=head.weight.device)
    (seconds,) = median_event_seconds(lambda: sample_token.products(hidden, head), repeats=5, calls=20)
    times["head"] = 1e3 * seconds
    times["matmuls"] -= times["head"]
    return times


def report(name: str, found: dict[str, float], *more: str) -> None:
    line = f"{name:18s} {found['tokens']:9,.0f} tokens  {found['seconds']:7.2f} s  {found['tokens/s']:9,.0f} tokens/s"
    print("  ".join([line, *more]), flush=True)
