"""Do the log-probabilities of sampler and trainer have the same bits, on a GPU in bfloat16?

    section       what is measured
    operators     each operator of a decoder layer and the head: does a matrix row keep its bits if the call has fewer
                  rows? attention: does one query alone keep the bits that it has in a pack?
    attention     time of decode attention for 256 slots: fa4 with pages, the kernel with the arithmetic of fa4, and the
                  kernel of `rollout.exact=false`
    end-to-end    512 responses of 128 tokens with the kernels of `rollout.exact=true`, scored by the trainer in packs
                  of 64 and of 16 samples, with and without gradients; with --plain, also those of `rollout.exact=false`
    speed         tokens/s with `rollout.exact` true and false: the sampler (256 slots, prompts of 256, 192 new tokens),
                  and the gradients of about 14,900 tokens without an optimizer

    PYTHONPATH=src python bench/sampler_bits.py
    PYTHONPATH=src python bench/sampler_bits.py --section end-to-end
    PYTHONPATH=src python bench/sampler_bits.py --section end-to-end --shape 30b-a3b-12
    PYTHONPATH=src python bench/sampler_bits.py --section speed --model FOLDER

`--shape` is for the sections end-to-end and speed. The model has random weights and the sizes of Qwen3 (0.6b, 4b), of
12 layers of Qwen3-30B-A3B (30b-a3b-12), or those of 0.6b with windows of 512 keys in all layers (window). With
`--model`, the model and its weights are read from a Hugging Face folder. Prompts are random tokens. The script reports
differences and does not stop at them. PyTorch's RMSNorm and the decode attention of `rollout.exact=false` are also
compared, and differ. `padfree check --sampler` tests a given model.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from gpu_only import cuda_device
from moe import SHAPES as EXPERT_SHAPES
from step import SIZES
from step_ways import SHAPES, fresh, log_normal_samples
from timer import Stopwatch, median_event_seconds, median_seconds
from torch import Tensor
from transformers import AutoModelForCausalLM, MistralConfig, Qwen3Config, Qwen3MoeConfig

import padfree
import padfree.layers.ops.qk_norm_rope
import padfree.layers.ops.rms_norm
import padfree.layers.ops.swiglu
from padfree.attention.backend import PAGE_SIZE, Pages
from padfree.attention.selection import BACKENDS
from padfree.attention.spec import AttentionSpec
from padfree.batch import IGNORE, LmHead
from padfree.cp import shard
from padfree.distributed import distributed
from padfree.head import fused_loss, score
from padfree.layers.compile import compile_layers
from padfree.model import hidden_states, lm_head_of
from padfree.model.grouped_matmuls import use_exact_matmuls
from padfree.model.load import load_model
from padfree.model.structure import layers_of
from padfree.packing import collate
from padfree.rollout import SamplingRequest
from padfree.rollout.engines.in_process.cached_model import CachedModel
from padfree.rollout.engines.in_process.decode import Decoder
from padfree.rollout.engines.in_process.exact_attention import has_bits_of_trainer
from padfree.rollout.engines.in_process.policy_model import PolicyModel
from padfree.rollout.engines.in_process.row_trial import (
    ExpertShape,
    MatmulShape,
    agreeing_rows,
    agreeing_tokens,
    trial,
)
from padfree.rollout.sampling_rng import response_keys
from padfree.sample import Sample
from padfree.segments import Segments

SECTIONS = ("operators", "attention", "end-to-end", "speed")
MATMULS = {
    "0.6b": [(1024, 2048), (1024, 1024), (2048, 1024), (1024, 3072), (3072, 1024)],
    "4b": [(2560, 4096), (2560, 1024), (4096, 2560), (2560, 9728), (9728, 2560)],
    "smollm2-135m": [(576, 576), (576, 192), (576, 1536), (1536, 576)],
}
GROUPED_MATMULS = {
    "30b-a3b": [ExpertShape(128, 8, 2048, 1536, False), ExpertShape(128, 8, 768, 2048, False)],
    "mixtral-8x7b": [ExpertShape(8, 2, 4096, 28_672, False), ExpertShape(8, 2, 14_336, 4096, False)],
    "gpt-oss-20b": [ExpertShape(32, 4, 2880, 5760, True), ExpertShape(32, 4, 2880, 2880, True)],
}
MATMUL_ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 1003, 1280, 4096, 8192, 14_917)
ROWS, FEWER_ROWS = 16_384, (1, 8, 16, 64, 256, 1280)
WIDTHS = (576, 1024, 2560)
HEADS = ((16, 8, 128), (32, 8, 128), (9, 3, 64))
PACK = (1500, 37, 300, 128, 129, 1, 999, 640, 255, 4000)
EPS = 1e-6
LONGEST_KEYS = 4096  # at least as many as the longest sample of PACK has

MODEL_SHAPES = ("0.6b", "4b", "30b-a3b-12", "window")
WINDOW = 512
PROMPTS = (100, 1, 257, 130, 128, 300, 90, 40)
LONG_PROMPTS = (513, 1100, 450, 700)  # added if the model has windows
RESPONSES, GROUP, NEW_TOKENS = 512, 4, 128
SLOTS = 256
SAMPLES_PER_PACK = (64, 16)
TEMPERATURES = (1.0, 0.7)
FALLBACK_ROWS = (256,)  # the number of rows of a decode step if the trial finds none that keeps the bits
CALLS = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--section", choices=SECTIONS, help="run only this section")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--shape", choices=MODEL_SHAPES, default=MODEL_SHAPES[0])
    source.add_argument("--model", type=Path, help="a Hugging Face folder")
    parser.add_argument("--plain", action="store_true", help="also compare with rollout.exact=false")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device, report = cuda_device()
    torch.manual_seed(0)
    for section in [arguments.section] if arguments.section else SECTIONS:
        with fresh():
            if section == "operators":
                report["operators"] = operators(device)
            elif section == "attention":
                report["attention"] = {keys: attention_times(keys, device) for keys in (256, 1024)}
            elif section == "end-to-end":
                model = chosen_model(arguments, device)
                for exact in (True, False) if arguments.plain else (True,):
                    for temperature in TEMPERATURES:
                        name = f"exact={str(exact).lower()}, temperature {temperature}"
                        report[name] = end_to_end(model, exact, temperature)
            else:
                model = chosen_model(arguments, device)
                report["speed"] = {str(exact): speed(model, exact) for exact in (True, False)}
                report["gradients"] = {}
                for exact in (True, False):
                    with fresh():
                        report["gradients"][str(exact)] = gradient_speed(model, exact)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1))


def random(*shape: int, device: torch.device, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=device) * scale).bfloat16()


def unequal(found: Tensor, expected: Tensor) -> str:
    if torch.equal(found, expected):
        return "equal"
    largest = float((found.double() - expected.double()).abs().max())
    return f"{int((found != expected).sum()):,} of {found.numel():,} differ, by at most {largest:.2g}"


# Operators


def operators(device: torch.device) -> dict[str, str]:
    found: dict[str, str] = {}
    for results in (matmuls(device), grouped_matmuls(device), elementwise(device), attention(device), head(device)):
        for name, result in results:
            found[name] = result
            print(f"{name}: {result}", flush=True)
    return found


def rows_that_differ(call: Callable[[int], Sequence[Tensor]], rows: int = ROWS) -> str:
    """Compare calls with only the first rows of the input with a call with all rows. Return what differs."""
    full = call(rows)
    differing = [
        count
        for count in FEWER_ROWS
        if not all(torch.equal(part, whole[: len(part)]) for part, whole in zip(call(count), full, strict=True))
    ]
    return f"rows that differ: {differing}"


def matmuls(device: torch.device) -> Iterator[tuple[str, str]]:
    for model, shapes in MATMULS.items():
        for inputs, outputs in shapes:
            shape = MatmulShape(inputs, outputs, False)
            agreeing = agreeing_rows(shape, MATMUL_ROWS, device=device, dtype=torch.bfloat16)
            yield f"matmul {model} {inputs} -> {outputs}", f"rows that differ: {sorted({*MATMUL_ROWS} - agreeing)}"


def grouped_matmuls(device: torch.device) -> Iterator[tuple[str, str]]:
    """Compare ways to divide the rows of T tokens over the experts, for each number T of tokens."""
    for model, shapes in GROUPED_MATMULS.items():
        for shape in shapes:
            with fresh():
                agreeing = agreeing_tokens(shape, MATMUL_ROWS, device=device, dtype=torch.bfloat16)
            name = f"grouped matmul {model} {shape.experts} x {shape.inputs} -> {shape.outputs}, {shape.per_token} each"
            yield name, f"tokens that differ: {sorted({*MATMUL_ROWS} - agreeing)}"


def elementwise(device: torch.device) -> Iterator[tuple[str, str]]:
    ops = torch.ops.padfree

    def eager(x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)

    for width in WIDTHS:
        x, y, weight = (random(*shape, device=device) for shape in ((ROWS, width), (ROWS, width), (width,)))

        def norm(rows: int, x: Tensor = x, weight: Tensor = weight) -> Sequence[Tensor]:
            return ops.rms_norm(x[:rows], weight, EPS)[:1]  # type: ignore[no-any-return]

        def add_and_norm(rows: int, x: Tensor = x, y: Tensor = y, weight: Tensor = weight) -> Sequence[Tensor]:
            return ops.add_rms_norm(x[:rows], y[:rows], weight, EPS)[:2]  # type: ignore[no-any-return]

        yield f"rms_norm, width {width}", rows_that_differ(norm)
        yield f"add_rms_norm, width {width}", rows_that_differ(add_and_norm)
        exact = ops.rms_norm(x + y, weight, EPS)[0]
        yield (
            f"add_rms_norm against rms_norm of the rounded sum, width {width}",
            unequal(ops.add_rms_norm(x, y, weight, EPS)[0], exact),
        )
        yield (
            f"PyTorch's RMSNorm against rms_norm, width {width}",
            unequal(eager(x, weight), ops.rms_norm(x, weight, EPS)[0]),
        )
    q, weight = random(1, ROWS, 16, 128, device=device), random(128, device=device)
    cos, sin = random(1, ROWS, 128, device=device), random(1, ROWS, 128, device=device)
    yield (
        "qk_norm_rope",
        rows_that_differ(lambda n: [ops.qk_norm_rope(q[:, :n], weight, cos[:, :n], sin[:, :n], EPS)[0][0]]),
    )
    gate, up = random(ROWS, 3072, device=device), random(ROWS, 3072, device=device)
    yield "swiglu", rows_that_differ(lambda n: [ops.swiglu(gate[:n], up[:n])])


def attention(device: torch.device) -> Iterator[tuple[str, str]]:
    """Compare one query, with its keys contiguous and in pages, with the same query in a pack."""
    from padfree.rollout.engines.in_process.triton_decode_attention import attend  # needs triton

    segments = Segments.from_lengths(PACK, device=device)
    starts = np.cumsum([0, *PACK])
    generator = np.random.default_rng(0)
    positions = [sorted({0, length - 1, *generator.integers(0, length, 12).tolist()}) for length in PACK]
    queries = [(sample, position + 1) for sample, own in enumerate(positions) for position in own]
    seen = [keys for _, keys in queries]
    at = torch.tensor([starts[sample] + keys - 1 for sample, keys in queries], device=device)
    of = torch.cat([torch.arange(starts[sample], starts[sample] + keys) for sample, keys in queries]).to(device)
    single, many = Segments.from_lengths([1] * len(seen), device=device), Segments.from_lengths(seen, device=device)
    first = np.cumsum([0, *(-(-keys // PAGE_SIZE) for keys in seen)])
    slots_of_keys = torch.cat(
        [torch.arange(page * PAGE_SIZE, page * PAGE_SIZE + keys) for page, keys in zip(first[:-1], seen, strict=True)]
    )
    table = torch.tensor(
        [[min(page + more, first[-1] - 1) for more in range(-(-max(seen) // PAGE_SIZE))] for page in first[:-1]],
        dtype=torch.int32,
        device=device,
    )
    pages = Pages(table, torch.tensor(seen, dtype=torch.int32, device=device), max(seen))
    for heads, kv_heads, size in HEADS:
        name, spec = f"{heads} heads of {size}, {kv_heads} of keys", AttentionSpec(scale=size**-0.5)
        q, k, v = (random(sum(PACK), count, size, device=device) for count in (heads, kv_heads, kv_heads))
        keys, values = (k.new_zeros(int(first[-1]) * PAGE_SIZE, kv_heads, size) for _ in "kv")
        keys[slots_of_keys.to(device)], values[slots_of_keys.to(device)] = k[of], v[of]
        paged_keys, paged_values = (stored.view(-1, PAGE_SIZE, kv_heads, size) for stored in (keys, values))
        for backend in ("fa4", "torch"):
            kernel = BACKENDS[backend]
            out, lse = kernel.forward(q, k, v, segments, segments, spec)
            one, one_lse = kernel.forward(q[at], k[of], v[of], single, many, spec)
            yield (
                f"attention {backend}, {name}: one query against the pack",
                f"{unequal(one, out[at])}; lse {unequal(one_lse, lse[at])}",
            )
            if backend == "fa4":
                one, one_lse = kernel.paged_forward(q[at], paged_keys, paged_values, single, pages, spec)
                yield (
                    f"attention fa4, {name}: one query and pages against the pack",
                    f"{unequal(one, out[at])}; lse {unequal(one_lse, lse[at])}",
                )
                slots = torch.zeros(5, len(seen), dtype=torch.int64, device=device)
                slots[0] = torch.from_numpy(first[:-1] * PAGE_SIZE)
                slots[1] = torch.tensor(seen) - 1
                slots[2], slots[4] = slots[0] + slots[1], 1
                exact = has_bits_of_trainer("fa4", heads, (kv_heads, size), spec, q.dtype, device)
                yield f"the kernel with the arithmetic of fa4 against fa4, {name}", "equal" if exact else "different"
                own = attend(q[at], k[at], v[at], keys, values, slots, None, size**-0.5, None, None, LONGEST_KEYS)
                yield f"decode attention of the sampler against fa4, {name}", unequal(own, out[at])


def head(device: torch.device) -> Iterator[tuple[str, str]]:
    rows, width, vocabulary = ROWS // 2, SHAPES["0.6b"]["hidden_size"], SHAPES["0.6b"]["vocab_size"]
    hidden, weight = random(rows, width, device=device), random(vocabulary, width, device=device, scale=0.02)
    labels = torch.randint(0, vocabulary, (rows,), device=device)
    for temperature in TEMPERATURES:

        def scores(count: int, temperature: float = temperature, **options: Any) -> Tensor:
            found = score(
                hidden[:count],
                LmHead(weight=weight),
                labels[:count],
                temperature=temperature,
                num_labels=count,
                **options,
            )
            return found.logprobs

        def one_score(count: int, scores: Callable[..., Tensor] = scores) -> Sequence[Tensor]:
            return [scores(count)]

        name, full = f"temperature {temperature}", scores(rows)
        yield f"score, {name}", rows_that_differ(one_score, rows)
        yield f"score with entropy against score, {name}", unequal(scores(rows, entropy=True), full)
        for entropy in (False, True):
            leaves = hidden.clone().requires_grad_(), LmHead(weight=weight.clone().requires_grad_())
            found = fused_loss(
                *leaves, labels, negative, temperature=temperature, entropy=entropy, num_labels=rows
            ).logprobs.detach()
            yield f"fused_loss, entropy={entropy}, against score, {name}", unequal(found, full)


def negative(logprobs: Tensor, *_: object) -> Tensor:
    return -logprobs


# Time of decode attention


def attention_times(keys: int, device: torch.device, slots: int = SLOTS) -> dict[str, float]:
    """Return microseconds of attention for `slots` slots with `keys` earlier keys each, in a CUDA graph."""
    from padfree.rollout.engines.in_process import triton_exact_attention  # needs triton
    from padfree.rollout.engines.in_process.triton_decode_attention import attend

    heads, kv_heads, size = HEADS[0]
    pages_each = -(-(keys + 1) // PAGE_SIZE)
    cached_k, cached_v = (random(slots * pages_each * PAGE_SIZE, kv_heads, size, device=device) for _ in "kv")
    paged_k, paged_v = (stored.view(-1, PAGE_SIZE, kv_heads, size) for stored in (cached_k, cached_v))
    q, k, v = (random(slots, count, size, device=device) for count in (heads, kv_heads, kv_heads))
    table = torch.arange(slots * pages_each, device=device, dtype=torch.int32).view(slots, pages_each)
    pages = Pages(table, torch.full((slots,), keys + 1, dtype=torch.int32, device=device), keys + 1)
    single = Segments.from_lengths([1] * slots, device=device)
    fields = torch.zeros(5, slots, dtype=torch.int64, device=device)
    fields[2] = torch.arange(slots, device=device) * pages_each * PAGE_SIZE
    fields[3], fields[4] = keys, 1
    spec, longest = AttentionSpec(scale=size**-0.5), max(512, keys)
    ways: dict[str, Callable[[], object]] = {
        "fa4 with pages": lambda: BACKENDS["fa4"].paged_forward(q, paged_k, paged_v, single, pages, spec),
        "the kernel with the arithmetic of fa4": lambda: triton_exact_attention.attend(
            q, k, v, cached_k, cached_v, fields, size**-0.5, None
        ),
        "the kernel of rollout.exact=false": lambda: attend(
            q, k, v, cached_k, cached_v, fields, None, size**-0.5, None, None, longest
        ),
    }
    found = {}
    for name, call in ways.items():
        found[name] = microseconds = 1e6 * median_event_seconds(captured(call).replay, repeats=5)[0] / CALLS
        print(f"{slots} slots, {keys} keys: {name} {microseconds:.0f} µs", flush=True)
    return found


def captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    call()
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    return graph


# Sampler and trainer


def make_model(device: torch.device, dtype: torch.dtype = torch.bfloat16, shape: str = "0.6b") -> Any:
    """Return a model with random weights. Its buffers, such as the frequencies of RoPE, stay in float32."""
    common: dict[str, Any] = {"max_position_embeddings": 8192, "initializer_range": 0.04}
    if shape == "30b-a3b-12":
        config = cast(Any, Qwen3MoeConfig)(
            **EXPERT_SHAPES["cuda"], norm_topk_prob=True, tie_word_embeddings=False, **common
        )
    elif shape == "window":
        config = cast(Any, MistralConfig)(**SHAPES["0.6b"], sliding_window=WINDOW, tie_word_embeddings=True, **common)
    else:
        config = cast(Any, Qwen3Config)(**SHAPES[shape], tie_word_embeddings=True, **common)
    torch.manual_seed(0)
    with device:
        model = cast(Any, AutoModelForCausalLM).from_config(config, dtype=torch.float32)
    return cast_parameters(model, dtype)


def chosen_model(arguments: argparse.Namespace, device: torch.device) -> Any:
    if arguments.model is None:
        return make_model(device, shape=arguments.shape)
    with distributed(device=device.type):
        return cast_parameters(load_model(arguments.model, device=device), torch.bfloat16)


def cast_parameters(model: Any, dtype: torch.dtype) -> Any:
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model.eval().requires_grad_(False)


def make_requests(
    vocabulary: int, count: int, prompts: Sequence[int], new_tokens: int, group: int
) -> list[SamplingRequest]:
    generator = np.random.default_rng(0)
    drawn = [generator.integers(0, vocabulary, prompts[number % len(prompts)]) for number in range(count // group)]
    return [
        SamplingRequest(tokens=drawn[number // group], max_new_tokens=new_tokens, key=int(key))
        for number, key in enumerate(response_keys(0, 0, np.arange(count)))
    ]


def make_decoder(model: Any, slots: int, exact: bool, temperature: float, backend: str = "fa4") -> Decoder:
    policy = PolicyModel(model, model.dtype, model.device)
    policy.update(model)
    rows = None
    if exact:
        with Stopwatch(model.device) as watch:
            choice = trial(layers_of(policy.model), slots, model.device, model.dtype)
        rows = choice.step_rows or FALLBACK_ROWS
        problem = f"; {choice.problem}" if choice.problem else ""
        print(f"trial of {slots} slots in {watch.seconds:.2f} s: steps of {list(rows)} rows{problem}")
    cached = CachedModel(
        policy.model, backend=backend if exact else "auto", compiled=model.device.type == "cuda", exact=exact
    )
    return Decoder(cached, num_slots=slots, temperature=temperature, stops=[model.config.vocab_size], step_rows=rows)


def end_to_end(model: Any, exact: bool, temperature: float, backend: str = "fa4") -> dict[str, Any]:
    prompts = (*PROMPTS, *LONG_PROMPTS) if getattr(model.config, "sliding_window", None) else PROMPTS
    requests = make_requests(model.config.vocab_size, RESPONSES, prompts, NEW_TOKENS, GROUP)
    decoder = make_decoder(model, SLOTS, exact, temperature, backend)
    responses = decoder.sample(requests)
    decoder.free()
    own = np.concatenate([response.logprobs for response in responses])
    trained = padfree.attach(copy.deepcopy(model), backend)
    if exact:
        use_exact_matmuls(trained, model.device)
    if model.device.type == "cuda":
        compile_layers(layers_of(trained), "inductor", "none", exact=exact)
    samples = [
        Sample(
            tokens=np.concatenate([request.tokens, response.tokens]),
            loss_mask=np.arange(len(request.tokens) + len(response.tokens)) >= len(request.tokens),
        )
        for request, response in zip(requests, responses, strict=True)
    ]
    found = {}
    for gradients in (False, True):
        trained.requires_grad_(gradients)
        for per_pack in SAMPLES_PER_PACK:
            expected = np.concatenate(
                [
                    trainer_logprobs(trained, samples[start : start + per_pack], temperature, gradients)
                    for start in range(0, RESPONSES, per_pack)
                ]
            )
            differs = expected != own
            first = sorted(int(np.flatnonzero(each)[0]) for each in np.split(differs, RESPONSES) if each.any())
            name = f"{'training' if gradients else 'scoring'} in packs of {per_pack} samples"
            found[name] = {
                "unequal": int(differs.sum()),
                "tokens": differs.size,
                "mean difference": float(np.abs(expected - own).mean()),
                "first unequal tokens": first,
            }
            print(
                f"exact={str(exact).lower()}, temperature {temperature}, {name}: {int(differs.sum()):,} of "
                f"{differs.size:,} log-probabilities differ, by {found[name]['mean difference']:.2g} on average; "
                f"first in {len(first)} responses, from token {first[:3]} on",
                flush=True,
            )
    return found


def trainer_logprobs(model: Any, samples: Sequence[Sample], temperature: float, gradients: bool) -> Any:
    local = shard(collate(samples).to(model.device))
    labelled = local.labels != IGNORE
    options: dict[str, Any] = {"temperature": temperature, "num_labels": int(labelled.sum())}
    with torch.set_grad_enabled(gradients):
        hidden = hidden_states(model, local)
        if gradients:
            logprobs = fused_loss(hidden, lm_head_of(model), local.labels, negative, **options).logprobs.detach()
        else:
            logprobs = score(hidden, lm_head_of(model), local.labels, **options).logprobs
    return logprobs[labelled].cpu().numpy()


def speed(model: Any, exact: bool) -> float:
    """Return tokens per second, the best of three measurements."""
    decoder = make_decoder(model, SLOTS, exact, 1.0)
    requests = make_requests(model.config.vocab_size, 256, [256], 192, 8)
    decoder.prepare(requests)
    decoder.sample(requests[:8])
    best = 0.0
    for _ in range(3):
        with Stopwatch(decoder.device) as watch:
            responses = decoder.sample(requests)
        best = max(best, sum(len(response.tokens) for response in responses) / watch.seconds)
    print(f"rollout.exact={str(exact).lower()}: {best:,.0f} tokens/s", flush=True)
    decoder.free()
    return best


def gradient_speed(model: Any, exact: bool, backend: str = "fa4", sizes: str = "cuda") -> float:
    """Return tokens per second of the gradients of all weights, for one pack of samples of log-normal lengths."""
    trained = padfree.attach(copy.deepcopy(model), backend).requires_grad_(True).train()
    if exact:
        use_exact_matmuls(trained, model.device)
    if model.device.type == "cuda":
        compile_layers(layers_of(trained), "inductor", "none", exact=exact)
    samples = log_normal_samples(vocabulary=model.config.vocab_size, **SIZES[sizes])
    local = shard(collate(samples).to(model.device))
    head, num_labels = lm_head_of(trained), int((local.labels != IGNORE).sum())

    def gradients() -> None:
        trained.zero_grad()
        fused = fused_loss(hidden_states(trained, local), head, local.labels, negative, num_labels=num_labels)
        fused.loss.backward()  # type: ignore[no-untyped-call]

    seconds = median_seconds(gradients, model.device, repeats=5, warmup=3)
    found = sum(map(len, samples)) / seconds
    print(f"rollout.exact={str(exact).lower()}: gradients of {found:,.0f} tokens/s", flush=True)
    return found


if __name__ == "__main__":
    main()
