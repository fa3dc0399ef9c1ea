"""SmolLM2 as a GGUF file is the same model for transformers. Vocabularies of real tokenizers are as llama.cpp needs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from padfree.cli.main import main
from padfree.model.gguf_vocabulary import gguf_vocabulary
from tests.model.test_gguf_file import by_scores
from tests.real.cases import QUESTIONS, SMOLLM2, load, message, needs_smollm2

pytest.importorskip("gguf", reason="gguf is not installed")

pytestmark = [needs_smollm2, pytest.mark.slow]
TOKENIZERS = Path(os.environ.get("PADFREE_REAL", "unset")) / "tokenizers"
TEXTS = (
    "Natalia sold 48 clips in April, didn't she?  Half as many\n\n in May.",
    "naïve café, 東京, 🙂; tabs\tand   spaces",
    "def f(x):\n    return x**2  # 12345\n",
)


def test_smollm2_is_the_same_model(tmp_path: Path) -> None:
    assert main(["export", str(SMOLLM2), str(tmp_path / "smollm2.gguf")]) == 0
    read = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="smollm2.gguf", dtype=torch.float32, attn_implementation="eager"
    )
    expected = load()
    assert all(torch.equal(tensor, read.state_dict()[name]) for name, tensor in expected.state_dict().items())
    before, after = (
        AutoTokenizer.from_pretrained(SMOLLM2),
        AutoTokenizer.from_pretrained(tmp_path, gguf_file="smollm2.gguf"),
    )
    assert after.chat_template == before.chat_template
    for question in QUESTIONS:
        prompt = [message("user", question)]
        ids, others = (
            each.apply_chat_template(prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True)[
                "input_ids"
            ]
            for each in (before, after)
        )
        assert torch.equal(ids, others)
        with torch.no_grad():
            assert torch.equal(read.eval()(ids).logits, expected.eval()(ids).logits)


@pytest.mark.parametrize(
    ("name", "pre"), [("qwen3", "qwen2"), ("qwen2_5", "qwen2"), ("llama3_2", "llama-bpe"), ("gemma3", None)]
)
def test_real_tokenizers(name: str, pre: str | None) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZERS / name)
    vocabulary = tokenizer.get_vocab()
    size = max(vocabulary.values()) + 1
    found = gguf_vocabulary(tokenizer, size)
    assert found.pre == pre
    assert len(found.tokens) == len(set(found.tokens)) == size
    if found.scores is None:
        assert found.merges
        return
    for text in TEXTS:
        pieces = by_scores(text, vocabulary, found.scores)
        assert [piece for piece in tokenizer.tokenize(text) if not piece.startswith("<0x")] == [
            piece for piece in pieces if piece in vocabulary
        ]
