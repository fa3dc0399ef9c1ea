"""Turn chunks of rows into tokens and loss masks.

    columns            sample                                               trained tokens
    messages           the conversation rendered with the chat template     the assistant turns
    prompt, response   a rendered conversation, or two plain texts          the response
    text               the text                                             all
    input_ids          the tokens with these ids                            all, or those of `labels` or `loss_mask`
    chosen, rejected   two samples: the shared context with either answer   the answer

For SFT, `loss_on="all"` trains on all tokens. A row without a token to train on is a bad row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from padfree.data.chat_renderer import RenderedSample, chat_renderer
from padfree.data.conversation import Conversation, read_conversation
from padfree.data.data_settings import SFTDataSettings
from padfree.data.encode import Encoded, Encoder, Passage, Piece
from padfree.data.fields import Fields
from padfree.data.image_reader import ImageReader
from padfree.data.image_store import BadFile, ReadImage
from padfree.data.record_source import Chunk
from padfree.data.records import LARGEST, RowError, SkippedRow, attempt, items, shown, string, token_ids
from padfree.data.row_images import num_images
from padfree.data.rows import PlainPair, RowReader
from padfree.data.sources import record_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IGNORED = -100
"""The label of a token that is not trained, as in transformers."""


class TokenizedChunk(NamedTuple):
    tokens: NDArray[np.int32]  # [T] the samples end to end
    mask: NDArray[np.bool_]  # [T]
    lengths: NDArray[np.int64]  # [N]
    lines: NDArray[np.int64]  # [N] consecutive samples with the same line belong to one row
    numbers: NDArray[np.float64]  # [N] the number stored for the sample's row (a margin or a label); 0 if there is none
    skipped: list[SkippedRow]
    images: list[tuple[ReadImage, ...]]  # [N] the images of each sample
    bad_files: list[BadFile]  # files of images that made rows unusable


class RowTokenizer:
    """Turns chunks of rows into tokens. It is pickled and sent to the worker processes."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, settings: SFTDataSettings) -> None:
        self._settings = settings if settings.images is None else replace(settings, images=settings.images.for_rows())
        self._encoder = Encoder(tokenizer, append_eos=settings.append_eos)
        self._chat = chat_renderer(tokenizer, settings, day=settings.day)
        self.reader = RowReader(settings, renders_chat=self._chat is not None)
        self._images = None if settings.images is None else ImageReader(settings.images)

    @property
    def renders_chat(self) -> bool:
        return self._chat is not None

    @property
    def ends_turns(self) -> bool:
        """Whether the trained text of a turn ends with a special token. Without a chat template: True."""
        return self._chat is None or self._chat.turn_end != ""

    def __call__(self, chunk: Chunk, fields: Fields | None) -> TokenizedChunk:
        """Tokenise a chunk of rows. If `fields` is None, no row of the file can be parsed, and all rows are skipped."""
        rows: list[tuple[int, float, Sequence[_WithImages]]] = []
        skipped: list[SkippedRow] = []
        for line, record in zip(chunk.numbers, chunk.records, strict=True):
            try:
                row = record_of(record)
                assert fields is not None
                fields.check(row)
                whole_row = [self._shown(one, chunk.folder) for one in self._samples(row, fields)]
                rows.append((line, self._number(row, fields), whole_row))
            except RowError as error:
                skipped.append(SkippedRow(file=chunk.source, line=line, reason=str(error)))
        passages = [one for _, _, found in rows for one, _ in found if isinstance(one, Passage)]
        encoded = iter(self._encoder.encode(passages))
        samples: list[tuple[Encoded, int, float]] = []
        images: list[tuple[ReadImage, ...]] = []
        for line, number, found in rows:
            whole = [(next(encoded) if isinstance(one, Passage) else one, shown) for one, shown in found]
            reason = next((problem for one in whole if (problem := self._problem(*one)) is not None), None)
            if reason is not None:
                skipped.append(SkippedRow(file=chunk.source, line=line, reason=reason))
            else:
                samples += [(one, line, number) for one, _ in whole if isinstance(one, Encoded)]
                images += [shown for _, shown in whole]
        bad_files: list[BadFile] = []
        if self._images is not None:
            bad_files, self._images.bad_files = self._images.bad_files, bad_files
        nothing = np.empty(0, dtype=np.int32)
        return TokenizedChunk(
            tokens=np.concatenate([nothing, *(one.tokens for one, _, _ in samples)]),
            mask=np.concatenate([nothing.astype(np.bool_), *(one.loss_mask for one, _, _ in samples)]),
            lengths=np.array([len(one.tokens) for one, _, _ in samples], dtype=np.int64),
            lines=np.array([line for _, line, _ in samples], dtype=np.int64),
            numbers=np.array([number for _, _, number in samples], dtype=np.float64),
            skipped=sorted(skipped, key=lambda row: row.line),
            images=images,
            bad_files=bad_files,
        )

    def expanded(self, conversation: Conversation, sample: RenderedSample, folder: str | None) -> RenderedSample:
        """Return a rendered sample in which each image marker is replaced by the placeholder tokens of its image.

        Relative image paths are resolved against `folder`.
        """
        if self._images is None:
            return sample
        passage, images = self._images.expanded(passage_of(conversation, sample), folder)
        marker, starts = self._images.settings.processor.marker, [0]
        for _ in images:
            starts.append(sample.text.index(marker, starts[-1]) + len(marker))
        added = [len(image.expansion.text) - len(marker) for image in images]

        def moved(offset: int) -> int:
            return offset + sum(more for start, more in zip(starts[1:], added, strict=True) if start <= offset)

        spans = tuple((moved(start), moved(end)) for start, end in sample.spans)
        messages = tuple((index, (moved(start), moved(end))) for index, (start, end) in sample.messages)
        text = "".join(piece.text for piece in passage.pieces)
        return replace(sample, text=text, spans=spans, messages=messages)

    def _shown(self, sample: Passage | Encoded, folder: str | None) -> _WithImages:
        """Read the images of a sample. Return the sample with placeholder tokens for its images, and the images.

        Relative image paths are resolved against `folder`.
        """
        if self._images is None or isinstance(sample, Encoded):
            return sample, ()
        return self._images.expanded(sample, folder)

    def _problem(self, encoded: Encoded | RowError, images: tuple[ReadImage, ...]) -> str | None:
        """Return why a row cannot be used, e.g. because no token is trained; None if the row can be used."""
        if isinstance(encoded, RowError):
            return str(encoded)
        if self._images is not None and (problem := self._images.problem(encoded.tokens, images)) is not None:
            return problem
        if not encoded.loss_mask[1:].any():
            return (
                f"has {len(encoded.tokens)} tokens and none to train on; expected a trained token after the first token"
            )
        return None

    def _number(self, row: Mapping[str, Any], fields: Fields) -> float:
        """Return the number that is stored with the samples of a row, or 0 if the task needs no number.

        It is the margin of a preference pair (`padfree reward`), or the label of an answer (`padfree kto`).
        """
        return 0.0

    def _samples(self, row: Mapping[str, Any], fields: Fields) -> Sequence[Passage | Encoded]:
        """Return one or more samples of a row, as texts to tokenise or as the token ids that the row holds."""
        if fields.kind == "text":
            return [Passage(pieces=(Piece(string(row, fields["text"]), True),))]
        if fields.kind == "tokens":
            return [given_tokens(row, fields, everything=self._settings.loss_on == "all")]
        if self._chat is not None:
            return [passage_of(conversation, sample) for conversation, sample in self.rendered(row, fields)]
        prompt, response = self.reader.plain_prompt(row, fields), string(row, fields["response"])
        return [Passage(pieces=(Piece(prompt, self._settings.loss_on == "all"), Piece(response, True)))]

    def rendered(self, row: Mapping[str, Any], fields: Fields) -> list[tuple[Conversation, RenderedSample]]:
        """Return the samples that the chat template renders from a row, each with its conversation.

        The list is empty if the row has plain text or token ids, which need no chat template.
        """
        if self._chat is None or fields.kind in ("text", "tokens"):
            return []
        read = self.reader.conversation if fields.kind == "messages" else self.reader.completed
        found = read(row, fields)
        samples = self._chat.samples(found, loss_on=self._settings.loss_on, turns=self._settings.turns)
        return [(found, sample) for sample in samples]


