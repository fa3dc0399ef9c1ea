"""Fine-tune a small model on GSM8K twice: packed with padfree, and padded with plain transformers.

    PYTHONPATH=src python bench/sft.py [--steps 8] [--samples 64] [--gsm8k ../shared/data/gsm8k] [--json sft.json]

The model is a Qwen3 with random weights in float32, trained with AdamW. Both variants use the same seed and the same
batches in the same order. The script fails if their losses in a step differ by more than 1e-5.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from timer import Stopwatch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from padfree.data import SFTDataSettings, load_sft
from padfree.distributed import distributed, make_mesh
from padfree.losses import SFTSettings
from padfree.optim.optimizer import make_optimizer
from padfree.optim.optimizer_settings import OptimizerConfig
from padfree.packing import FixedSizeBatcher
from padfree.sample import Sample
from padfree.sharding.parallelize import parallelize, transformations
from padfree.tools.check.padded import padded_loss
from padfree.train.engine import Engine, LossSettings
from padfree.train.scorer import Scorer

GSM8K = Path(os.environ.get("PADFREE_GSM8K", Path(__file__).resolve().parents[2] / "shared" / "data" / "gsm8k"))
VOCABULARY = 4096
LR = 1e-3
EPS = 1e-6
GOAL_LOSS, GOAL_SPEED = 1e-5, 2.0

Step = Callable[[Sequence[Sample]], float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu",), default="cpu")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--samples", type=int, default=64, help="samples per step")
    parser.add_argument("--max-tokens", type=int, default=16384, help="tokens per packed micro-batch")
    parser.add_argument("--rows", type=int, default=64, help="samples per padded micro-batch")
    parser.add_argument("--gsm8k", type=Path, default=GSM8K)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    arguments = parser.parse_args()
    if not (arguments.gsm8k / "train.jsonl").exists():
        raise SystemExit(f"no train.jsonl in {arguments.gsm8k}; give its folder with --gsm8k")

    with tempfile.TemporaryDirectory() as cache:
        batches = read_batches(arguments.gsm8k / "train.jsonl", Path(cache), arguments.samples, arguments.steps)
    model = small_model()
    ways: dict[str, tuple[list[float], float]] = {}
    with distributed(device="cpu") as device:
        for name, make in (("padded", padded_way), ("packed", packed_way)):
            step = make(copy.deepcopy(model), device, arguments)
            with Stopwatch() as watch:
                losses = [step(batch) for batch in batches]
            ways[name] = (losses, watch.seconds)
    report(ways, batches, arguments)


def read_batches(path: Path, cache: Path, samples: int, steps: int) -> list[list[Sample]]:
    """Return the global batches, encoded with a tokenizer that is trained on the same file."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=["<eos>", "<unk>"], show_progress=False)
    tokenizer.train_from_iterator((text for row in rows for text in (row["question"], row["answer"])), trainer)
    make: Any = PreTrainedTokenizerFast
    fast = make(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>")
    settings = SFTDataSettings(columns={"question": "prompt", "answer": "response"})
    data = load_sft(path, fast, settings, cache=cache, num_workers=0)
    batcher = FixedSizeBatcher(data, batch_size=samples, shuffle=True, seed=0)
    return [list(next(batcher)) for _ in range(steps)]


def small_model() -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
    )
    make: Any = Qwen3ForCausalLM
    return make(config)


def packed_way(model: Any, device: torch.device, arguments: argparse.Namespace) -> Step:
    mesh = make_mesh(device)
    parallelize(model, transformations(mesh))
    scorer = Scorer(model, mesh, max_tokens=arguments.max_tokens)
    engine = Engine(scorer, make_optimizer(model, OptimizerConfig(lr=LR, eps=EPS)), LossSettings(loss=SFTSettings()))
    return lambda batch: engine.step(batch).loss


def padded_way(model: Any, device: torch.device, arguments: argparse.Namespace) -> Step:
    """Return a step of plain transformers, which pads samples to the longest of their micro-batch."""
    optimizer = make_optimizer(model, OptimizerConfig(lr=LR, eps=EPS))

    def step(batch: Sequence[Sample]) -> float:
        count = sum(sample.num_labels for sample in batch)
        parts = [batch[first : first + arguments.rows] for first in range(0, len(batch), arguments.rows)]
        total = padded_loss(model, parts, count)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return step


def report(ways: dict[str, tuple[list[float], float]], batches: list[list[Sample]], arguments: Any) -> None:
    tokens = sum(len(sample) for batch in batches for sample in batch)
    rows = [batch[i : i + arguments.rows] for batch in batches for i in range(0, len(batch), arguments.rows)]
    computed = sum(len(row) * max(len(sample) for sample in row) for row in rows)
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, python {platform.python_version()}"
    print(f"{versions}, {platform.machine()}, {torch.get_num_threads()} CPU threads")
    print(
        f"{len(batches)} steps of {arguments.samples} samples, {tokens:,} tokens, {1 - tokens / computed:.0%} padding\n"
    )
    print("step      padded      packed  difference")
    differences = []
    for index, (padded, packed) in enumerate(zip(ways["padded"][0], ways["packed"][0], strict=True)):
        differences.append(abs(padded - packed))
        print(f"{index + 1:4d}  {padded:10.6f}  {packed:10.6f}  {differences[-1]:10.1e}")
    speed = {name: tokens / seconds for name, (_, seconds) in ways.items()}
    ratio = speed["packed"] / speed["padded"]
    print(f"\nreal tokens/s: padded {speed['padded']:,.0f}, packed {speed['packed']:,.0f}: {ratio:.2f} times", end=" ")
    print(f"(goal: at least {GOAL_SPEED})")
    if arguments.json:
        values = {name: {"losses": losses, "seconds": seconds} for name, (losses, seconds) in ways.items()}
        arguments.json.write_text(json.dumps({"versions": versions, "tokens": tokens, **values}, indent=1))
    assert max(differences) <= GOAL_LOSS, f"losses differ by {max(differences):.1e}, more than {GOAL_LOSS}"


if __name__ == "__main__":
    main()
