"""Chunks of rows to tokens and masks.

What a row becomes, and what of it is trained on:

    messages           the conversation through the chat template; the assistant's turns. One sample, or one for each
                       turn if the template changes earlier turns (`turns`)
    prompt, response   the same; the response. Without a template: prompt and response as they are, each tokenised by
                       itself, eos behind; response and eos
    text               the text as it is, eos behind; everything
    input_ids          these ids; those with a label, or all
    chosen, rejected   two samples: the context that both share, with either answer; the answer

With `loss_on` "all" everything is trained on. A row that leaves nothing to train on is a bad row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from padfree.data.chat_renderer import RenderedSample, chat_renderer
from padfree.data.conversation import Conversation, read_conversation
from padfree.data.data_settings import SFTDataSettings
from padfree.data.encode import Encoded, Encoder, Passage, Piece
from padfree.data.fields import Fields
from padfree.data.records import LARGEST, RowError, SkippedRow, attempt, items, shown, string, token_ids
from padfree.data.rows import PlainPair, RowReader
from padfree.data.sources import Chunk, record_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IGNORED = -100
"""The label of a token that is not trained on, as in transformers."""


class TokenizedChunk(NamedTuple):
    tokens: NDArray[np.int32]  # [T] the samples end to end
    mask: NDArray[np.bool_]  # [T]
    lengths: NDArray[np.int64]  # [N]
    lines: NDArray[np.int64]  # [N]; consecutive samples of one line are of one row
    numbers: NDArray[np.float64]  # [N] that of its row; 0 where a row has none
    skipped: list[SkippedRow]


class RowTokenizer:
    """A tokenizer and settings: chunks to tokens. It is pickled and sent to the processes."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, settings: SFTDataSettings) -> None:
        self._settings = settings
        self._encoder = Encoder(tokenizer, append_eos=settings.append_eos)
        self._chat = chat_renderer(tokenizer, settings, day=settings.day)
        self.reader = RowReader(settings, renders_chat=self._chat is not None)

    @property
    def renders_chat(self) -> bool:
        return self._chat is not None

    def __call__(self, chunk: Chunk, fields: Fields | None) -> TokenizedChunk:
        """`fields` is None for a file of which no row could be read, so that here none will be read either."""
        rows: list[tuple[int, float, Sequence[Passage | Encoded]]] = []
        skipped: list[SkippedRow] = []
        for line, record in zip(chunk.numbers, chunk.records, strict=True):
            try:
                row = record_of(record)
                assert fields is not None
                fields.check(row)
                rows.append((line, self._number(row, fields), self._samples(row, fields)))
            except RowError as error:
                skipped.append(SkippedRow(file=chunk.source, line=line, reason=str(error)))
        passages = [one for _, _, found in rows for one in found if isinstance(one, Passage)]
        encoded = iter(self._encoder.encode(passages))
        samples: list[tuple[Encoded, int, float]] = []
        for line, number, found in rows:
            whole = [next(encoded) if isinstance(one, Passage) else one for one in found]
            reason = next((problem for one in whole if (problem := _problem(one)) is not None), None)
            if reason is not None:
                skipped.append(SkippedRow(file=chunk.source, line=line, reason=reason))
            else:
                samples += [(one, line, number) for one in whole if isinstance(one, Encoded)]
        nothing = np.empty(0, dtype=np.int32)
        return TokenizedChunk(
            tokens=np.concatenate([nothing, *(one.tokens for one, _, _ in samples)]),
            mask=np.concatenate([nothing.astype(np.bool_), *(one.loss_mask for one, _, _ in samples)]),
            lengths=np.array([len(one.tokens) for one, _, _ in samples], dtype=np.int64),
            lines=np.array([line for _, line, _ in samples], dtype=np.int64),
            numbers=np.array([number for _, _, number in samples], dtype=np.float64),
            skipped=sorted(skipped, key=lambda row: row.line),
        )

    def _number(self, row: Mapping[str, Any], fields: Fields) -> float:
        """What is stored besides the tokens of a row, where its schema has a `number`."""
        return 0.0

    def _samples(self, row: Mapping[str, Any], fields: Fields) -> Sequence[Passage | Encoded]:
        """The samples that a row makes, one or more."""
        if fields.kind == "text":
            return [Passage(pieces=(Piece(string(row, fields["text"]), True),))]
        if fields.kind == "tokens":
            return [given_tokens(row, fields, everything=self._settings.loss_on == "all")]
        if self._chat is not None:
            return [Passage.of_spans(sample.text, sample.spans) for _, sample in self.rendered(row, fields)]
        prompt, response = self.reader.plain_prompt(row, fields), string(row, fields["response"])
        return [Passage(pieces=(Piece(prompt, self._settings.loss_on == "all"), Piece(response, True)))]

    def rendered(self, row: Mapping[str, Any], fields: Fields) -> list[tuple[Conversation, RenderedSample]]:
        """The samples that the chat template makes of a row, each with its conversation; none of a plain row."""
        if self._chat is None or fields.kind in ("text", "tokens"):
            return []
        read = self.reader.conversation if fields.kind == "messages" else self.reader.completed
        found = read(row, fields)
        samples = self._chat.samples(found, loss_on=self._settings.loss_on, turns=self._settings.turns)
        return [(found, sample) for sample in samples]


