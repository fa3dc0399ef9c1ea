"""A tokenizer of single letters whose decoded text equals the original, for the tests of rollouts."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from padfree.testing.models import LETTERS

EOS = 0
VOCABULARY = {letter: index for index, letter in enumerate(["<eos>", "<unk>", *LETTERS, ":"])}


def letters_tokenizer(*, template: str | None = None, eos: str | None = "<eos>") -> Any:
    tokenizer = Tokenizer(WordLevel(VOCABULARY, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token=eos)
    fast.chat_template = template
    return fast
