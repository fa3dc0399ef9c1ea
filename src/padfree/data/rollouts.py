"""Read rollout files. Each row becomes one sample: a prompt, a response, a reward, and arrays such as logprobs.

For example, the row

    {"tokens": [5, 6, 7, 8, 9], "response_length": 3, "reward": 1.0, "logprobs": [-0.1, -0.2, -0.3]}

becomes a sample with the arrays

    tokens       5     6     7     8     9
    loss_mask    0     0     1     1     1
    logprobs     0     0  -0.1  -0.2  -0.3

A column such as `logprobs` has one entry per token of the sample, or one per token of the response. docs/guides/data.md
lists the columns.

A rollout without trained tokens is kept, because its reward counts in its group.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from padfree.choices import ROLLOUT_ARRAYS
from padfree.data.chat_renderer import ChatRenderer, chat_renderer
from padfree.data.data_settings import RolloutDataSettings
from padfree.data.encode import Encoder, Passage, Piece
from padfree.data.fields import Fields, check_mapping
from padfree.data.formats import ROLLOUT_SCHEMA, ROLLOUTS_SHOW_IMAGES, described, reading_images, reading_notes
from padfree.data.image_reader import ImageReader
from padfree.data.image_store import ReadImage, images_of
from padfree.data.record_source import Chunk, resolve_source
from padfree.data.records import (
    LARGEST,
    DataReport,
    RowError,
    SkippedRow,
    attempt,
    bad_row,
    integer,
    items,
    no_usable_row,
    number,
    shown,
    string,
    token_ids,
)
from padfree.data.row_images import read_column
from padfree.data.rows import RowReader
from padfree.data.sources import open_sources, record_of
from padfree.errors import UserError
from padfree.images import Image
from padfree.kept_sets import KeptSets
from padfree.routes import Routes, checked_routes, decoded_routes
from padfree.sample import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TITLES = {"tokens": "rollouts in tokens", "token pair": "rollouts in tokens", "text": "rollouts in text"}
LOGPROBS = ("logprobs", "ref_logprobs")
ROUNDING = 1e-3
"""A log-probability in the data may be above 0 by at most this, because samplers compute in low precision."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RolloutData:
    """The samples of rollout files in the order of their rows, and a report on used, skipped and dropped rows."""

    samples: Sequence[Sample]
    lines: Sequence[int]  # the line number of each sample in its file; `Sample.source` names the file
    report: DataReport
    notes: tuple[str, ...] = ()  # notes for the user about how the files are read


