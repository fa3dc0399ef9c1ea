"""Streaming text: pieces are whole characters, and joined they are the whole text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from padfree.testing.tokenizers import tiny_tokenizer
from padfree.tools.talk.text_stream import TextStream

TOKENIZERS = {kind: tiny_tokenizer(kind=kind) for kind in ("bytes", "metaspace")}
TEXT = "naïve 東京 🙂 👩‍👩‍👧 z\u0301 Grüße\n"


def decoder(kind: str) -> Any:
    def decode(ids: Sequence[int]) -> str:
        return str(TOKENIZERS[kind].decode(list(ids), clean_up_tokenization_spaces=False))

    return decode


def test_a_character_of_several_tokens_comes_whole() -> None:
    decode = decoder("bytes")
    ids = [token for character in "🙂Ж" for token in TOKENIZERS["bytes"](character)["input_ids"]]
    assert len(ids) > 2, "the characters must be spread over several tokens"
    stream = TextStream(decode)
    assert [piece for token in ids if (piece := stream.add([token]))] == ["🙂", "Ж"]
    assert stream.end() == ""


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_pieces_are_the_text(kind: str) -> None:
    decode = decoder(kind)
    ids = TOKENIZERS[kind](TEXT if kind == "bytes" else "Hello there!  two spaces\nand a line")["input_ids"]
    for size in (1, 2, 3, 100):
        stream = TextStream(decode)
        pieces = [stream.add(ids[first : first + size]) for first in range(0, len(ids), size)]
        assert all("\ufffd" not in piece for piece in pieces)
        assert "".join([*pieces, stream.end()]) == decode(ids)


@given(st.lists(st.integers(4, 399), max_size=40))
def test_any_ids_give_the_text_of_all_of_them(ids: list[int]) -> None:
    """Invalid bytes are shown as U+FFFD, as by the decoder."""
    decode = decoder("bytes")
    stream = TextStream(decode)
    assert "".join([*(stream.add([token]) for token in ids), stream.end()]) == decode(ids)


def test_bytes_that_never_become_a_character_are_shown_at_the_end() -> None:
    decode = decoder("bytes")
    first = TOKENIZERS["bytes"]("🙂")["input_ids"][:1]
    stream = TextStream(decode)
    assert stream.add(first) == ""
    assert stream.end() == "\ufffd"
    assert stream.end() == ""


def test_the_cost_does_not_grow_with_the_text() -> None:
    decoded: list[int] = []
    decode = decoder("bytes")

    def counted(ids: Sequence[int]) -> str:
        decoded.append(len(ids))
        return str(decode(ids))

    stream = TextStream(counted)
    for token in TOKENIZERS["bytes"]("two " * 500)["input_ids"]:
        stream.add([token])
    assert max(decoded) <= 4