def given_tokens(row: Mapping[str, Any], fields: Fields, *, everything: bool = False) -> Encoded:
    """Token ids of a row as they are, without what `attention_mask` calls padding. `everything` is trained on, or what
    `labels` or `loss_mask` says; all without them.
    """
    tokens = np.array(token_ids(row, fields["input_ids"]), dtype=np.int32)
    trained = np.ones(len(tokens), dtype=np.bool_)
    labels, mask = row.get(fields["labels"]), row.get(fields["loss_mask"])
    if labels is not None and mask is not None:
        raise RowError(f"{fields['labels']!r} and {fields['loss_mask']!r}; expected one of them")
    if labels is not None:
        trained = _labelled(row, fields["labels"], tokens)
    elif mask is not None:
        trained = _zeros_and_ones(row, fields["loss_mask"], len(tokens))
    if row.get(fields["attention_mask"]) is not None:
        column = fields["attention_mask"]
        seen = _zeros_and_ones(row, column, len(tokens))
        places = np.flatnonzero(seen)
        if len(places) and len(places) != places[-1] - places[0] + 1:
            gap = int(places[0] + np.argmin(seen[places[0] :]))
            raise RowError(f"{column}[{gap}] is 0 between tokens; expected 0 for padding at the ends only")
        if labels is not None and trained[~seen].any():
            where = int(np.flatnonzero(trained & ~seen)[0])
            raise RowError(f"{column}[{where}] is 0, and the token has a label; expected {IGNORED} for padding")
        tokens, trained = tokens[seen], trained[seen]
    return Encoded(tokens, np.ones_like(trained) if everything else trained)


def _labelled(row: Mapping[str, Any], column: str, tokens: NDArray[np.int32]) -> NDArray[np.bool_]:
    """[n] whether a token has a label, which is the token itself: labels are not shifted."""
    labels = items(row, column, "a list of labels")
    if len(labels) != len(tokens):
        raise RowError(f"{column!r} has {len(labels)} entries; expected {len(tokens)}, one a token")
    for index, label in enumerate(labels):
        if type(label) is not int or label not in (IGNORED, tokens[index]):
            raise RowError(
                f"{column}[{index}] is {shown(label)}; expected the token's own id, {tokens[index]}, or {IGNORED} "
                "(labels that are not shifted)"
            )
    return np.array([label != IGNORED for label in labels], dtype=np.bool_)


def _zeros_and_ones(row: Mapping[str, Any], column: str, length: int) -> NDArray[np.bool_]:
    values = items(row, column, "a list of 0 and 1")
    if len(values) != length:
        raise RowError(f"{column!r} has {len(values)} entries; expected {length}, one a token")
    for index, value in enumerate(values):
        if not isinstance(value, int) or value not in (0, 1):
            raise RowError(f"{column}[{index}] is {shown(value)}; expected 0 or 1")
    return np.array(values, dtype=np.bool_)


def _problem(encoded: Encoded | RowError) -> str | None:
    """Why there is no sample; None: there is one."""
    if isinstance(encoded, RowError):
        return str(encoded)
    if not encoded.loss_mask[1:].any():
        return f"{len(encoded.tokens)} tokens and none to train on; expected a token with another before it"
    return None


class PairTokenizer(RowTokenizer):
    """Rows of two answers to two samples each: the context that the answers share, with either of them."""

    def _samples(self, row: Mapping[str, Any], fields: Fields) -> Sequence[Passage | Encoded]:
        found = self.reader.pair(row, fields)
        if isinstance(found, PlainPair):
            answers = found.chosen, found.rejected
            return [Passage(pieces=(Piece(found.prompt, False), Piece(answer, True))) for answer in answers]
        columns = fields["chosen"], fields["rejected"]
        chosen, rejected = (self._answered(one, column) for one, column in zip(found, columns, strict=True))
        if chosen.pieces[0] != rejected.pieces[0]:
            raise RowError(
                f"the chat template shows the context of {columns[0]!r} and of {columns[1]!r} differently; expected "
                "the same text before both answers"
            )
        return [chosen, rejected]

    def _answered(self, conversation: Conversation, column: str) -> Passage:
        assert self._chat is not None
        samples = self._chat.samples(conversation, loss_on="assistant", turns="auto")
        if len(samples) != 1:
            raise RowError(
                f"{column!r} has {len(samples)} assistant turns, and the chat template changes earlier ones; expected "
                "an answer of one turn"
            )
        return Passage.of_spans(samples[0].text, samples[0].spans)

    def answers(self, rows: Sequence[tuple[Any, str]]) -> list[Encoded | RowError]:
        """Prompts (texts, messages or conversations) with an answer each, as `__call__` makes samples of pairs."""
        passages = [attempt(self._answer_to, prompt, answer) for prompt, answer in rows]
        encoded = iter(self._encoder.encode([one for one in passages if isinstance(one, Passage)]))
        return [next(encoded) if isinstance(one, Passage) else one for one in passages]

    def _answer_to(self, prompt: Any, answer: str) -> Passage:
        if self._chat is None:
            return Passage(pieces=(Piece(string({"prompt": prompt}, "prompt"), False), Piece(answer, True)))
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        asked = prompt if isinstance(prompt, Conversation) else read_conversation(prompt, "prompt")
        earlier = frozenset(index for index, message in enumerate(asked.messages) if message["role"] == "assistant")
        whole = (*asked.messages, {"role": "assistant", "content": answer})
        return self._answered(Conversation(messages=whole, tools=asked.tools, untrained=earlier), "response")


class RewardTokenizer(PairTokenizer):
    """The same rows, which may have a `margin`: by how much the chosen answer should score more."""

    def _number(self, row: Mapping[str, Any], fields: Fields) -> float:
        column = fields["margin"]
        value = row.get(column)
        if value is None:
            return 0.0
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not -LARGEST < value < LARGEST:
            raise RowError(f"{column!r} is {shown(value)}; expected a finite number")
        return float(value)