_WithImages = tuple[Passage | Encoded, tuple[ReadImage, ...]]


def passage_of(conversation: Conversation, sample: RenderedSample) -> Passage:
    """Return a rendered sample as a `Passage` (trained and untrained texts), with the images of its messages."""
    shown = conversation.images[: num_images(conversation.messages[: sample.stop])]
    return Passage.of_spans(sample.text, sample.spans, shown)


def given_tokens(row: Mapping[str, Any], fields: Fields, *, everything: bool = False) -> Encoded:
    """Return the token ids of a row, without the padding that `attention_mask` marks, and their loss mask.

    The column `labels` or `loss_mask` decides which tokens are trained. Without these columns, or if `everything` is
    True, all tokens are trained.
    """
    tokens = np.array(token_ids(row, fields["input_ids"]), dtype=np.int32)
    trained = np.ones(len(tokens), dtype=np.bool_)
    labels, mask = row.get(fields["labels"]), row.get(fields["loss_mask"])
    if labels is not None and mask is not None:
        raise RowError(f"has both {fields['labels']!r} and {fields['loss_mask']!r}; keep one of them")
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
            raise RowError(f"{column}[{gap}] is 0 between entries of 1; expected 0 only for padding at the two ends")
        if labels is not None and trained[~seen].any():
            where = int(np.flatnonzero(trained & ~seen)[0])
            raise RowError(f"{column}[{where}] is 0, but the token has a label; give padding the label {IGNORED}")
        tokens, trained = tokens[seen], trained[seen]
    fields.check_uniform(row)
    return Encoded(tokens, np.ones_like(trained) if everything else trained)


