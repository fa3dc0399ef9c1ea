"""The gain of shared prefixes: an update and a scoring pass with and without sharing.

    python bench/shared_prefixes.py [OPTIONS]

    options                                      what is measured
    none                                         a small model on the CPU
    --device cuda                                the 4B shape, G = 16, bf16, compiled
    --device cuda --lengths 4096,1024 --groups 8 only these lengths of prompt and response, and 8 groups
    --gsm8k /path/to/gsm8k                       groups of 4 solutions to a question; one byte is one token
    --calculator FOLDER                          these solutions as episodes with a calculator, and as trees
    --device cuda --attention                    attention of one layer: keys copied, and a separate call for the prefix
    --device cuda --context 8                    context ranks of a pack of 128k tokens, simulated one after the other

A group has G responses of R tokens to a prompt of P tokens. In the output, ρ = G (P + R) / (P + G R) is the number of
tokens without sharing divided by the number with sharing. `gain` is the same ratio for time, and `work` for FLOPs,
which is smaller than ρ. `head` is the time of copying entries, head and loss. Updates overlap as in a run.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from timer import Stopwatch, median_seconds
from torch._C._distributed_c10d import HashStore
from transformers import Qwen3Config, Qwen3ForCausalLM
from updates import make_updates

from padfree import Sample
from padfree.attention.copies import take_copies
from padfree.attention.prefix_attention import prefix_attention, prepare_prefix_keys
from padfree.choices import SharePrefixes
from padfree.cp import shard
from padfree.cp.allgather import local_attention
from padfree.cp.keys import prepare_keys
from padfree.distributed import make_mesh
from padfree.estimate.flops import Flops
from padfree.head import fused_loss
from padfree.losses import ClipSettings, LossInputs, PolicySettings, make_token_loss
from padfree.model import lm_head_of
from padfree.optim.optimizer import make_optimizer
from padfree.optim.optimizer_settings import OptimizerConfig
from padfree.packing import collate
from padfree.rollout import Prompt
from padfree.rollout.environment import Policy, Trajectory, calculator, rehearse
from padfree.sharding.parallelize import inside, parallelize, transformations
from padfree.train.engine import Engine, LossSettings
from padfree.train.microbatch import PackSettings
from padfree.train.scorer import Scorer
from padfree.train.step import StepReport
from padfree.train.step_pipeline import step_metrics

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 8,
             "num_key_value_heads": 4, "head_dim": 32, "vocab_size": 4096},
    "4b": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
           "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True},
}  # fmt: skip
Lengths = tuple[int, int]
"""The number of tokens of the prompt and of the response."""

LENGTHS: dict[str, list[Lengths]] = {
    "cpu": [(512, 64), (256, 64), (64, 64), (32, 128), (8, 128)],
    "cuda": [(8192, 1024), (4096, 1024), (1024, 1024), (512, 2048), (128, 2048)],
}


def group(prompt: int, response: int, size: int, vocabulary: int, number: int = 0) -> list[Sample]:
    rng = np.random.default_rng(number)
    first = rng.integers(0, vocabulary, prompt)
    return [
        Sample(
            tokens=np.append(first, rng.integers(0, vocabulary, response)),
            loss_mask=np.arange(prompt + response) >= prompt,
            advantages=np.full(prompt + response, rng.normal(), dtype=np.float32),
            group=number,
        )
        for _ in range(size)
    ]


def seconds(function: Callable[[], Any], device: torch.device, repeats: int, warmup: int = 1) -> float:
    return median_seconds(function, device, repeats=repeats, warmup=warmup)


def make_engine(shape: str, device: torch.device, layers: int | None, max_tokens: int) -> Engine:
    sizes = SHAPES[shape] | ({} if layers is None else {"num_hidden_layers": layers})
    torch.manual_seed(0)
    cuda = device.type == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    with torch.device(device):
        model: Any = Qwen3ForCausalLM(Qwen3Config(max_position_embeddings=1 << 17, **sizes))  # type: ignore[no-untyped-call]
    mesh = make_mesh(device.type)
    changes: dict[str, Any] = {"compile": "inductor", "checkpointing": "selective"} if cuda else {}
    parallelize(model, transformations(mesh, dtype=dtype, reshard=False, **changes))
    scorer = Scorer(model, mesh, max_tokens=max_tokens, overlong="alone")
    loss = LossSettings(loss=PolicySettings(objective=ClipSettings(), old_policy="current"))
    return Engine(scorer, make_optimizer(model, OptimizerConfig(lr=0.0)), loss)


def compare(
    engine: Engine, samples: list[Sample], repeats: int, *, first: list[Sample] | None = None
) -> dict[str, float]:
    """Compare the times with and without sharing prefixes. The warm-up uses `first`, by default `samples`."""
    first = samples if first is None else first
    device, found = engine.mesh.device, {}
    shares: dict[str, SharePrefixes] = {"without": False, "with": "auto"}
    for name, share in shares.items():
        engine.scorer.packer.pack_settings = PackSettings(share_prefixes=share)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        found[f"update {name}"], report = update_seconds(engine, samples, repeats, first)
        if device.type == "cuda":
            found[f"GiB {name}"] = torch.cuda.max_memory_allocated() / 2**30
        engine.scorer.logprobs(first)
        found[f"scoring {name}"] = seconds(partial(engine.scorer.logprobs, samples), device, repeats, warmup=0)
        found[f"head {name}"] = head_seconds(engine, samples, repeats)
        found[f"TFLOP {name}"] = tera_flops(engine, report)
    plan = engine.scorer.packer.plan(samples)
    found["rho"], found["work"] = plan.sharing, found["TFLOP without"] / found["TFLOP with"]
    for what in ("update", "scoring", "head"):
        found[f"{what} gain"] = found[f"{what} without"] / found[f"{what} with"]
    return found


def update_seconds(
    engine: Engine, samples: list[Sample], repeats: int, first: list[Sample]
) -> tuple[float, StepReport]:
    """Return the mean seconds of consecutive updates after a warm-up with `first`, and the report of the last one."""
    steps = [samples] * repeats
    make_updates(engine, [first])
    with Stopwatch(engine.mesh.device) as watch:
        report = make_updates(engine, steps)
    return watch.seconds / repeats, report


def tera_flops(engine: Engine, report: StepReport) -> float:
    """Return the TFLOPs of forward and backward, as padfree counts them."""
    flops = Flops.of(engine.model.config, devices=1, device=engine.mesh.device, dtype=torch.bfloat16)
    return float(step_metrics(0, report, rates={}, seconds=1.0, flops=flops)["tflops_per_device"])


def head_seconds(engine: Engine, samples: list[Sample], repeats: int) -> float:
    """Return the seconds of the head: from random hidden states to the loss and back."""
    model, settings = engine.model, engine.settings
    assert isinstance(settings.loss, PolicySettings)
    dtype = torch.bfloat16 if engine.mesh.device.type == "cuda" else torch.float32
    rows = []
    for batch, _ in engine.prepare(samples).packs:
        size = (batch.local.input_ids.shape[-1], model.config.hidden_size)
        hidden = torch.randn(size, device=engine.mesh.device, dtype=dtype).requires_grad_()
        rows.append((batch, hidden, make_token_loss(LossInputs.from_batch(batch.local), settings.loss)))

    def run(model: Any) -> None:
        for batch, hidden, token_loss in rows:
            local = batch.local
            copied = hidden if local.entries is None else take_copies(hidden, local.entries.positions)
            fused_loss(
                copied, lm_head_of(model), local.labels, token_loss, num_labels=batch.num_labels,
                memory=settings.head_memory,
            ).loss.backward()  # type: ignore[no-untyped-call]  # fmt: skip

    found: float = inside(model, lambda model: seconds(partial(run, model), engine.mesh.device, repeats))
    engine.optimizer.zero_grad(set_to_none=True)
    return found


def shown(title: str, found: dict[str, float]) -> None:
    print(title.ljust(24), "  ".join(f"{name} {value:.3f}" for name, value in found.items()), flush=True)


MODELS = ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification")


def gsm8k_groups(folder: Path, num_groups: int) -> list[Sample]:
    """Return the solutions of four models to each question, as one token per byte."""
    samples = []
    lines = (folder / "solutions.jsonl").read_text(encoding="utf-8").splitlines()[:num_groups]
    for number, line in enumerate(lines):
        row = json.loads(line)
        prompt = list(row["question"].encode())
        for model in MODELS:
            tokens = np.array(prompt + list(row[model]["solution"].encode()), dtype=np.int64)
            samples.append(
                Sample(
                    tokens=tokens,
                    loss_mask=np.arange(len(tokens)) >= len(prompt),
                    advantages=np.ones(len(tokens), dtype=np.float32),
                    group=number,
                )
            )
    return samples


class ByteTokenizer:
    """A tokenizer with one token per byte; 0 ends a response."""

    eos_token_id = 0

    def __call__(self, text: Any, **_: Any) -> dict[str, Any]:
        return {"input_ids": list(text.encode()) if isinstance(text, str) else [list(one.encode()) for one in text]}

    def decode(self, ids: list[int], **_: Any) -> str:
        return bytes(token for token in ids if token).decode(errors="replace")


async def probed(prompt: Prompt, policy: Policy) -> Trajectory:
    """The calculator environment, with a branch after each result in which the model gives the final answer."""
    while True:
        turn = await policy.generate()
        question = calculator.QUESTION.search(turn.text)
        if question is None:
            return policy.trajectory()
        policy.add(f"{calculator.calculate(question[1]) or 'error'}>>")
        probe = policy.branch()
        probe.add(" So the answer is")
        await probe.generate()


def calculator_groups(folder: Path, num_groups: int, *, probes: bool) -> list[Sample]:
    """Return GSM8K solutions as episodes: a turn of the model ends where a solution asks the calculator."""
    samples = []
    for number, line in enumerate((folder / "solutions.jsonl").read_text(encoding="utf-8").splitlines()[:num_groups]):
        row = json.loads(line)
        for model in MODELS:
            solution = row[model]["solution"]
            turns = [f"{part}=" for part in re.split(r"(?<=<<)([^<>=]+)=[^<>]*>>", solution)]
            turns = [f"{before[:-1]}{question}" for before, question in zip(turns[:-1:2], turns[1::2], strict=True)] + [
                turns[-1][:-1]
            ]
            if probes:
                turns = [one for turn in turns[:-1] for one in (turn, " 42.")] + turns[-1:]
            leaves = rehearse(
                probed if probes else calculator.episode,
                row["question"],
                turns,
                ByteTokenizer(),
                row={"answer": "42"},
                max_new_tokens=1 << 16,
                reward="exact_match",
            )
            samples += [
                Sample(
                    tokens=leaf.tokens,
                    loss_mask=leaf.sampled,
                    advantages=np.ones(len(leaf.tokens), dtype=np.float32),
                    group=number,
                )
                for leaf in leaves
            ]
    return samples


def play_context(world: int, device: torch.device, repeats: int) -> None:
    """Measure the attention time of each context rank for a pack with 8k prompts, relative to an equal share."""
    tokens = (1 << 17) if device.type == "cuda" else 1 << 11
    prompt, response, size = (8192, 512, 16) if device.type == "cuda" else (128, 16, 8)
    samples: list[Sample] = []
    while len(samples) // size * (prompt + size * response) < tokens:
        samples += group(prompt, response, size, 1000, len(samples) // size)
    row = collate(samples, share_prefixes=True).padded_to_multiple(world).to(device)
    heads, key_heads, dim = (32, 8, 128) if device.type == "cuda" else (8, 4, 32)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q, k, v, dout = (
        torch.randn(row.num_tokens, h, dim, device=device, dtype=dtype) for h in (heads, key_heads, key_heads, heads)
    )
    keys = prepare_prefix_keys(row.segments)
    assert keys is not None

    def run(attend: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> None:
        leaves = [tensor.detach().requires_grad_() for tensor in tensors[:3]]
        torch.autograd.backward(attend(*leaves), tensors[3])

    def on_paths(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return prefix_attention(q, k, v, row.segments, keys)

    whole = seconds(lambda: run(on_paths, q, k, v, dout), device, repeats)
    times = []
    for rank in range(world):
        plan = shard(row, world=world, rank=rank).context.plan
        pool = prepare_keys(plan).pool_tokens
        part = [q[plan.own], k[pool], v[pool], dout[plan.own]]

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Any = plan) -> torch.Tensor:
            return local_attention(q, k, v, plan)

        times.append(seconds(partial(run, attend, *part), device, repeats))
    print(
        f"{row.num_tokens} tokens on {world} context ranks: slowest {max(times) * 1e3:.2f} ms, an equal share "
        f"{whole / world * 1e3:.2f} ms, ratio {max(times) * world / whole:.3f}; their mean {sum(times) / whole:.3f}"
    )


def both_passes(attend: Callable[[], torch.Tensor], dout: torch.Tensor) -> None:
    torch.autograd.backward(attend(), dout)


def compare_attention(device: torch.device, lengths: Sequence[Lengths], size: int, repeats: int) -> None:
    """Time one layer's attention with the prompt's keys copied, and with prefix attention."""
    heads, key_heads, dim = (32, 8, 128) if device.type == "cuda" else (8, 4, 32)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for prompt, response in lengths:
        row = collate(group(prompt, response, size, 1000), share_prefixes=True).to(device)
        q, k, v, dout = (
            torch.randn(row.num_tokens, h, dim, device=device, dtype=dtype)
            for h in (heads, key_heads, key_heads, heads)
        )
        for leaf in (q, k, v):
            leaf.requires_grad_()
        found = {}
        for name, long_prefixes in (("gathered", []), ("trunk", [0])):
            keys = prepare_prefix_keys(row.segments, np.array(long_prefixes, dtype=np.int64))
            assert keys is not None
            attend = partial(prefix_attention, q, k, v, row.segments, keys)
            found[f"{name} forward ms"] = 1e3 * seconds(attend, device, repeats)
            found[f"{name} ms"] = 1e3 * seconds(partial(both_passes, attend, dout), device, repeats)
        shown(f"P {prompt} R {response} G {size}", found)


def pair(text: str) -> Lengths:
    prompt, response = map(int, text.split(","))
    return prompt, response


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--shape", choices=SHAPES, default=None)
    parser.add_argument("--layers", type=int, default=None, help="number of layers; default: all of the shape")
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=36_864, help="tokens per micro-batch")
    parser.add_argument("--gsm8k", type=Path, default=None)
    parser.add_argument("--calculator", type=Path, default=None)
    parser.add_argument("--groups", type=int, default=3, help="groups per update and per scoring pass")
    parser.add_argument(
        "--lengths", type=pair, nargs="+", default=None, metavar="P,R", help="tokens of prompt and response"
    )
    parser.add_argument("--context", type=int, default=None)
    parser.add_argument("--attention", action="store_true", help="one layer: keys gathered, and prefix attention")
    args = parser.parse_args()
    device = torch.device(args.device)
    dist.init_process_group("gloo" if args.device == "cpu" else "nccl", store=HashStore(), rank=0, world_size=1)
    try:
        measure(args, device)
    finally:
        dist.destroy_process_group()


def measure(args: argparse.Namespace, device: torch.device) -> None:
    shape = args.shape or ("4b" if args.device == "cuda" else "tiny")
    lengths = args.lengths or LENGTHS[args.device]
    if args.attention:
        compare_attention(device, lengths, args.group, args.repeats)
        return
    if args.context is not None:
        play_context(args.context, device, args.repeats)
        return
    engine = make_engine(shape, device, args.layers, args.max_tokens)
    if args.gsm8k is not None:
        samples = gsm8k_groups(args.gsm8k, 16)
        engine.scorer.packer.pack_settings = PackSettings(share_prefixes="auto")
        everything = gsm8k_groups(args.gsm8k, 1 << 20)
        print(f"rho of all {len(everything)} solutions {engine.scorer.packer.plan(everything).sharing:.3f}")
        shown("GSM8K, groups of 4", compare(engine, samples, args.repeats))
        return
    if args.calculator is not None:
        for probes, name in ((False, "episodes with a calculator"), (True, "trees, a branch at each answer")):
            samples = calculator_groups(args.calculator, args.groups, probes=probes)
            engine.scorer.packer.pack_settings = PackSettings(share_prefixes="auto")
            everything = calculator_groups(args.calculator, 200, probes=probes)
            print(f"rho of {len(everything)} samples of 200 groups {engine.scorer.packer.plan(everything).sharing:.3f}")
            print(f"{len(samples)} samples of {args.groups} groups, {sum(map(len, samples))} tokens")
            shown(name, compare(engine, samples, args.repeats))
        return
    for prompt, response in lengths:
        vocabulary = SHAPES[shape]["vocab_size"]
        groups = [group(prompt, response, args.group, vocabulary, number) for number in range(args.groups)]
        title = f"P {prompt} R {response} G {args.group}"
        samples = [sample for samples in groups for sample in samples]
        shown(title, compare(engine, samples, args.repeats, first=groups[0]))


if __name__ == "__main__":
    main()
