"""Tokenizers of a few hundred tokens, trained on demand, and chat templates of several kinds.

chatml            writes each message as a header, the content, an end token and a newline
chatml_marked     writes the same text, with {% generation %} around the assistant's messages
forgetful         trims white space, and drops the reasoning from all messages but the last
no_system         rejects a system message, and writes neither a generation prompt nor a header for the assistant
"""

from __future__ import annotations

import string
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<s>", "<|im_start|>", "<|im_end|>"]

_HEAD = "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
_FOOT = "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TEMPLATES = {
    "chatml": _HEAD + "{{ message['content'] }}<|im_end|>{{ '\n' }}" + _FOOT,
    "chatml_marked": (
        _HEAD + "{% if message['role'] == 'assistant' %}"
        "{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}"
        "{% else %}{{ message['content'] }}<|im_end|>{% endif %}{{ '\n' }}" + _FOOT
    ),
    "forgetful": (
        _HEAD + "{% if message['role'] == 'assistant' and not loop.last %}"
        "{{ message['content'].split('</think>')[-1].strip() }}"
        "{% else %}{{ message['content'].strip() }}{% endif %}<|im_end|>{{ '\n' }}" + _FOOT
    ),
    "no_system": (
        "<s>{% for message in messages %}{% if message['role'] == 'system' %}"
        "{{ raise_exception('System role not supported') }}{% endif %}"
        "{% if message['role'] == 'user' %}[ask] {{ message['content'] }} [/ask]"
        "{% else %} {{ message['content'] }}<|im_end|>{% endif %}{% endfor %}"
    ),
}
TEXTS = [
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May.",
    "user assistant system\nHello there!\n\nWhat is two plus two?  Four, I think.\n#### 4",
    "naïve café, 東京, 🙂; tabs\tand  spaces   and\n\n\nnewlines",
]


@cache
def _backend(kind: str) -> str:
    tokenizer = Tokenizer(models.BPE())
    if kind == "metaspace":
        # Like SentencePiece: every text gets a leading space.
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
        alphabet = list(string.printable)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 4, trainer)
    if kind == "bos":
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    elif kind == "trimmed":
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    elif kind == "bytes":
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return str(tokenizer.to_str())


def tiny_tokenizer(template: str | None = None, *, kind: str = "bytes", **changes: Any) -> PreTrainedTokenizerFast:
    """Make a new tokenizer. `template`: a name in TEMPLATES. `kind`:

    bytes      byte-level BPE
    trimmed    byte-level BPE whose character offsets leave out white space
    bos        byte-level BPE that puts `<s>` before each text
    metaspace  BPE that writes a space as ▁, like SentencePiece
    """
    make: Any = PreTrainedTokenizerFast
    tokenizer: PreTrainedTokenizerFast = make(
        tokenizer_object=Tokenizer.from_str(_backend(kind)),
        **{"eos_token": "<|im_end|>", "bos_token": "<s>", "pad_token": "<pad>", **changes},
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    if template is not None:
        tokenizer.chat_template = TEMPLATES[template]
    return tokenizer


class CharacterTokenizer(PreTrainedTokenizer):
    """A tokenizer written in Python, with one token per character. It gives no character offsets."""

    vocab_files_names: ClassVar[dict[str, str]] = {}  # type: ignore[misc]

    def __init__(self, letters: str = string.printable, **changes: Any) -> None:
        self.letters = letters
        super().__init__(letters=letters, **{"eos_token": "<|im_end|>", **changes})  # type: ignore[no-untyped-call]

    @property
    def vocab_size(self) -> int:
        return len(self.letters)

    def get_vocab(self) -> dict[str, int]:
        return {letter: index for index, letter in enumerate(self.letters)} | self.added_tokens_encoder

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        return list(text)

    def _convert_token_to_id(self, token: str) -> int:
        return self.letters.index(token)

    def _convert_id_to_token(self, index: int) -> str:
        return self.letters[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens)

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str, ...]:
        path = Path(save_directory) / "letters.txt"
        path.write_text(self.letters)
        return (str(path),)
