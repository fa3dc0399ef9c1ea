"""Read files of prompts: tokens for the sampler, and the data row for the reward.

    {"question": "What is 2+2?", "answer": "4"}
    Prompt(tokens=[...], max_new_tokens=256, row={"question": ..., "answer": "4", "prompt": ...}, uid="train.jsonl:1")

A row has a `prompt`, or `messages` that end before the assistant's turn. `Prompt.row` keeps all columns, because the
reward may need them. A column that is mapped to a field has two names, such as `question` and `prompt` above.

The setting `data.overlong` decides what happens if the prompt tokens plus `max_new_tokens` exceed `data.max_length`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from padfree.data.chat_renderer import ChatRenderer, chat_renderer
from padfree.data.conversation import Conversation, Message
from padfree.data.data_settings import RolloutDataSettings
from padfree.data.encode import Encoded, Encoder, Passage, Piece
from padfree.data.fields import Fields, check_mapping
from padfree.data.formats import PROMPT_SCHEMA, described, reading_images, reading_notes
from padfree.data.image_reader import ImageReader
from padfree.data.image_store import ReadImage, images_of
from padfree.data.record_source import Chunk, resolve_source
from padfree.data.records import DataReport, RowError, SkippedRow, attempt, bad_row
from padfree.data.rows import RowReader
from padfree.data.sources import open_sources, record_of
from padfree.errors import UserError
from padfree.images import Image
from padfree.sample import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Prompt:
    """A prompt, for which responses are sampled. `len(prompt)` is the number of its tokens plus `max_new_tokens`."""

    tokens: NDArray[np.integer[Any]]  # [n]
    max_new_tokens: int  # maximum length of a response
    row: Mapping[str, Any]
    uid: str
    source: str
    asked: str | Conversation | None = None  # the prompt before rendering, for reward models with their own template
    images: tuple[Image, ...] = ()
    rotary_positions: NDArray[np.int64] | None = None  # [P, n] if they are not 0, 1, 2, ...: `padfree.model.vision`

    def __len__(self) -> int:
        return len(self.tokens) + self.max_new_tokens

    def rotary_positions_of(self, length: int) -> NDArray[np.int64] | None:
        """Return the rotary positions [P, length], in P dimensions, of the prompt and its response.

        In text, the positions go up by 1 per token in all dimensions. Return None if they are 0, 1, 2, and so on.
        """
        if self.rotary_positions is None:
            return None
        steps = np.arange(1, length - len(self.tokens) + 1)
        return np.concatenate([self.rotary_positions, self.rotary_positions[:, -1:] + steps], axis=1)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Prompts:
    """The prompts of files, in the order of the rows, and a report about skipped, dropped and truncated rows."""

    prompts: Sequence[Prompt]
    report: DataReport
    notes: tuple[str, ...] = ()  # how the files were read


def read_prompts(
    data: str | Path | Iterable[str | Path],
    tokenizer: PreTrainedTokenizerBase,
    settings: RolloutDataSettings | None = None,
    *,
    max_new_tokens: int,
) -> Prompts:
    """Read prompts from files, folders of files, or a data set of the Hub.

    `max_new_tokens`: the maximum number of tokens of a response.
    """
    settings = settings or RolloutDataSettings()
    schema = PROMPT_SCHEMA if settings.images is None else reading_images(PROMPT_SCHEMA)
    check_mapping(settings.columns, schema)
    reader = _Reader(tokenizer, settings)
    collected = _CollectedPrompts(settings, max_new_tokens)
    files: list[dict[str, str]] = []
    for source in open_sources(data, split=settings.split, subset=settings.subset):
        found = resolve_source(source, settings.columns, schema, reader.template_names, on_bad_row=settings.on_bad_row)
        first, fields = found or ({}, None)
        if fields is not None:
            how = "through the chat template" if reader.renders_chat else "as plain text"
            files.append({"name": source.name, "read_as": f"{described(fields, first, schema)}; {how}"})
        if fields is not None and fields.kind == "messages" and not reader.renders_chat:
            raise UserError(
                "data.prompt_format",
                f"uses no chat template, but the column {fields['messages']!r} of {source.name} needs one",
                "set data.prompt_format=chat, and data.chat_template if the tokenizer has no template",
                value=settings.prompt_format,
            )
        collected.rows_per_file[source.name] = 0
        for chunk in source.chunks(tuple(first)):
            collected.rows_per_file[source.name] += len(chunk.numbers)
            # If no row of the file can be parsed, its fields are unknown. The errors of the rows are reported anyway.
            results = reader.read(chunk, fields or Fields(kind="prompt", columns={}))
            for line, result in zip(chunk.numbers, results, strict=True):
                collected.add(result, source.name, line, source.unit)
        source.check_unchanged()
    return collected.prompts(reading_notes(files))


@dataclass(frozen=True, slots=True, eq=False)
class _PromptRead:
    tokens: NDArray[np.int32]
    row: dict[str, Any]
    asked: str | Conversation
    images: tuple[Image, ...]
    rotary_positions: NDArray[np.int64] | None


class _Reader:
    """Tokenises the rows of prompt files."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, settings: RolloutDataSettings) -> None:
        self._encoder = Encoder(tokenizer, append_eos=False)
        self._chat: ChatRenderer | None = chat_renderer(tokenizer, settings, day=settings.day)
        self._rows = RowReader(settings, renders_chat=self.renders_chat)
        self._images = None if settings.images is None else ImageReader(settings.images)
        self._prepare = None if settings.images is None else settings.images.prepare

    @property
    def renders_chat(self) -> bool:
        return self._chat is not None

    @property
    def template_names(self) -> tuple[str, ...]:
        return self._rows.template_names

    def read(self, chunk: Chunk, fields: Fields) -> list[_PromptRead | RowError]:
        """Return, for each row of a chunk, its prompt or an error. The order is that of the rows."""
        rows = [attempt(record_of, record) for record in chunk.records]
        asked = [row if isinstance(row, RowError) else attempt(self._asked, row, fields) for row in rows]
        shown = [one if isinstance(one, RowError) else attempt(self._shown, one, chunk.folder) for one in asked]
        encoded = iter(self._encoder.encode([one[0] for one in shown if not isinstance(one, RowError)]))
        results: list[_PromptRead | RowError] = []
        for row, prompt, one in zip(rows, asked, shown, strict=True):
            found = one if isinstance(one, RowError) else next(encoded)
            if isinstance(row, RowError) or isinstance(prompt, RowError) or isinstance(found, RowError):
                results.append(RowError(str(found)))
            elif not len(found.tokens):
                results.append(RowError(f"{fields[fields.kind]!r} has no tokens; expected one or more"))
            else:
                named = {field: row[column] for field, column in fields.columns.items() if column in row}
                assert not isinstance(one, RowError)
                placed = attempt(self._placed, found, one[1])
                results.append(
                    placed
                    if isinstance(placed, RowError)
                    else _PromptRead(found.tokens, {**row, **named}, prompt, *placed)
                )
        return results

    def _asked(self, row: dict[str, Any], fields: Fields) -> str | Conversation:
        fields.check(row)
        if self._chat is None:
            return self._rows.plain_prompt(row, fields)
        read = self._rows.conversation if fields.kind == "messages" else self._rows.prompt
        found = read(row, fields)
        _check_last(found.messages, fields[fields.kind])
        return found

    def _shown(self, asked: str | Conversation, folder: str | None) -> tuple[Passage, tuple[ReadImage, ...]]:
        """Read the images of a prompt. Return the text with placeholders for the images, and the images.

        `folder`: relative image paths start from this folder.
        """
        if isinstance(asked, str):
            return Passage(pieces=(Piece(asked, False),)), ()
        assert self._chat is not None
        passage = Passage(pieces=(Piece(self._chat.prompt(asked), False),), begun=True, images=asked.images)
        return (passage, ()) if self._images is None else self._images.expanded(passage, folder)

    def _placed(
        self, encoded: Encoded, read: tuple[ReadImage, ...]
    ) -> tuple[tuple[Image, ...], NDArray[np.int64] | None]:
        """Return the images of a prompt with the positions of their placeholder tokens, and the rotary positions."""
        if self._images is None:
            return (), None
        settings, tokens = self._images.settings, encoded.tokens
        if (problem := self._images.problem(tokens, read)) is not None:
            raise RowError(problem)
        if tokens[-1] == settings.placeholder:
            raise RowError("the prompt ends with an image; set data.chat_template to a template with text behind it")
        if not read or self._prepare is None:
            return (), None
        sample = self._prepare(Sample(tokens=tokens, images=images_of(read, tokens, settings)))
        return sample.images, sample.rotary_positions


