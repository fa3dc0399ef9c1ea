"""Test the memory estimate with real runs: does a run fit the memory exactly if its dry run says so?

One measurement has these steps:

    a setting     drawn by its number: command, sizes of the model, tokens, checkpointing, adapters, optimizer state
    a budget      drawn between what the setting needs at least and at most; the allocator gets no more
    dry run       chooses the levels of the layers for the budget, and says whether the run fits
    two steps     in a process of its own; an out-of-memory error means that the run does not fit

An example of the output, in GiB:

    seed  estimate  allocated  reserved  budget    verdict
       3     41.3       40.2      41.9     46.0    fits: right

The models have few layers and random weights, so that a setting takes seconds. A verdict is right if a run that "fits"
ends, or if a run that does not fit is refused memory or takes at least 95% of the memory that `auto` may use.

    PYTHONPATH=src python bench/fits.py --seeds 60 --seconds 500
    PYTHONPATH=src python bench/fits.py --seeds 3 --tiny --device cpu
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
from timer import Stopwatch

GIB = 2**30
LEAST_BUDGET = 12 * GIB
"""Devices with less memory are not simulated, because libraries need equally large workspaces on every device."""

PRELOADED = ["torch", "transformers", "padfree.train.run", "padfree.cli.train", "padfree.testing.tokenizers"]
# hidden size, MLP, heads, heads of keys, head size, vocabulary
SHAPES = {
    "0.1b": (576, 1536, 9, 3, 64, 49_152),
    "0.6b": (1024, 3072, 16, 8, 128, 151_936),
    "1.7b": (2048, 6144, 16, 8, 128, 151_936),
    "4b": (2560, 9728, 32, 8, 128, 151_936),
    "8b": (4096, 12_288, 32, 8, 128, 151_936),
}
TINY = (64, 128, 4, 2, 16, 400)
RECIPES = {"sft": "sft", "dpo": "dpo", "distill": "distill", "rl": "rl-local"}
COMMANDS = ("sft", "sft", "dpo", "distill", "rl")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no further setting after this time")
    parser.add_argument("--limit", type=float, default=90.0, help="seconds after which a setting is given up")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny models, which run on a CPU")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)  # imported once; CUDA is initialised in each setting's own process
    deadline, found = time.perf_counter() + arguments.seconds, []
    for seed in range(arguments.first, arguments.first + arguments.seeds):
        if time.perf_counter() > deadline:
            break
        result = in_process(context, arguments, seed)
        found.append(result)
        print(line_of(result), flush=True)
    verdicts = [each["verdict"] for each in found]
    counts = {verdict: verdicts.count(verdict) for verdict in sorted(set(verdicts))}
    print(f"{len(found)} settings in {sum(each['seconds'] for each in found):.0f} s: {counts}")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))


def in_process(context: Any, arguments: argparse.Namespace, seed: int) -> dict[str, Any]:
    result: dict[str, Any] = {"verdict": f"not finished in {arguments.limit:.0f} s"}
    with Stopwatch() as watch:
        receiving, sending = context.Pipe(duplex=False)
        process = context.Process(target=_child, args=(sending, seed, arguments.device, arguments.tiny))
        process.start()
        sending.close()
        try:
            if receiving.poll(arguments.limit):
                result = receiving.recv()
        except EOFError:
            result = {"verdict": "the process ended"}
        process.join(0 if "estimate" not in result else 10)
        if process.is_alive():
            process.kill()
            process.join()
    return {"seed": seed, **result, "seconds": watch.seconds}


def _child(sending: Any, seed: int, device: str, tiny: bool) -> None:
    try:
        with tempfile.TemporaryDirectory() as folder:
            result = measured(Path(folder), seed, device, tiny=tiny)
    except BaseException as error:
        result = {"verdict": f"failed: {error}"[:300], "trace": traceback.format_exc()}
    sending.send(result)


def line_of(result: dict[str, Any]) -> str:
    numbers = [result.get(name, float("nan")) for name in ("estimate", "allocated", "reserved", "budget")]
    shown = " ".join(f"{number:9.2f}" for number in numbers)
    setting = result.get("setting", "")
    return f"{result['seed']:4d} {shown}  {result['seconds']:5.1f} s  {result['verdict']:40s} {setting}"


# A setting


def drawn(seed: int, folder: Path, device: str, *, tiny: bool) -> list[str]:
    """Return the command and the overrides of a setting. Its models and data are written into `folder`."""
    rng = np.random.default_rng(seed)

    def one(*values: Any) -> Any:
        return values[int(rng.integers(len(values)))]

    command, name = one(*COMMANDS), one(*SHAPES)
    shape, layers = TINY if tiny else SHAPES[name], one(2, 3, 4, 6)
    tokens = one(64, 128) if tiny else one(4096, 8192, 16_384, 32_768)
    rank = one(0, 0, 16)
    has_weights = command == "dpo"  # its reference is the same model, which must have weights
    write_model(folder / "model", shape, min(layers, 3) if has_weights else layers, weights=has_weights)
    found = {
        "model.path": folder / "model",
        "model.init": "weights" if has_weights else "random",
        "batch.max_tokens": tokens,
        "lora.rank": rank,
        "optimizer.state": one("float32", "float32", "bfloat16", "int8"),
        "parallel.compile": one("auto", "auto", "none"),
        "parallel.checkpointing": one("auto", "auto", "auto", "none", "full"),
        "parallel.head_memory": one("speed", "low"),
        "run.steps": 2,
        "run.folder": folder / "run",
        "run.device": device,
        "checkpoint.every": "none",
        "checkpoint.export": "false",
        "data.path": json.dumps([str(folder / "data.jsonl")]),
    }
    if device == "cuda" and found["parallel.compile"] == "auto" and one(True, False, False):
        found["parallel.linear"] = "float8"
    longest = tokens // one(1, 2, 8)
    samples = 2 * one(4, 8)
    if command == "distill":
        write_model(folder / "teacher", shape, one(2, 4), weights=True)
        found["teacher.path"] = folder / "teacher"
    if command == "rl":
        prompt = longest // 4
        found |= {
            "rollout.reward": "exact_match",
            "rollout.samples_per_prompt": 4,
            "rollout.max_new_tokens": min(longest - prompt, one(16, 64, 256)),
            "rollout.top_p": one(1.0, 1.0, 0.9),
            "loss.skip_zero_gradient": "false",  # all rewards are equal
        }
        longest = prompt
    write_rows(folder / "data.jsonl", command, rng, longest, 4 * samples)
    found["batch.samples"] = samples
    return [command, *(f"{name}={value}" for name, value in found.items())]


def write_model(folder: Path, shape: tuple[int, ...], layers: int, *, weights: bool) -> None:
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config
    from transformers.utils.logging import disable_progress_bar

    from padfree.testing.tokenizers import tiny_tokenizer

    hidden, mlp, heads, key_heads, head_size, vocabulary = shape
    config = Qwen3Config(
        num_hidden_layers=layers, hidden_size=hidden, intermediate_size=mlp, num_attention_heads=heads,
        num_key_value_heads=key_heads, head_dim=head_size, vocab_size=vocabulary, tie_word_embeddings=hidden < 4096,
        max_position_embeddings=65_536, dtype="bfloat16",
    )  # fmt: skip
    disable_progress_bar()  # type: ignore[no-untyped-call]
    tiny_tokenizer().save_pretrained(folder)
    if not weights:
        config.architectures = ["Qwen3ForCausalLM"]
        config.save_pretrained(folder)
        return
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    model.save_pretrained(folder)


def write_rows(path: Path, command: str, rng: np.random.Generator, longest: int, count: int) -> None:
    """Write rows of random letters, one of which is as long as a row may be."""

    def text(length: int) -> str:
        return bytes(rng.integers(97, 123, max(2, length)).astype(np.uint8)).decode()

    lengths = np.minimum(rng.lognormal(np.log(longest / 2), 0.6, count), longest).astype(int)
    lengths[0] = longest
    with path.open("w") as file:
        for length in (int(each) - 8 for each in lengths):  # room for special tokens
            row = {"text": text(length)}
            if command == "dpo":
                row = {"prompt": text(length // 4), "chosen": text(length // 8), "rejected": text(length // 8)}
            elif command == "rl":
                row = {"question": text(length), "answer": "0"}
            file.write(json.dumps(row) + "\n")


# A measurement


def measured(folder: Path, seed: int, device: str, *, tiny: bool) -> dict[str, Any]:
    import torch

    from padfree.cli.train import description
    from padfree.config import load_config
    from padfree.train import resolve_auto, train

    command, *overrides = drawn(seed, folder, device, tiny=tiny)
    config = load_config(RECIPES[command], overrides)
    setting = " ".join([command, *(each for each in overrides if str(folder) not in each)])
    budget = budget_of(config, seed, device)

    def device_memory(device: torch.device) -> float:
        return budget

    resolve_auto.device_memory = device_memory  # for the dry run, and for `auto` in the run
    lines = list(description(config))
    (about,) = (re.search(r"memory: about ([\d.]+) ([GM])iB", line) for line in lines if line.startswith("memory:"))
    assert about is not None
    estimate = float(about[1]) * (1.0 if about[2] == "G" else 2**-10)
    fits = estimate * GIB <= resolve_auto.USABLE_FRACTION * budget
    result = {"setting": setting, "estimate": estimate, "budget": budget / GIB, "lines": lines}
    cuda, ended = device == "cuda", True
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.set_per_process_memory_fraction(min(1.0, budget / torch.cuda.get_device_properties(0).total_memory))
    try:
        train(config)
    except torch.OutOfMemoryError:
        ended = False
    if not cuda:
        return {**result, "verdict": "ran, memory not measured"}
    reserved = torch.cuda.max_memory_reserved()
    enough = reserved >= 0.95 * resolve_auto.USABLE_FRACTION * budget
    right = ended if fits else enough or not ended
    verdict = (
        f"{'fits' if fits else 'does not fit'}{'' if ended else ', out of memory'}: {'right' if right else 'WRONG'}"
    )
    allocated = torch.cuda.max_memory_allocated() / GIB
    return {**result, "allocated": allocated, "reserved": reserved / GIB, "verdict": verdict}


def budget_of(config: Any, seed: int, device: str) -> float:
    """Return the memory budget in bytes, drawn near what the setting needs."""
    from dataclasses import replace

    from padfree.estimate.memory import estimate_memory
    from padfree.model.structure import model_skeleton
    from padfree.train.resolve_auto import USABLE_FRACTION

    asked = config.parallel
    compiler = ("inductor" if device == "cuda" else "none") if asked.compile == "auto" else asked.compile
    needs = []
    for level in ("full", "none") if asked.checkpointing == "auto" else (asked.checkpointing,):
        parallel = replace(asked, compile=compiler, checkpointing=level, reshard=False)
        found = estimate_memory(
            replace(config, parallel=parallel), model_skeleton(config), processes=1, device_type=device
        )
        needs.append(found.device / USABLE_FRACTION)
    share = np.random.default_rng([seed, 1]).uniform()
    return max(LEAST_BUDGET, 0.9 * min(needs) + share * (1.1 * max(needs) - 0.9 * min(needs)))


if __name__ == "__main__":
    main()
