"""Decode token ids to text while they are generated.

    bytes of four tokens    "Gr"   c3   bc   "ße"      the character ü (c3 bc) is spread over two tokens
    returned texts          "Gr"   ""   "ü"  "ße"

A decoder shows an incomplete character as U+FFFD. The stream then waits for the next token. To keep the cost per token
constant, it decodes only the ids of the last returned text and the new ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

INCOMPLETE = "\ufffd"


class TextStream:
    """Collects token ids, and returns each character of their text as soon as its last byte has arrived."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._context = 0  # index of the first id to decode
        self._shown = 0  # number of ids whose text was returned

    def add(self, ids: Sequence[int]) -> str:
        """Add token ids, and return the text that was not returned before; "" if its last character is incomplete."""
        self._ids += [int(token) for token in ids]
        text = self._decode(self._ids[self._context :])
        if text.endswith(INCOMPLETE):
            return ""
        return self._returned(text)

    def end(self) -> str:
        """Return the remaining text. Bytes that do not form a whole character become U+FFFD."""
        return self._returned(self._decode(self._ids[self._context :]))

    def _returned(self, text: str) -> str:
        # Decode the last text again, because some decoders remove a space at the beginning of a text.
        before = self._decode(self._ids[self._context : self._shown])
        if len(self._ids) > self._shown:
            self._context, self._shown = self._shown, len(self._ids)
        return text[len(before) :]