def _check_last(messages: Sequence[Message], column: str) -> None:
    if messages[-1]["role"] == "assistant":
        raise RowError(
            f"{column!r} ends with the role 'assistant'; expected the conversation to end before the response"
        )


class _CollectedPrompts:
    """Collects the prompts that are read, and reports rows that were skipped, dropped or truncated."""

    def __init__(self, settings: RolloutDataSettings, max_new_tokens: int) -> None:
        self._settings, self._max_new_tokens = settings, max_new_tokens
        self._found: list[Prompt] = []
        self._skipped: list[SkippedRow] = []
        self._dropped: list[SkippedRow] = []
        self._truncated: list[SkippedRow] = []
        self.rows_per_file: dict[str, int] = {}

    def add(self, result: _PromptRead | RowError, file: str, line: int, unit: str) -> None:
        if isinstance(result, RowError):
            row = SkippedRow(file=file, line=line, reason=str(result))
            if self._settings.on_bad_row == "error":
                raise bad_row(row, unit)
            self._skipped.append(row)
            return
        max_new_tokens = self._tokens_left(len(result.tokens), file, line)
        if max_new_tokens > 0:
            self._found.append(
                Prompt(
                    tokens=result.tokens,
                    max_new_tokens=max_new_tokens,
                    row=result.row,
                    uid=f"{file}:{line}",
                    source=file,
                    asked=result.asked,
                    images=result.images,
                    rotary_positions=result.rotary_positions,
                )
            )

    def _tokens_left(self, length: int, file: str, line: int) -> int:
        """Return the maximum length of a response to a prompt of `length` tokens; 0 if the prompt is dropped."""
        limit, wanted = self._settings.max_length, self._max_new_tokens
        if limit is None or length + wanted <= limit:
            return wanted
        reason = f"{length} prompt tokens and {wanted} response tokens exceed max_length {limit}"
        if self._settings.overlong == "error":
            raise UserError(
                "data.max_length",
                f"{limit}, but the prompt {file}:{line} has {length} tokens, and its response may have {wanted} more "
                "(rollout.max_new_tokens)",
                "set data.overlong=drop, or data.overlong=truncate to limit the response",
            )
        left = limit - length if self._settings.overlong == "truncate" else 0
        note = SkippedRow(file=file, line=line, reason=reason)
        (self._truncated if left > 0 else self._dropped).append(note)
        return max(left, 0)

    def prompts(self, notes: tuple[str, ...]) -> Prompts:
        num_rows = sum(self.rows_per_file.values())
        if not num_rows:
            raise UserError("data", f"{', '.join(self.rows_per_file)} has no rows", "give a file with rows")
        if not self._found:
            first = (self._skipped or self._dropped)[0]
            raise UserError(
                "data",
                f"none of {num_rows} rows can be used; for example, {first.file}:{first.line} is rejected: "
                f"{first.reason}",
                "correct the rows",
            )
        report = DataReport(
            num_rows=num_rows,
            num_samples=len(self._found),
            num_tokens=sum(len(prompt.tokens) for prompt in self._found),
            rows_per_file=self.rows_per_file,
            skipped=tuple(self._skipped),
            dropped=tuple(self._dropped),
            truncated=tuple(self._truncated),
        )
        return Prompts(prompts=self._found, report=report, notes=notes)
