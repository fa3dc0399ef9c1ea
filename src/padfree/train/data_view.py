"""Data rows as the model sees them: the output of `padfree data show`.

    sample     <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n | Hello<|im_end|> | \\n
    trained    no                                                       | yes            | no

In this example, only the assistant's message and its end token are trained. The samples are loaded as in a run, with
the same settings. The text shown is decoded from their tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from padfree.config import DataConfig
from padfree.data.chat_renderer import RenderedSample
from padfree.data.conversation import Conversation
from padfree.data.data_settings import SFTDataSettings
from padfree.data.formats import SFT_SCHEMA, reading_images
from padfree.data.image_processor import ImageSettings
from padfree.data.record_source import resolve_source
from padfree.data.records import labelled
from padfree.data.sources import open_sources, record_of
from padfree.data.tokenize import RowTokenizer
from padfree.errors import UserError
from padfree.images import Image
from padfree.rollout import Prompt
from padfree.sample import Sample
from padfree.tasks.reading import TrainingData, text_settings


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownPart:
    """A stretch of consecutive tokens of a sample that are either all trained or all untrained."""

    text: str
    trained: bool
    num_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownMessage:
    """The tokens of a sample that hold the text of one message: indices `first` (included) to `end` (excluded)."""

    number: int  # number of the message in the row, counted from 1
    role: str
    first: int
    end: int
    num_trained: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownSample:
    """One sample of a data row, in the form in which `padfree data show` prints it.

    If the policy generates the samples, the data holds prompts, and each prompt counts as a sample.
    """

    name: str
    parts: tuple[ShownPart, ...]
    messages: tuple[ShownMessage, ...] = ()
    facts: Mapping[str, Any]  # further lines to show, e.g. the reward, or the maximum length of a response

    @property
    def num_tokens(self) -> int:
        return sum(part.num_tokens for part in self.parts)

    @property
    def num_trained(self) -> int:
        return sum(part.num_tokens for part in self.parts if part.trained)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownRow:
    """A row of a data file, and the samples that a run makes from this row."""

    place: str
    samples: tuple[ShownSample, ...]


def shown_rows(
    data: DataConfig,
    source: TrainingData,
    tokenizer: Any,
    *,
    turns: bool,
    first: str | int = 1,
    count: int = 1,
    images: ImageSettings | None = None,
) -> list[ShownRow]:
    """Return `count` rows, starting at row `first`, which is a number counted from 1, or `file:line`.

    `turns`: whether rows are conversations. `images`: how the images of rows are read; None if rows have no images.
    """
    rows = _rows(source)
    begin = _row_index(rows, first)
    chosen = rows[begin : begin + count]
    rendered = _rendered(data, {place for place, _ in chosen}, tokenizer, images) if turns else {}
    return [
        ShownRow(
            place=place,
            samples=tuple(
                _sample(source.samples[index], tokenizer, place, rendered.get(place, ())) for index in indices
            ),
        )
        for place, indices in chosen
    ]


def _rows(source: TrainingData) -> list[tuple[str, list[int]]]:
    """Return the data rows from which samples were made: `file:line` of each row, and the indices of its samples."""
    found: list[tuple[str, list[int]]] = []
    for index in range(len(source.samples)):
        place = _row_of(source.place(index))
        if found and found[-1][0] == place:
            found[-1][1].append(index)
        else:
            found.append((place, [index]))
    return found


def _row_of(place: str) -> str:
    """Remove a turn number from the place of a sample: "train.jsonl:17 turn 2" becomes "train.jsonl:17"."""
    before, turn, number = place.rpartition(" turn ")
    return before if turn and number.isdigit() else place


def _row_index(rows: Sequence[tuple[str, list[int]]], first: str | int) -> int:
    text = str(first)
    if text.isascii() and text.isdigit():
        if not 1 <= int(text) <= len(rows):
            raise UserError(
                "--row",
                f"{text} is not the number of a row that the run uses",
                f"give a number from 1 to {len(rows)}, or a file and line such as {rows[0][0]}",
            )
        return int(text) - 1
    names = [place for place, _ in rows]
    if text not in names:
        raise UserError(
            "--row",
            f"{text} is not among the {len(rows)} rows that the run uses",
            f"give a number from 1 to {len(rows)}, or a file and line such as {rows[0][0]}",
        )
    return names.index(text)


def _sample(sample: Sample | Prompt, tokenizer: Any, place: str, rendered: Sequence[_RenderedTokens]) -> ShownSample:
    if isinstance(sample, Prompt):
        mask = np.zeros(len(sample.tokens), np.bool_)
        facts: dict[str, Any] = {"response": f"at most {sample.max_new_tokens} tokens, written by the model"}
        return ShownSample(name=sample.uid, parts=_parts(sample.tokens, mask, tokenizer, sample.images), facts=facts)
    facts = {
        name: value
        for name in ("reward", "raw_reward", "group")
        if (value := getattr(sample, name)) is not None and value != place
    }
    return ShownSample(
        name=str(sample.uid),
        parts=_parts(sample.tokens, sample.mask, tokenizer, sample.images),
        messages=_messages(sample, rendered),
        facts=facts,
    )


def _parts(
    tokens: NDArray[np.integer[Any]], mask: NDArray[np.bool_], tokenizer: Any, images: Sequence[Image] = ()
) -> tuple[ShownPart, ...]:
    """Divide a sample into parts: stretches of tokens that are all trained or all untrained.

    The placeholder tokens of an image become one part with a short description of the image.
    """
    if images:
        found: list[ShownPart] = []
        done = 0
        for number, image in enumerate(images, 1):
            first, end = int(image.positions[0]), int(image.positions[-1]) + 1
            found += _parts(tokens[done:first], mask[done:first], tokenizer)
            text = f"[image {number}: {image.load}, {len(image.positions)} tokens]"
            found.append(ShownPart(text=text, trained=bool(mask[first]), num_tokens=end - first))
            done = end
        return (*found, *_parts(tokens[done:], mask[done:], tokenizer))
    borders = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(tokens)]
    if tokenizer is None:
        texts = [" ".join(map(str, tokens[a:b].tolist())) for a, b in pairwise(borders)]
    else:
        # Decode from the beginning of the sample, because a tokenizer may drop a part's leading space otherwise.
        whole = [_decoded(tokenizer, tokens[:border]) for border in borders]
        texts = [after[len(before) :] for before, after in pairwise(whole)]
    return tuple(
        ShownPart(text=text, trained=bool(mask[a]), num_tokens=b - a)
        for text, (a, b) in zip(texts, pairwise(borders), strict=True)
        if b > a
    )


def _decoded(tokenizer: Any, tokens: NDArray[np.integer[Any]]) -> str:
    return str(tokenizer.decode(tokens.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _rendered(
    data: DataConfig, places: set[str], tokenizer: Any, images: ImageSettings | None
) -> dict[str, list[_RenderedTokens]]:
    """Return the rendered samples of the rows at `places` (`file:line`).

    The result is empty if the rows are not conversations, or if the tokenizer gives no character offsets.
    """
    found: dict[str, list[_RenderedTokens]] = {}
    if tokenizer is None or not tokenizer.is_fast:
        return found
    schema = SFT_SCHEMA if images is None else reading_images(SFT_SCHEMA)
    for label, own in _source_settings(data):
        settings = SFTDataSettings(loss_on=own.loss_on, **text_settings(own, images=images))
        tokenize = RowTokenizer(tokenizer, settings)
        for source in open_sources(list(own.path), split=settings.split, subset=settings.subset):
            name = source.name if label is None else labelled(label, source.name)
            lines = {int(line) for file, _, line in (place.rpartition(":") for place in places) if file == name}
            names, mapping, on_bad_row = tokenize.reader.template_names, settings.columns, settings.on_bad_row
            read = resolve_source(source, mapping, schema, names, on_bad_row=on_bad_row) if lines else None
            if read is None:
                continue
            for chunk in source.chunks(read[1].needed):
                for line, record in zip(chunk.numbers, chunk.records, strict=True):
                    if line in lines:
                        rendered = tokenize.rendered(record_of(record), read[1])
                        found[f"{name}:{line}"] = [
                            _tokens(conversation, tokenize.expanded(conversation, one, source.folder), tokenizer)
                            for conversation, one in rendered
                        ]
                        lines.remove(line)
                if not lines:
                    break
    return found


def _source_settings(data: DataConfig) -> list[tuple[str | None, DataConfig]]:
    """Return the name and the data settings of each source of a mixture.

    Without a mixture, the list has one entry: the name None and the settings of `[data]`.
    """
    if not data.sources:
        return [(None, data)]
    return [(source.label, data.of_source(source)) for source in data.sources]


class _RenderedTokens(NamedTuple):
    """A rendered sample of a conversation, its token ids [n], and the start and end of each token in its text."""

    conversation: Conversation
    sample: RenderedSample
    tokens: list[int]
    offsets: NDArray[np.int64]  # [n, 2]


def _tokens(conversation: Conversation, sample: RenderedSample, tokenizer: Any) -> _RenderedTokens:
    encoded = tokenizer(sample.text, add_special_tokens=False, return_offsets_mapping=True)
    offsets = np.array(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
    return _RenderedTokens(conversation, sample, encoded["input_ids"], offsets)


def _messages(sample: Sample, rendered: Sequence[_RenderedTokens]) -> tuple[ShownMessage, ...]:
    """Return the range of tokens of each message of `sample`. `rendered`: the rendered samples of its row."""
    tokens = sample.tokens.tolist()
    for conversation, one, ids, offsets in rendered:
        if ids[: len(tokens)] != tokens:
            continue
        offsets = offsets[: len(tokens)]
        found = []
        for index, (start, end) in one.messages:
            inside = np.flatnonzero((offsets[:, 0] < end) & (offsets[:, 1] > start))
            if len(inside):
                first, last = int(inside[0]), int(inside[-1]) + 1
                trained = int(sample.mask[first:last].sum())
                role = conversation.messages[index]["role"]
                found.append(ShownMessage(number=index + 1, role=role, first=first, end=last, num_trained=trained))
        return tuple(found)
    return ()
