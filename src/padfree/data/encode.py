"""Turn text into tokens and exact loss masks.

A text consists of pieces, each of which is trained or untrained. It is tokenised in one of two ways:

    joined     "...assistant\\n" | "Hello<|im_end|>" | "\\n"      as a whole
    apart      "What is 2+2?" | "4"                             bos, each piece on its own, eos

If a token of a joined text spans the border of two pieces, each piece is tokenised on its own. The model would not see
such a token at inference, because the prompt ends at the border.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from padfree.data.image_references import ImageReference
from padfree.data.records import RowError, attempt
from padfree.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


MOST_CHARACTERS = 1 << 23
"""The maximum number of characters in a row's text. A tokenizer takes minutes for longer texts, and models do not have
such a long context.
"""


class Piece(NamedTuple):
    text: str
    trained: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Passage:
    """The text of one sample, in pieces that are each trained or untrained."""

    pieces: tuple[Piece, ...]
    joined: bool = False  # whether the pieces form one text, which already contains its special tokens
    begun: bool = False  # if not joined: whether the first piece already begins with special tokens such as bos
    images: tuple[ImageReference, ...] = ()  # the images whose markers are in the pieces, in order

    @staticmethod
    def of_spans(text: str, spans: Sequence[tuple[int, int]], images: tuple[ImageReference, ...] = ()) -> Passage:
        """Return a passage with a single text (`joined`), in which the characters inside `spans` are trained.

        The spans must be sorted, disjoint and not empty.
        """
        pieces: list[Piece] = []
        done = 0
        for start, end in spans:
            pieces += [Piece(text[done:start], False), Piece(text[start:end], True)]
            done = end
        last = Piece(text[done:], False)
        filled = tuple(piece for piece in (*pieces, last) if piece.text)
        return Passage(pieces=filled or (last,), joined=True, images=images)


class Encoded(NamedTuple):
    tokens: NDArray[np.int32]  # [n]
    loss_mask: NDArray[np.bool_]  # [n]


class Encoder:
    """Tokenises passages (the texts of samples) and computes their loss masks."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, append_eos: bool = True) -> None:
        if append_eos and tokenizer.eos_token_id is None:
            raise UserError(
                "data.append_eos",
                "true, but the tokenizer has no end-of-sequence token",
                "set data.append_eos=false, or set eos_token in the tokenizer's files",
            )
        self._tokenizer = tokenizer
        self._beginning = _beginning(tokenizer)
        self._eos: int | None = tokenizer.eos_token_id if append_eos else None

    def encode(self, passages: Sequence[Passage]) -> list[Encoded | RowError]:
        """Encode passages with a single call of the tokenizer, which is several times as fast as one call for each.

        Return the tokens and loss mask of each passage, or a `RowError` if the passage cannot be encoded.
        """
        texts: list[str] = []
        firsts: list[int | RowError] = []
        for passage in passages:
            pieces = [piece.text for piece in passage.pieces]
            size = sum(map(len, pieces))
            if size > MOST_CHARACTERS:
                firsts.append(
                    RowError(
                        f"the text has {size:,} characters; expected at most {MOST_CHARACTERS:,}, so split the row"
                    )
                )
                continue
            firsts.append(len(texts))
            texts += ["".join(pieces)] if passage.joined else pieces
        batch = self._ids(texts) if texts else {}
        results: list[Encoded | RowError] = []
        for passage, first in zip(passages, firsts, strict=True):
            if isinstance(first, RowError):
                results.append(first)
            elif passage.joined:
                results.append(attempt(self._joined, passage, batch, first))
            else:
                results.append(self._apart(passage, batch["input_ids"][first : first + len(passage.pieces)]))
        return results

    def _ids(self, texts: list[str]) -> Any:
        return self._tokenizer(
            texts,
            add_special_tokens=False,
            padding=False,
            truncation=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )

    def _apart(self, passage: Passage, ids: Sequence[list[int]]) -> Encoded:
        parts = [] if passage.begun else [(self._beginning, passage.pieces[0].trained)]
        parts += [(part, piece.trained) for part, piece in zip(ids, passage.pieces, strict=True)]
        if self._eos is not None and ids[-1][-1:] != [self._eos]:
            parts.append(([self._eos], passage.pieces[-1].trained))
        return _concatenated(parts)

    def _joined(self, passage: Passage, batch: Any, index: int) -> Encoded:
        whole: list[int] = batch["input_ids"][index]
        borders = self._borders(passage, batch, index)
        if borders is not None:
            parts = [
                (whole[start:end], piece.trained)
                for piece, start, end in zip(passage.pieces, [0, *borders], [*borders, len(whole)], strict=True)
            ]
            return _concatenated(parts)
        cut = self._ids([piece.text for piece in passage.pieces])["input_ids"]
        if self._text([token for ids in cut for token in ids]) != self._text(whole):
            raise RowError(
                "one token spans the start or end of an assistant turn, and this tokenizer cannot tokenise the turn "
                "separately without changing the text; change the white space at the start of the answer, or set "
                "data.loss_on=all"
            )
        return _concatenated([(ids, piece.trained) for ids, piece in zip(cut, passage.pieces, strict=True)])

    def _borders(self, passage: Passage, batch: Any, index: int) -> list[int] | None:
        """Return where the second and all later pieces (trained or untrained parts) of a passage begin: token indices.

        Return None if a token spans two pieces or cannot be located. `index`: which text of `batch` is the passage.
        """
        if len(passage.pieces) > 1 and not self._tokenizer.is_fast:
            return None
        found: list[int] = []
        character = 0
        for piece in passage.pieces[:-1]:
            character += len(piece.text)
            before = batch.char_to_token(index, character - 1)
            after = batch.char_to_token(index, character)
            # char_to_token returns None for white space that the tokenizer does not assign to any token.
            if before is None or after is None or before == after:
                return None
            if batch.token_to_chars(index, after).start != character:
                return None
            found.append(after)
        return found

    def _text(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _concatenated(parts: Sequence[tuple[list[int], bool]]) -> Encoded:
    tokens = np.concatenate([np.asarray(ids, dtype=np.int32) for ids, _ in parts])
    loss_mask = np.repeat([trained for _, trained in parts], [len(ids) for ids, _ in parts])
    return Encoded(tokens, loss_mask)


def _beginning(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that the tokenizer adds before a text: `[bos]` or, if it adds none, `[]`."""
    plain: list[int] = tokenizer("a", add_special_tokens=False)["input_ids"]
    full: list[int] = tokenizer("a")["input_ids"]
    starts = [start for start in range(len(full)) if full[start : start + len(plain)] == plain]
    assert starts, f"{full} does not hold {plain}"
    return full[: starts[0]]