def read_rollouts(
    data: str | Path | Iterable[str | Path],
    settings: RolloutDataSettings | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> RolloutData:
    """Read rollout files, or folders of them. A tokenizer is needed if rollouts are given as text."""
    settings = settings or RolloutDataSettings()
    schema = ROLLOUT_SCHEMA if settings.images is None else reading_images(ROLLOUT_SCHEMA, ROLLOUTS_SHOW_IMAGES)
    check_mapping(settings.columns, schema)
    reader = _RolloutReader(tokenizer, settings)
    collected = _CollectedRollouts(settings)
    files: list[dict[str, str]] = []
    for source in open_sources(data, split=settings.split, subset=settings.subset):
        found = resolve_source(source, settings.columns, schema, reader.template_names, on_bad_row=settings.on_bad_row)
        fields = None
        if found is not None:
            first, fields = found
            files.append({"name": source.name, "read_as": described(fields, first, schema, TITLES[fields.kind])})
        if fields is not None and fields.kind == "text" and tokenizer is None:
            raise UserError(
                "model.tokenizer",
                f"is not set, but {source.name} has rollouts as text",
                "set it to a folder or Hub id, or give rollouts as token ids",
            )
        collected.rows_per_file[source.name] = 0
        for chunk in source.chunks(fields.needed if fields else ()):
            collected.rows_per_file[source.name] += len(chunk.numbers)
            # If no row of the file can be parsed, its fields are unknown. The errors of the rows are reported anyway.
            results = reader.read(chunk, fields or Fields(kind="tokens", columns={}))
            for line, result in zip(chunk.numbers, results, strict=True):
                if isinstance(result, RowError):
                    collected.skip(source.name, line, source.unit, result)
                else:
                    collected.add(result, source.name, line, source.unit)
        source.check_unchanged()
    return collected.rollouts(reading_notes(files))


class _Tokens(NamedTuple):
    """The token ids of a rollout, the index at which its response begins, and its loss mask."""

    tokens: NDArray[np.integer[Any]]  # [n]
    response_start: int
    mask: NDArray[np.bool_]  # [n]
    images: tuple[ReadImage, ...] = ()


class _RolloutRead(NamedTuple):
    """The sample that was read from a row. `named`: whether the row has a value in the column `group`."""

    sample: Sample
    named: bool


class _RolloutReader:
    """Turns rows of rollout files into samples."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, settings: RolloutDataSettings) -> None:
        self._encoder = Encoder(tokenizer, append_eos=settings.append_eos) if tokenizer is not None else None
        self._chat: ChatRenderer | None = None
        if tokenizer is not None:
            self._chat = chat_renderer(tokenizer, settings, day=settings.day)
        self._rows = RowReader(settings, renders_chat=self._chat is not None) if tokenizer is not None else None
        self._images = None if settings.images is None else ImageReader(settings.images)
        self._prepare = None if settings.images is None else settings.images.prepare

    @property
    def template_names(self) -> tuple[str, ...]:
        return () if self._rows is None else self._rows.template_names

    def read(self, chunk: Chunk, fields: Fields) -> list[_RolloutRead | RowError]:
        """Return one result for each row of a chunk, in order: its sample or, for a bad row, a `RowError`."""
        rows = [attempt(record_of, record) for record in chunk.records]
        if fields.kind == "text":
            tokens = self._encoded(rows, fields, chunk.folder)
        else:
            tokens = [
                row if isinstance(row, RowError) else attempt(self._given, row, fields, chunk.folder) for row in rows
            ]
        return [
            attempt(self._sample, row, fields, found, chunk.source, line)
            if not isinstance(row, RowError) and not isinstance(found, RowError)
            else RowError(str(found))
            for line, row, found in zip(chunk.numbers, rows, tokens, strict=True)
        ]

    def _encoded(
        self, rows: Sequence[dict[str, Any] | RowError], fields: Fields, folder: str | None
    ) -> list[_Tokens | RowError]:
        assert self._encoder is not None
        passages = [row if isinstance(row, RowError) else attempt(self._passage, row, fields, folder) for row in rows]
        encoded = iter(self._encoder.encode([one[0] for one in passages if not isinstance(one, RowError)]))
        results: list[_Tokens | RowError] = []
        for one in passages:
            result = one if isinstance(one, RowError) else next(encoded)
            if isinstance(one, RowError) or isinstance(result, RowError):
                results.append(RowError(str(result)))
            else:
                results.append(_Tokens(result.tokens, _first_trained(result.loss_mask), result.loss_mask, one[1]))
        return results

    def _given(self, row: dict[str, Any], fields: Fields, folder: str | None) -> _Tokens:
        found = _given_tokens(row, fields)
        column = fields.columns.get("images", "images")
        if self._images is None or row.get(column) is None:
            return found
        return found._replace(images=self._images.read(read_column(row[column], column), folder))

    def _sample(self, row: dict[str, Any], fields: Fields, found: _Tokens, source: str, line: int) -> _RolloutRead:
        read = _sample(row, fields, found, source, line)
        if self._images is None:
            return read
        sample = self._shown(read.sample, found.images)
        if sample.images and not read.named:
            # Prompts with the same tokens and different images are different prompts.
            shown = [image.digest for image in sample.images if image.positions[0] < found.response_start]
            key = hashlib.sha256("".join(shown).encode()).hexdigest()[:16]
            sample = replace(sample, group=f"{sample.group}:{key}")
        return read._replace(sample=sample)

    def _shown(self, sample: Sample, images: tuple[ReadImage, ...]) -> Sample:
        """Add the images to a sample. All placeholder tokens belong to images, except those that a policy sampled."""
        assert self._images is not None
        settings = self._images.settings
        tokens = np.where(sample.sampled, -1, sample.tokens)
        if (problem := self._images.problem(tokens, images)) is not None:
            raise RowError(problem)
        if not images:
            return sample
        shown = replace(sample, images=images_of(images, tokens, settings))
        return shown if self._prepare is None else self._prepare(shown)

    def _passage(
        self, row: dict[str, Any], fields: Fields, folder: str | None
    ) -> tuple[Passage, tuple[ReadImage, ...]]:
        if row.get(fields["loss_mask"]) is not None:
            raise RowError(f"{fields['loss_mask']!r} needs token ids, but the row has text; remove the column")
        assert self._rows is not None
        response = string(row, fields["response"])
        if self._chat is None:
            pieces = (Piece(self._rows.plain_prompt(row, fields), False), Piece(response, True))
            return Passage(pieces=pieces), ()
        asked = self._rows.prompt(row, fields)
        pieces = (Piece(self._chat.prompt(asked), False), Piece(response, True))
        passage = Passage(pieces=pieces, begun=True, images=asked.images)
        return (passage, ()) if self._images is None else self._images.expanded(passage, folder)


def _inside(image: Image) -> range:
    """Return the lengths to which a sample cannot be truncated, because they divide the image."""
    return range(int(image.positions[0]) + 1, int(image.positions[-1]) + 1)


def _first_trained(mask: NDArray[np.bool_]) -> int:
    return int(np.argmax(mask)) if mask.any() else len(mask)


def _given_tokens(row: dict[str, Any], fields: Fields) -> _Tokens:
    if fields.kind == "token pair":
        prompt = token_ids(row, fields["prompt_tokens"])
        response = token_ids(row, fields["response_tokens"])
        tokens = np.array(prompt + response, dtype=np.int32)
        return _Tokens(tokens, len(prompt), _loss_mask(row, fields["loss_mask"], len(tokens), len(prompt)))
    tokens = np.array(token_ids(row, fields["tokens"]), dtype=np.int32)
    if row.get(fields["response_length"]) is not None:
        start = len(tokens) - integer(row, fields["response_length"], 0, len(tokens))
        return _Tokens(tokens, start, _loss_mask(row, fields["loss_mask"], len(tokens), start))
    if row.get(fields["loss_mask"]) is None:
        raise RowError(
            f"{fields['response_length']!r} and {fields['loss_mask']!r} are both missing; add one of them to mark the "
            "tokens of the response"
        )
    mask = _loss_mask(row, fields["loss_mask"], len(tokens), 0)
    if not mask.any() and row.get(fields["group"]) is None:
        raise RowError(
            f"{fields['loss_mask']!r} has no 1, so that the end of the prompt is unknown; add "
            f"{fields['response_length']!r} or {fields['group']!r}"
        )
    return _Tokens(tokens, _first_trained(mask), mask)  # the response begins with the first trained token


def _sample(row: dict[str, Any], fields: Fields, found: _Tokens, source: str, line: int) -> _RolloutRead:
    fields.check_uniform(row)
    tokens, response_start, mask, _ = found
    if not len(tokens):
        raise RowError("the row has no tokens; expected one or more")
    prompt = np.ascontiguousarray(tokens[:response_start], dtype=np.int64)
    arrays: dict[str, Any] = {
        field: array
        for field in ROLLOUT_ARRAYS
        if (array := _token_array(row, fields[field], response_start, mask, field in LOGPROBS)) is not None
    }
    sample = Sample(
        tokens=tokens,
        loss_mask=mask,
        reward=number(row, fields["reward"]),
        raw_reward=row.get(fields["raw_reward"]),
        uid=_name(row, fields["uid"], f"{source}:{line}"),
        group=_name(row, fields["group"], f"prompt:{hashlib.sha256(prompt.tobytes()).hexdigest()[:16]}"),
        source=source,
        routes=_routes(row, fields["routes"], len(tokens)),
        kept=_kept(row, fields["kept"], response_start, tokens, mask),
        **arrays,
    )
    return _RolloutRead(sample, row.get(fields["group"]) is not None)


def _loss_mask(row: dict[str, Any], column: str, length: int, response_start: int) -> NDArray[np.bool_]:
    """Return the loss mask [length] of a row, read from `column`.

    If the row does not have this column, all tokens of the response are trained.
    """
    mask = np.zeros(length, dtype=np.bool_)
    if row.get(column) is None:
        mask[response_start:] = True
        return mask
    values = items(row, column, "a list of 0 and 1")
    for index, value in enumerate(values):
        if not isinstance(value, int) or value not in (0, 1):
            raise RowError(f"{column}[{index}] is {shown(value)}; expected 0 or 1")
    start = _aligned(len(values), column, length, response_start)
    mask[start:] = values
    if mask[:response_start].any():
        where = int(np.argmax(mask))
        raise RowError(f"{column} is 1 at token {where}, which belongs to the prompt; expected 1 in the response only")
    return mask


def _token_array(
    row: dict[str, Any], column: str, response_start: int, mask: NDArray[np.bool_], is_logprob: bool
) -> NDArray[np.float32] | None:
    """Return a column with one number per token as an array [n], or None if the row does not have the column.

    Tokens without a number get 0.
    """
    if row.get(column) is None:
        return None
    values = items(row, column, "a list of numbers")
    start = _aligned(len(values), column, len(mask), response_start)
    high = ROUNDING if is_logprob else LARGEST
    array = np.zeros(len(mask), dtype=np.float32)
    for index, value in enumerate(values):
        if value is None and not mask[start + index]:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not -LARGEST < value < high:
            what = "a log-probability (finite, 0 or less)" if is_logprob else "a finite number"
            raise RowError(f"{column}[{index}] is {shown(value)}; expected {what}")
        array[start + index] = value
    return array


def _routes(row: dict[str, Any], column: str, length: int) -> Routes | None:
    """Return the experts that the sampler chose for each token, or None if the row has no such column.

    The column holds nested lists [tokens, layers with experts, experts per token], with -1 for unknown, or the object
    that `encoded_routes` returns.
    """
    if row.get(column) is None:
        return None
    try:
        return checked_routes(decoded_routes(row[column]), length, "the row")
    except ValueError as error:
        raise RowError(f"{column!r} cannot be read: {error}") from None


def _kept(
    row: dict[str, Any], column: str, response_start: int, tokens: NDArray[np.integer[Any]], mask: NDArray[np.bool_]
) -> KeptSets | None:
    """Return the kept sets [n] (the token ids among which the sampler chose), or None if the row has no such column.

    An empty list or null stands for the whole vocabulary.
    """
    if row.get(column) is None:
        return None
    values = items(row, column, "a list of lists of token ids")
    start = _aligned(len(values), column, len(tokens), response_start)
    try:
        found = KeptSets.joined([KeptSets.whole(start), KeptSets.of_lists(values, column)])
    except UserError as error:
        raise RowError(str(error)) from None
    wrong = np.flatnonzero(mask & ~found.contain(tokens))
    if len(wrong):
        raise RowError(
            f"{column}[{wrong[0] - start}] does not contain the token {tokens[wrong[0]]}; list the ids from which it "
            "was sampled"
        )
    return found


def _aligned(entries: int, column: str, length: int, response_start: int) -> int:
    """Return the index of the token to which the first entry of a per-token column belongs.

    `entries`: the number of entries of the column, which must be the number of tokens of the sample (`length`) or of
    its response.
    """
    if entries == length:
        return 0
    if entries == length - response_start:
        return response_start
    raise RowError(
        f"{column!r} has {entries} entries; expected {length} (one per token) "
        f"or {length - response_start} (one per token of the response)"
    )


def _name(row: dict[str, Any], column: str, default: str) -> str | int:
    value = row.get(column)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise RowError(f"{column!r} is {shown(value)}; expected a string or an integer")
    return value


class _CollectedRollouts:
    """Collects the samples that are read, and reports rows that were skipped, dropped or truncated."""

    def __init__(self, settings: RolloutDataSettings) -> None:
        self._settings = settings
        self.samples: list[Sample] = []
        self.lines: list[int] = []
        self.skipped: list[SkippedRow] = []
        self.dropped: list[SkippedRow] = []
        self.truncated: list[SkippedRow] = []
        self.rows_per_file: dict[str, int] = {}
        self._first_named: str | None = None  # the first row that names its group
        self._unnamed: list[tuple[Sample, str, int, str]] = []  # samples without a group, as (sample, file, line, unit)

    def add(self, read: _RolloutRead, file: str, line: int, unit: str) -> None:
        sample = read.sample
        if read.named:
            self._first_named = self._first_named or f"{file} {unit} {line}"
        before = len(self.samples)
        self._limited(sample, file, line)
        if not read.named and len(self.samples) > before:
            self._unnamed.append((self.samples[-1], file, line, unit))

    def _refuse_unnamed(self) -> None:
        """If some rows have a group, count rows without one as bad rows, because their advantages would be wrong."""
        if self._first_named is None or not self._unnamed:
            return
        error = RowError(f"has no group, but {self._first_named} has one; give every row a group, or none")
        for _, file, line, unit in self._unnamed:
            self.skip(file, line, unit, error)
        unnamed = {id(sample) for sample, *_ in self._unnamed}
        kept = [
            (sample, line) for sample, line in zip(self.samples, self.lines, strict=True) if id(sample) not in unnamed
        ]
        self.samples, self.lines = [sample for sample, _ in kept], [line for _, line in kept]

    def _limited(self, sample: Sample, file: str, line: int) -> None:
        limit = self._settings.max_length
        if limit is None or len(sample) <= limit:
            self.samples.append(sample)
            self.lines.append(line)
            return
        reason = f"{len(sample)} tokens, over data.max_length {limit}"
        note = SkippedRow(file=file, line=line, reason=reason)
        if self._settings.overlong == "error":
            raise UserError(
                "data.max_length",
                f"{limit}, but {file}:{line} has {len(sample)} tokens",
                "set data.overlong=truncate or data.overlong=drop, or raise data.max_length",
            )
        if self._settings.overlong == "drop" or any(limit in _inside(image) for image in sample.images):
            self.dropped.append(note)
        else:
            self.truncated.append(note)
            self.samples.append(sample.truncated(limit))
            self.lines.append(line)

    def skip(self, file: str, line: int, unit: str, error: RowError) -> None:
        row = SkippedRow(file=file, line=line, reason=str(error))
        if self._settings.on_bad_row == "error":
            raise bad_row(row, unit)
        self.skipped.append(row)

    def rollouts(self, notes: tuple[str, ...]) -> RolloutData:
        self._refuse_unnamed()
        num_rows = sum(self.rows_per_file.values())
        if not self.samples:
            raise no_usable_row(self.rows_per_file, num_rows, self.skipped or self.dropped)
        report = DataReport(
            num_rows=num_rows,
            num_samples=len(self.samples),
            num_tokens=sum(map(len, self.samples)),
            rows_per_file=self.rows_per_file,
            skipped=tuple(self.skipped),
            dropped=tuple(self.dropped),
            truncated=tuple(self.truncated),
        )
        return RolloutData(samples=self.samples, lines=self.lines, report=report, notes=notes)