def _labelled(row: Mapping[str, Any], column: str, tokens: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Return a mask [n] that is True for tokens with a label.

    Labels are not shifted: the label of a trained token must be the token's own id.
    """
    labels = items(row, column, "a list of labels")
    if len(labels) != len(tokens):
        raise RowError(f"{column!r} has {len(labels)} entries; expected {len(tokens)}, one per token")
    for index, label in enumerate(labels):
        if type(label) is not int or label not in (IGNORED, tokens[index]):
            raise RowError(
                f"{column}[{index}] is {shown(label)}; expected the token's own id, {tokens[index]}, or {IGNORED} "
                "(labels must not be shifted)"
            )
    return np.array([label != IGNORED for label in labels], dtype=np.bool_)


def _zeros_and_ones(row: Mapping[str, Any], column: str, length: int) -> NDArray[np.bool_]:
    values = items(row, column, "a list of 0 and 1")
    if len(values) != length:
        raise RowError(f"{column!r} has {len(values)} entries; expected {length}, one per token")
    for index, value in enumerate(values):
        if not isinstance(value, int) or value not in (0, 1):
            raise RowError(f"{column}[{index}] is {shown(value)}; expected 0 or 1")
    return np.array(values, dtype=np.bool_)


class PairTokenizer(RowTokenizer):
    """Turns a row with two answers into two samples: the context with the chosen answer, and with the rejected one."""

    def _samples(self, row: Mapping[str, Any], fields: Fields) -> Sequence[Passage | Encoded]:
        found = self.reader.pair(row, fields)
        if isinstance(found, PlainPair):
            answers = found.chosen, found.rejected
            return [Passage(pieces=(Piece(found.prompt, False), Piece(answer, True))) for answer in answers]
        columns = fields["chosen"], fields["rejected"]
        chosen, rejected = (self._answered(one, column) for one, column in zip(found, columns, strict=True))
        if chosen.pieces[0] != rejected.pieces[0]:
            raise RowError(
                f"the chat template renders the context of {columns[0]!r} and {columns[1]!r} differently; set "
                "data.chat_template to a template that renders the same text before both answers"
            )
        return [chosen, rejected]

    def _answered(self, conversation: Conversation, column: str) -> Passage:
        assert self._chat is not None
        samples = self._chat.samples(conversation, loss_on="assistant", turns="auto")
        if len(samples) != 1:
            raise RowError(
                f"{column!r} has {len(samples)} assistant turns, and the chat template changes earlier turns; give an "
                "answer of one turn"
            )
        return passage_of(conversation, samples[0])

    def answers(self, rows: Sequence[tuple[Any, str]]) -> list[Encoded | RowError]:
        """Tokenise pairs (prompt, answer) in the same way as the answers of preference rows.

        A prompt is a text, a list of messages or a conversation.
        """
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
    """Like `PairTokenizer`, for rows that may have a `margin`.

    The margin says by how much the score of the chosen answer should exceed that of the rejected one.
    """

    def _number(self, row: Mapping[str, Any], fields: Fields) -> float:
        column = fields["margin"]
        value = row.get(column)
        if value is None:
            return 0.0
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not -LARGEST < value < LARGEST:
            raise RowError(f"{column!r} is {shown(value)}; expected a finite number")
        return float(value)
