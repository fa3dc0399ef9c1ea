"""Token ids to text while they are written.

    ids      "Gr"   c3   bc   "ße"        a character of several bytes may be spread over several tokens
    pieces   Gr     -    ü    ße          a piece ends where a character ends; joined they are the text of all ids

A decoder shows bytes that are not a whole character as U+FFFD. A text that ends with it waits for the next token. Only
the ids since the piece before the last one are decoded again, so that the cost does not grow with the length of the
text; they give the decoder its context (some decoders remove a space at the beginning of a text).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

INCOMPLETE = "\ufffd"


class TextStream:
    """Collects ids and returns the text that is complete."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._context = 0  # decoding begins here
        self._shown = 0  # ids whose text was returned

    def add(self, ids: Sequence[int]) -> str:
        """The text that these ids complete; "" if a character is still incomplete."""
        self._ids += [int(token) for token in ids]
        text = self._decode(self._ids[self._context :])
        if text.endswith(INCOMPLETE):
            return ""
        return self._returned(text)

    def end(self) -> str:
        """What is left: bytes that never became a character, as U+FFFD."""
        return self._returned(self._decode(self._ids[self._context :]))

    def _returned(self, text: str) -> str:
        before = self._decode(self._ids[self._context : self._shown])
        if len(self._ids) > self._shown:
            self._context, self._shown = self._shown, len(self._ids)
        return text[len(before) :]
