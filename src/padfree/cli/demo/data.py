"""The demo's own data, tokenizer and model: small enough for two cores, and verifiable.

    prompt     Ann has 3 apples in January.     worked     February +4: 3+4=7     half of the responses: right, and
               February +4.                                March -2: 7-2=5        as long as the problem
               March -2.                                   #### 5
               How many?                        guessed    #### 6                 the others: short, and mostly wrong

A model that is fine-tuned on both learns to do both. What the reward (the number behind the hashes) then teaches it is
to do the work.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

NAMES = ("Ann", "Ben", "Eva", "Leo", "Mia", "Tom")
THINGS = ("apples", "books", "coins", "pens", "stones")
MONTHS: tuple[str, ...] = ("January", "February", "March", "April", "May", "June", "July")
MONTHS += ("August", "September", "October", "November", "December")
MOST, MOST_AT_ONCE = 9, 3
GUESSED = 0.5
VOCABULARY = 200
EOS = "<eos>"


def problems(count: int, seed: int, most_steps: int = 11) -> Iterator[dict[str, str]]:
    """Rows with `prompt`, `response` and `answer`; how many steps a problem has is log-normal, up to `most_steps`."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        prompt, work, answer = _problem(rng, most_steps)
        if rng.random() < GUESSED:
            response = f"#### {max(0, answer + int(rng.integers(-3, 4)))}"
        else:
            response = "\n".join([*work, f"#### {answer}"])
        yield {"prompt": prompt, "response": response, "answer": f"#### {answer}"}


def _problem(rng: np.random.Generator, most_steps: int) -> tuple[str, list[str], int]:
    """The text, the lines that work it out, and the answer."""
    total = int(rng.integers(0, MOST + 1))
    sentences = [f"{rng.choice(NAMES)} has {total} {rng.choice(THINGS)} in {MONTHS[0]}."]
    work = []
    for month in MONTHS[1 : 1 + int(np.clip(round(rng.lognormal(0.7, 0.8)), 1, most_steps))]:
        change = int(rng.integers(1, MOST_AT_ONCE + 1))
        if total < change or (total + change <= MOST and rng.random() < 0.5):
            sign, after = "+", total + change
        else:
            sign, after = "-", total - change
        sentences.append(f"{month} {sign}{change}.")
        work.append(f"{month} {sign}{change}: {total}{sign}{change}={after}")
        total = after
    return "\n".join([*sentences, "How many?\n"]), work, total


def write_rows(path: Path, rows: Iterator[dict[str, str]]) -> list[dict[str, str]]:
    """The rows as JSON Lines; returns them."""
    written = list(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in written), encoding="utf-8")
    return written


def train_tokenizer(rows: list[dict[str, str]]) -> Any:
    """Byte-level BPE on the rows; every digit is a token."""
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
    """A random Qwen3 and its tokenizer, as transformers stores them; returns the number of parameters.

    `head` is the size of a head; None: there are four.
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
        initializer_range=0.1 if hidden < 256 else 0.02,  # so small a model learns faster from larger weights
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=None,
    )
    make: Any = Qwen3ForCausalLM
    model = make(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())
