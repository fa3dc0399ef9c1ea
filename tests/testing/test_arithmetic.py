"""The demo's problems can be verified and are of all lengths, and its tokenizer reads them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from transformers import AutoModelForCausalLM

from padfree.data import number_after_hashes
from padfree.testing.arithmetic import problems, train_tokenizer, write_model, write_rows


def test_problems_are_verifiable_and_of_all_lengths() -> None:
    rows = list(problems(400, seed=0))
    assert rows == list(problems(400, seed=0))
    worked = [row for row in rows if "=" in row["response"]]
    assert all(number_after_hashes(row["response"], row) == 1.0 for row in worked)
    for row in worked:
        for line in row["response"].splitlines()[:-1]:
            left, _, right = line.partition(": ")[2].partition("=")
            assert eval(left) == int(right)
    guessed = [row for row in rows if "=" not in row["response"]]
    share = np.mean([number_after_hashes(row["response"], row) for row in guessed])
    assert 0.4 < len(worked) / len(rows) < 0.6
    assert 0.0 < share < 0.5
    lengths = [len(row["prompt"]) for row in rows]
    assert max(lengths) > 3 * min(lengths)


def test_short_problems_have_few_steps() -> None:
    assert {row["prompt"].count("\n") - 2 for row in problems(200, seed=1, most_steps=3)} == {1, 2, 3}


def test_the_tokenizer_and_the_model_go_together(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "data" / "train.jsonl", problems(100, seed=0))
    tokenizer = train_tokenizer(rows)
    for row in rows:
        assert tokenizer.decode(tokenizer(row["response"]).input_ids) == row["response"]
    assert tokenizer.tokenize("12") == ["1", "2"]
    parameters = write_model(tmp_path / "model", tokenizer, hidden=32)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert model.config.vocab_size == len(tokenizer)
