"""A task that a model learns on two CPU cores: problems with answers, a tokenizer, a model and two recipes.

    prompt     Ann has 3 apples in January.     a worked response     February +4: 3+4=7
               February +4.                                           March -2: 7-2=5
               March -2.                                              #### 5
               How many?                        a guessed response    #### 6

Half of the responses in the data work the problem out, and half guess. A fine-tuned model does both. RL then teaches it
to work problems out, because the reward checks the answer.

    call                                        writes
    write_task(folder, sizes)                   data/train.jsonl, data/prompts.jsonl, model/
    train(sft_config(folder, sizes))            sft/
    train(rl_config(folder, sizes))             rl/, starting from the fine-tuned model
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from padfree.config import Config, config_from_dict

NAMES = ("Ann", "Ben", "Eva", "Leo", "Mia", "Tom")
THINGS = ("apples", "books", "coins", "pens", "stones")
MONTHS: tuple[str, ...] = ("January", "February", "March", "April", "May", "June", "July")
MONTHS += ("August", "September", "October", "November", "December")
LARGEST, LARGEST_CHANGE = 9, 3
GUESSED = 0.5
VOCABULARY = 200
EOS = "<eos>"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Sizes of the arithmetic task: of its data, of the model, and of the SFT and RL runs."""

    rows: int = 4000
    prompts: int = 512
    hidden: int = 64
    samples: int = 40  # samples per step of SFT
    sft_steps: int = 200
    responses: int = 128  # responses per step of RL
    group: int = 8
    rl_steps: int = 20
    max_new_tokens: int = 64


def problems(count: int, seed: int, most_steps: int = 11) -> Iterator[dict[str, str]]:
    """Yield `count` word problems of at most `most_steps` steps, as rows of `prompt`, `response` and `answer`."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        prompt, work, answer = _problem(rng, most_steps)
        if rng.random() < GUESSED:
            response = f"#### {max(0, answer + int(rng.integers(-3, 4)))}"
        else:
            response = "\n".join([*work, f"#### {answer}"])
        yield {"prompt": prompt, "response": response, "answer": f"#### {answer}"}


def _problem(rng: np.random.Generator, most_steps: int) -> tuple[str, list[str], int]:
    """Draw a random word problem. Return its text, the lines of its solution and its answer."""
    total = int(rng.integers(0, LARGEST + 1))
    sentences = [f"{rng.choice(NAMES)} has {total} {rng.choice(THINGS)} in {MONTHS[0]}."]
    work = []
    for month in MONTHS[1 : 1 + int(np.clip(round(rng.lognormal(0.7, 0.8)), 1, most_steps))]:
        change = int(rng.integers(1, LARGEST_CHANGE + 1))
        if total < change or (total + change <= LARGEST and rng.random() < 0.5):
            sign, after = "+", total + change
        else:
            sign, after = "-", total - change
        sentences.append(f"{month} {sign}{change}.")
        work.append(f"{month} {sign}{change}: {total}{sign}{change}={after}")
        total = after
    return "\n".join([*sentences, "How many?\n"]), work, total


def write_rows(path: Path, rows: Iterable[dict[str, str]]) -> list[dict[str, str]]:
    """Write data rows to the JSON Lines file `path`, and return them as a list."""
    written = list(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in written), encoding="utf-8")
    return written


def train_tokenizer(rows: list[dict[str, str]]) -> Any:
    """Train a byte-level BPE tokenizer on the rows. Every digit is a separate token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=[EOS], show_progress=False)
    tokenizer.train_from_iterator((row[field] for row in rows for field in ("prompt", "response")), trainer)
    make: Any = PreTrainedTokenizerFast
    return make(tokenizer_object=tokenizer, eos_token=EOS)


def write_model(folder: Path, tokenizer: Any, hidden: int, *, layers: int = 2, head: int | None = None) -> int:
    """Save a Qwen3 model with random weights, and its tokenizer. Returns the number of parameters.

    `head` is the size of an attention head. None: a quarter of `hidden`.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config: Any = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // head if head else 4,
        num_key_value_heads=hidden // head // 2 if head else 2,
        head_dim=head or hidden // 4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.1 if hidden < 256 else 0.02,  # a very small model learns faster with larger weights
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=None,
    )
    make: Any = Qwen3ForCausalLM
    model = make(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def write_task(folder: Path, sizes: Sizes, *, head: int | None = None) -> tuple[list[dict[str, str]], Any, int]:
    """Write the data and the model for fine-tuning and RL on the arithmetic task.

    Returns the data rows, the tokenizer and the number of parameters.
    """
    rows = write_rows(folder / "data" / "train.jsonl", problems(sizes.rows, seed=0))
    short = problems(sizes.prompts, seed=1, most_steps=3)
    prompts = ({"prompt": row["prompt"], "answer": row["answer"]} for row in short)
    write_rows(folder / "data" / "prompts.jsonl", prompts)
    tokenizer = train_tokenizer(rows)
    return rows, tokenizer, write_model(folder / "model", tokenizer, sizes.hidden, head=head)


def sft_config(folder: Path, sizes: Sizes) -> Config:
    """Return the settings of the fine-tuning run, which trains on the data that `write_task` wrote to `folder`."""
    return config_from_dict(
        {
            "model": {"path": str(folder / "model")},
            "data": {"path": [str(folder / "data" / "train.jsonl")], "epochs": None},
            "batch": {"samples": sizes.samples, "max_tokens": 8192},
            "optimizer": {"lr": 8e-3, "eps": 1e-6},
            "schedule": {"kind": "linear", "warmup": sizes.sft_steps // 20, "final": 0.1},
            "checkpoint": {"every": 25},
            "run": {"folder": str(folder / "sft"), "steps": sizes.sft_steps, "device": "cpu"},
        }
    )


def rl_config(folder: Path, sizes: Sizes) -> Config:
    """Return the settings of the RL run, which starts from the fine-tuned model in `folder`."""
    return config_from_dict(
        {
            "model": {"path": str(folder / "sft" / "model")},
            "data": {"path": [str(folder / "data" / "prompts.jsonl")], "epochs": None},
            "batch": {"samples": sizes.responses, "max_tokens": 8192},
            "rollout": {
                "reward": "number_after_hashes",
                "samples_per_prompt": sizes.group,
                "max_new_tokens": sizes.max_new_tokens,
            },
            "loss": {"kind": "clip", "advantage": "grpo"},
            "optimizer": {"lr": 1e-3},
            "checkpoint": {"every": 5},
            "run": {"folder": str(folder / "rl"), "steps": sizes.rl_steps, "device": "cpu"},
        }
    )
