"""Text to tokens: tokens that span a border, and special tokens before and after a text."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from padfree.data.encode import Encoded, Encoder, Passage, Piece
from padfree.data.records import RowError
from padfree.testing.tokenizers import CharacterTokenizer, tiny_tokenizer
from tests.refused import refused

BYTES = tiny_tokenizer()
EOS = 3


def encode(tokenizer: PreTrainedTokenizerBase, passage: Passage, *, append_eos: bool = True) -> Encoded:
    (result,) = Encoder(tokenizer, append_eos=append_eos).encode([passage])
    if isinstance(result, RowError):
        raise result
    assert result.tokens.dtype == np.int32
    assert result.loss_mask.dtype == np.bool_
    assert len(result.tokens) == len(result.loss_mask)
    return result


def ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    found: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return found


def test_pieces_of_spans() -> None:
    pieces = Passage.of_spans("abcdef", [(0, 2), (3, 4)]).pieces
    assert pieces == (("ab", True), ("c", False), ("d", True), ("ef", False))
    assert Passage.of_spans("abc", [(0, 3)]).pieces == (("abc", True),)
    assert Passage.of_spans("abc", []).pieces == (("abc", False),)
    assert len(encode(BYTES, Passage.of_spans("", [])).tokens) == 0


def test_a_joined_text_has_the_tokens_of_the_whole_text() -> None:
    text = "<|im_start|>user\nWhat is two plus two?<|im_end|>\n"
    start = text.index("What")
    result = encode(BYTES, Passage.of_spans(text, [(start, len(text) - 1)]))
    assert result.tokens.tolist() == ids(BYTES, text)
    assert BYTES.decode(result.tokens[result.loss_mask]) == text[start:-1]


def test_a_token_across_a_border_is_cut() -> None:
    text = "assistant\n\n\nHello"
    (newlines,) = ids(BYTES, "\n\n")
    assert newlines in ids(BYTES, text)
    start = len("assistant\n")
    result = encode(BYTES, Passage.of_spans(text, [(start, len(text))]))
    assert result.tokens.tolist() == ids(BYTES, text[:start]) + ids(BYTES, text[start:])
    assert result.loss_mask.tolist() == [False] * len(ids(BYTES, text[:start])) + [True] * len(ids(BYTES, text[start:]))


LETTERS = st.sampled_from("ab é東🙂\n\t .")


@settings(max_examples=100)
@given(st.lists(st.tuples(st.text(LETTERS, min_size=1, max_size=6), st.booleans()), min_size=1, max_size=5))
@pytest.mark.parametrize("kind", ["bytes", "trimmed"])
def test_the_trained_tokens_spell_the_trained_text(kind: str, parts: list[tuple[str, bool]]) -> None:
    """Borders at random positions, but not inside a character."""
    tokenizer = tiny_tokenizer(kind=kind)
    text = "".join(part for part, _ in parts)
    ends = np.cumsum([len(part) for part, _ in parts]).tolist()
    spans = [(end - len(part), end) for (part, trained), end in zip(parts, ends, strict=True) if trained]
    merged = [span for span in spans if all(span[0] != other[1] for other in spans)]
    result = encode(tokenizer, Passage.of_spans(text, merged))
    assert tokenizer.decode(result.tokens) == text
    assert tokenizer.decode(result.tokens[result.loss_mask]) == "".join(text[start:end] for start, end in merged)


def test_a_tokenizer_that_begins_every_text_with_a_space() -> None:
    tokenizer = tiny_tokenizer(kind="metaspace")
    whole = "user Hi<|im_end|>Hello there<|im_end|>"
    start = whole.index("Hello")
    result = encode(tokenizer, Passage.of_spans(whole, [(start, len(whole))]))
    assert result.tokens.tolist() == ids(tokenizer, whole)
    assert result.loss_mask.sum() == len(ids(tokenizer, "Hello there<|im_end|>"))
    assert "the" in tokenizer.tokenize("there")
    with pytest.raises(RowError, match=r"one token spans the start or end of an assistant turn.*loss_on=all"):
        encode(tokenizer, Passage.of_spans("there", [(1, 5)]))
    assert encode(tokenizer, Passage.of_spans("there", [(0, 5)])).loss_mask.all()


def test_a_tokenizer_without_offsets_is_cut_at_every_border() -> None:
    tokenizer = CharacterTokenizer()
    result = encode(tokenizer, Passage.of_spans("abc<|im_end|>d", [(1, 13)]))
    assert result.tokens.tolist() == [10, 11, 12, 100, 13]
    assert result.loss_mask.tolist() == [False, True, True, True, False]


def test_texts_apart_are_tokenised_by_themselves_and_ended() -> None:
    passage = Passage(pieces=(Piece("May", False), Piece(" be", True)))
    result = encode(BYTES, passage)
    assert result.tokens.tolist() == [*ids(BYTES, "May"), *ids(BYTES, " be"), EOS]
    assert result.loss_mask.sum() == len(ids(BYTES, " be")) + 1
    assert encode(BYTES, passage, append_eos=False).tokens.tolist() == result.tokens.tolist()[:-1]
    ended = Passage(pieces=(Piece("May", False), Piece(" be<|im_end|>", True)))
    assert encode(BYTES, ended).tokens.tolist() == result.tokens.tolist()
    empty = encode(BYTES, Passage(pieces=(Piece("", False), Piece("", True))))
    assert empty.tokens.tolist() == [EOS]


def test_what_the_tokenizer_puts_before_a_text_comes_once() -> None:
    tokenizer = tiny_tokenizer(kind="bos")
    pieces = (Piece("May", False), Piece(" be", True))
    plain = [*ids(tokenizer, "May"), *ids(tokenizer, " be"), EOS]
    assert encode(tokenizer, Passage(pieces=pieces)).tokens.tolist() == [1, *plain]
    assert encode(tokenizer, Passage(pieces=pieces, begun=True)).tokens.tolist() == plain
    joined = Passage(pieces=(Piece("<s>May", False), Piece(" be", True)), joined=True)
    assert encode(tokenizer, joined).tokens.tolist() == [1, *plain[:-1]]


def test_a_tokenizer_without_an_end_is_refused_or_told_not_to_write_one() -> None:
    tokenizer = tiny_tokenizer(eos_token=None)
    passage = Passage(pieces=(Piece("May", True),))
    with refused("data.append_eos"):
        encode(tokenizer, passage)
    assert encode(tokenizer, passage, append_eos=False).tokens.tolist() == ids(tokenizer, "May")


def test_many_passages_in_one_call_and_none() -> None:
    passages = [
        Passage.of_spans("Hello there", [(0, 5)]),
        Passage(pieces=(Piece("May", False), Piece("be", True))),
        Passage.of_spans("a\n\n\nb", [(2, 5)]),
    ]
    together = Encoder(BYTES).encode(passages)
    for passage, result in zip(passages, together, strict=True):
        alone = encode(BYTES, passage)
        assert not isinstance(result, RowError)
        assert result.tokens.tolist() == alone.tokens.tolist()
        assert result.loss_mask.tolist() == alone.loss_mask.tolist()
    assert Encoder(BYTES).encode([]) == []


def test_the_tokenizers_padding_and_truncation_do_not_reach_the_data() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer(["May", "Hello there"], padding=True, truncation=True, max_length=2)
    assert encode(tokenizer, Passage.of_spans("Hello there", [(0, 11)])).tokens.tolist() == ids(BYTES, "Hello there")
