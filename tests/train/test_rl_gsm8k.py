"""Policy updates on real rollouts (GSM8K, four solutions to a question): the same metrics on any layout."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config

from padfree.config import Config, config_from_dict
from padfree.train.run import train
from tests.ranks import run_ranks
from tests.train.loop_cases import TIMES

WRITERS = ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification")
QUESTIONS = 5
VOCABULARY = 400
LOSSES: dict[str, dict[str, Any]] = {
    "clip": {"weights": "token-mean", "low": 0.2, "high": 0.28},
    "gspo": {"weights": "sample-mean", "low": 3e-4, "high": 4e-4},
    "cispo": {"weights": "group-mean", "high": 0.2},
}
LAYOUTS = {(1, 1): 1, (2, 1): 2, (1, 2): 2, (2, 2): 4}  # data x context -> processes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, gsm8k_solutions: list[dict[str, Any]]) -> Path:
    """Rollouts of a few questions in text, a tokenizer trained on them, and the config of a small model."""
    folder = tmp_path_factory.mktemp("gsm8k")
    rows = [
        {
            "prompt": row["question"],
            "response": row[writer]["solution"],
            "reward": float(row[writer]["is_correct"]),
            "group": f"question {number}",
        }
        for number, row in enumerate(gsm8k_solutions[:QUESTIONS])
        for writer in WRITERS
    ]
    (folder / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((row[field] for row in rows for field in ("prompt", "response")), trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder)
    Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
        eos_token_id=0,
    ).save_pretrained(folder)
    return folder


def make_config(folder: Path, kind: str, layout: tuple[int, int]) -> Config:
    return config_from_dict(
        {
            "model": {"path": str(folder), "init": "random"},
            "data": {"path": [str(folder / "rollouts.jsonl")]},
            "batch": {"samples": 4 * QUESTIONS, "max_tokens": 768},
            "loss": {"kind": kind, "mini_batches": 2, **LOSSES[kind]},
            "optimizer": {"lr": 2e-3, "eps": 1e-3},
            "parallel": {"context": layout[1]},
            "checkpoint": {"export": False},
            "run": {"folder": str(run_folder(folder, kind, layout)), "steps": 2, "device": "cpu"},
        }
    )


def run_folder(folder: Path, kind: str, layout: tuple[int, int]) -> Path:
    return folder / f"{kind} {layout[0]}x{layout[1]}"


def ranks(rank: int, world: int, configs: list[Config]) -> None:
    for config in configs:
        train(config)


def metrics(folder: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in TIMES} for line in found]


@pytest.mark.slow
def test_grpo_gspo_and_cispo_give_the_same_metrics_on_any_layout(folder: Path) -> None:
    configs = {layout: [make_config(folder, kind, layout) for kind in LOSSES] for layout in LAYOUTS}
    ranks(0, 1, configs[1, 1])
    run_ranks(2, ranks, [*configs[2, 1], *configs[1, 2]])
    run_ranks(4, ranks, configs[2, 2])
    for kind in LOSSES:
        expected = metrics(run_folder(folder, kind, (1, 1)))
        assert [line["step"] for line in expected] == [0, 1]
        assert sum(line["samples"] for line in expected) == 4 * QUESTIONS
        for line in expected:
            assert line["gradient_norm"] > 1e-3
            assert 0 < line["reward"] < 1
            assert math.isfinite(line["loss"])
        assert expected[0]["loss/ratio"] == pytest.approx(1.0, abs=1e-5)
        assert expected[1]["loss/ratio"] != pytest.approx(1.0, abs=1e-5), "the second half meets a changed model"
        for layout in LAYOUTS:
            for line, other in zip(metrics(run_folder(folder, kind, layout)), expected, strict=True):
                assert line.keys() == other.keys()
                for name, value in other.items():
                    assert line[name] == pytest.approx(value, rel=1e-4, abs=1e-5), (kind, layout, line["step"], name)
