"""A few samples of SFT data, of rollouts, or of random tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from padfree.testing.models import save_with_tokenizer
from padfree.tools.check import chosen_samples, random_samples
from padfree.tools.check.samples import has_tokenizer, spread
from tests.refused import refused


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PADFREE_CACHE", str(tmp_path / "cache"))


def write(path: Path, rows: list[dict[str, object]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_samples_are_spread_from_the_shortest_to_the_longest() -> None:
    assert spread([12, 500, 80, 40, 7, 90, 300, 60], 4) == [1, 3, 4, 5]
    assert spread([5, 5, 5], 2) == [0, 2]
    assert spread([5, 6], 8) == [0, 1]


def test_random_samples_are_of_mixed_lengths_and_the_same_again() -> None:
    samples, again = random_samples(50, 6, longest=40), random_samples(50, 6, longest=40)
    lengths = [len(sample) for sample in samples]
    assert (min(lengths), max(lengths)) == (3, 40)
    assert lengths != sorted(lengths)
    assert all((a.tokens == b.tokens).all() and (a.tokens < 50).all() for a, b in zip(samples, again, strict=True))
    assert all(0 < sample.num_labels < len(sample) for sample in samples)


def test_sft_data_and_rollouts_are_told_apart(tmp_path: Path) -> None:
    folder = save_with_tokenizer(tmp_path / "model")
    sft = write(tmp_path / "sft.jsonl", [{"prompt": "1+1=", "response": "2" * n} for n in range(1, 9)])
    samples = chosen_samples([sft], 3, tokenizer=str(folder), max_length=9)
    assert [len(sample) for sample in samples] == [6, 9, 9]  # prompt, response, eos; the last one is cut
    assert samples[0].mask.tolist() == [False] * 4 + [True] * 2
    rollouts = write(
        tmp_path / "rl.jsonl",
        [{"tokens": list(range(n)), "response_length": 1, "reward": 1.0, "group": n} for n in (4, 3, 9)],
    )
    samples = chosen_samples([rollouts], 2, tokenizer=None, max_length=8)
    assert [len(sample) for sample in samples] == [3, 8]


def test_text_needs_a_tokenizer(tmp_path: Path) -> None:
    sft = write(tmp_path / "sft.jsonl", [{"text": "a"}])
    with refused("--tokenizer"):
        chosen_samples([sft], 2, tokenizer=None, max_length=8)
    with refused("--tokenizer"):
        chosen_samples([sft], 2, tokenizer=str(tmp_path), max_length=8)
    assert not has_tokenizer(tmp_path)
    assert has_tokenizer("some/hub-id")
