"""Tokenised samples, read from disk on access.

    data = TokenizedDataset(folder, max_length=1024, overlong="truncate")
    data[0]                          Sample(tokens=..., loss_mask=..., uid="train.jsonl:1", source="train.jsonl")

A conversation can have one sample per trained turn (`data.turns`). Samples of the same conversation have the same
`group`, and uids such as `train.jsonl:2 turn 1`.

`max_length` is applied when a data set is opened. Changing it does not require tokenising again.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from operator import index as as_index
from pathlib import Path
from typing import Any, ClassVar, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from padfree.choices import Overlong
from padfree.data.array_files import open_array
from padfree.data.data_settings import check_max_length
from padfree.data.hashing import hash_of
from padfree.data.image_processor import ImageSettings
from padfree.data.image_store import StoredImages
from padfree.data.records import DataReport, SkippedRow, labelled
from padfree.data.store import read_metadata, read_skipped
from padfree.errors import UserError, check_choice
from padfree.sample import Sample

SCANNED_TOKENS = 1 << 22
"""The number of tokens that `first_token_from` compares at a time."""


class StoredSamples(ABC):
    """The interface of data sets that know the lengths and rows of their samples without reading tokens.

    `report` counts the rows of the files: used, skipped, dropped and truncated ones.
    """

    lengths: NDArray[np.int64]  # [N] tokens of each sample
    row_starts: NDArray[np.int64]  # [R+1] row r has the samples [row_starts[r], row_starts[r + 1])
    report: DataReport

    @property
    @abstractmethod
    def digest(self) -> str:
        """A hash of the tokens and masks of all samples.

        Data sets with the same samples have the same hash, even if their files or settings differ.
        """

    @abstractmethod
    def __getitem__(self, index: SupportsIndex) -> Sample: ...

    @abstractmethod
    def place(self, index: int) -> str:
        """Return how error messages name a sample: its file and line, and its turn if the row has several samples."""

    @abstractmethod
    def first_token_from(self, least: int) -> tuple[int, int] | None:
        """Find the first sample with a token id of `least` or more.

        Return the index of the sample and the token id, or None if no sample has such a token. Reads all tokens.
        """

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[Sample]:
        return (self[index] for index in range(len(self)))

    def _checked(self, index: SupportsIndex) -> int:
        number = as_index(index)
        if not -len(self) <= number < len(self):
            raise IndexError(f"sample {number} of {len(self)}")
        return number % len(self)


class TokenizedDataset(StoredSamples):
    """The samples in one folder of the token cache."""

    samples_per_row: ClassVar[int | None] = None  # None: rows may have any number of samples
    # If True, overlong="truncate" also drops all samples of a row if it drops one of them, as overlong="drop" does.
    drops_whole_rows: ClassVar[bool] = False

    def __init__(
        self,
        folder: str | Path,
        *,
        max_length: int | None = None,
        overlong: Overlong = "error",
        images: ImageSettings | None = None,
    ) -> None:
        check_max_length(max_length)
        check_choice("overlong", overlong, Overlong)
        self.folder = Path(folder)
        self.max_length = max_length
        self.overlong: Overlong = overlong
        metadata = read_metadata(self.folder)
        num_samples, num_tokens = int(metadata["samples"]), int(metadata["tokens"])
        self._files: list[dict[str, Any]] = metadata["files"]
        self._images: StoredImages | None = None
        if (about := metadata.get("image_counts")) is not None:
            if images is None:
                raise UserError(
                    "images", f"is None, but samples in {self.folder} show images", "pass padfree.data.ImageSettings"
                )
            self._images = StoredImages(self.folder, about, num_samples, images)
        self._digests: list[str] = metadata["digests"]
        # Use plain arrays over the mapped memory. Slicing numpy's memmap takes ten times as long, and a pickled slice
        # of a memmap would contain the whole file.
        self._tokens = np.asarray(open_array(self.folder, "tokens", (num_tokens,)))
        self._mask = np.asarray(open_array(self.folder, "mask", (num_tokens,)))
        self._rows = np.asarray(open_array(self.folder, "rows", (num_samples, 2)))
        offsets = np.asarray(open_array(self.folder, "offsets", (num_samples + 1,)))
        assert offsets[0] == 0
        assert offsets[-1] == num_tokens
        self._starts: NDArray[np.int64] = offsets[:-1]
        self.lengths = np.diff(offsets)
        self._kept: NDArray[np.int64] = np.arange(num_samples)  # for each sample in use, its index in the cache folder
        begins = np.ones(num_samples, dtype=np.bool_)
        begins[1:] = (self._rows[1:] != self._rows[:-1]).any(1)
        self._first_of_row: NDArray[np.int64] = np.append(np.flatnonzero(begins), num_samples)  # [all rows + 1]
        self._row_of: NDArray[np.int64] = np.cumsum(begins) - 1  # [all samples]
        if self.samples_per_row is not None:
            assert (np.diff(self._first_of_row) == self.samples_per_row).all()
        truncated, dropped = self._limit()
        rows = self._row_of[self._kept]
        self.row_starts = np.concatenate([[0], np.flatnonzero(np.diff(rows)) + 1, [len(rows)] if len(rows) else []])
        self.row_starts = self.row_starts.astype(np.int64)
        self.report = DataReport(
            num_rows=sum(int(file["rows"]) for file in self._files),
            num_samples=len(self.lengths) // (self.samples_per_row or 1),
            num_tokens=int(self.lengths.sum()),
            rows_per_file={file["name"]: int(file["rows"]) for file in self._files},
            skipped=tuple(read_skipped(self.folder)),
            dropped=tuple(dropped),
            truncated=tuple(truncated),
            used=len(self.row_starts) - 1,
        )

    def _limit(self) -> tuple[list[SkippedRow], list[SkippedRow]]:
        """Apply `max_length` and `overlong`. Return the rows that were truncated and the rows that were dropped."""
        if self.max_length is None:
            return [], []
        over = np.flatnonzero(self.lengths > self.max_length)
        if len(over) and self.overlong == "error":
            first = int(over[0])
            raise UserError(
                "data.max_length",
                f"{self.max_length}, but {len(over)} of {len(self.lengths)} samples are longer (the first is "
                f"{self._uid(first)} with {self.lengths[first]} tokens)",
                f"set data.overlong=truncate or data.overlong=drop, or data.max_length={self.lengths[over].max()}",
            )
        usable = np.ones(len(self.lengths), dtype=np.bool_)
        for stored in over.tolist():
            start = self._starts[stored]
            # A truncated sample needs a trained token, and must not be cut inside an image.
            usable[stored] = (
                self.overlong == "truncate"
                and self._mask[start + 1 : start + self.max_length].any()
                and not self._cuts_image(stored)
            )
        keep = usable.copy()
        truncated: list[SkippedRow] = []
        dropped: list[SkippedRow] = []
        for row in np.unique(self._row_of[over]).tolist():
            stored_of_row = np.arange(self._first_of_row[row], self._first_of_row[row + 1])
            if self.overlong == "drop" or self.drops_whole_rows:
                keep[stored_of_row] = usable[stored_of_row].all()
            lost = stored_of_row[~keep[stored_of_row]]
            if len(lost) == len(stored_of_row):
                first = int(stored_of_row[~usable[stored_of_row]][0])
                nothing = ""
                if self.overlong == "truncate":
                    cut = self._cuts_image(first)
                    nothing = (
                        ", and the limit is inside an image" if cut else ", and no token before the limit is trained"
                    )
                dropped.append(self._note(first, nothing))
            else:
                first = int(stored_of_row[self.lengths[stored_of_row] > self.max_length][0])
                gone = ", ".join(str(stored - stored_of_row[0] + 1) for stored in lost.tolist())
                truncated.append(
                    self._note(first, f"; dropped because no trained token is left: turn {gone}" if gone else "")
                )
        self._kept = np.flatnonzero(keep)
        if len(over) and not len(self._kept):
            longest = self.lengths.max()
            raise UserError(
                "data.max_length",
                f"{self.max_length} leaves no sample to train on",
                f"set data.max_length={longest} to keep all samples",
            )
        self.lengths = np.minimum(self.lengths[self._kept], self.max_length)
        return truncated, dropped

    @property
    def images(self) -> str | None:
        """A description such as `15 images, 4 distinct, 130 tokens`; None if the data has no images."""
        return None if self._images is None else self._images.summary(self._kept)

    @property
    def image_counts(self) -> NDArray[np.int64]:
        """The number of images that each sample [N] shows, including images that `max_length` cuts off."""
        return np.zeros(len(self), dtype=np.int64) if self._images is None else self._images.counts(self._kept)

    def _cuts_image(self, stored: int) -> bool:
        """Return whether truncating a sample to `max_length` would cut off only a part of an image's tokens.

        `stored`: the index of the sample in the cache folder.
        """
        if self._images is None:
            return False
        start = self._starts[stored]
        whole = self._tokens[start : start + self.lengths[stored]]
        return not self._images.whole_length(stored, whole, self.max_length or 0)

    def _note(self, stored: int, more: str) -> SkippedRow:
        file, line = self._rows[stored]
        turn = self._turn(stored)
        which = "" if turn is None else f"turn {turn} has "
        reason = f"{which}{self.lengths[stored]} tokens, over data.max_length {self.max_length}{more}"
        return SkippedRow(file=self._files[file]["name"], line=int(line), reason=reason)

    def _turn(self, stored: int) -> int | None:
        """Return the position of a sample among the samples of its row, counted from 1.

        Return None if the row has only one sample, or if all rows have the same number of samples (`samples_per_row`).
        `stored`: the index of the sample in the cache folder.
        """
        row = self._row_of[stored]
        first, end = self._first_of_row[row], self._first_of_row[row + 1]
        return None if self.samples_per_row is not None or end - first == 1 else int(stored - first) + 1

    def _row_name(self, stored: int) -> str:
        file, line = self._rows[stored]
        return f"{self._files[file]['name']}:{line}"

    def _uid(self, stored: int) -> str:
        turn = self._turn(stored)
        return self._row_name(stored) if turn is None else f"{self._row_name(stored)} turn {turn}"

    def place(self, index: int) -> str:
        return self._uid(int(self._kept[index]))

    def first_token_from(self, least: int) -> tuple[int, int] | None:
        for start in range(0, len(self._tokens), SCANNED_TOKENS):
            over = np.flatnonzero(self._tokens[start : start + SCANNED_TOKENS] >= least)
            for position in (over + start).tolist():
                stored = int(np.searchsorted(self._starts, position, side="right")) - 1
                index = int(np.searchsorted(self._kept, stored))
                kept = index < len(self._kept) and self._kept[index] == stored
                if kept and position < self._starts[stored] + self.lengths[index]:
                    return index, int(self._tokens[position])
        return None

    @property
    def digest(self) -> str:
        kept = hashlib.sha256(self._kept.tobytes() + self.lengths.tobytes()).hexdigest()
        # If some rows have several samples, the hash also covers which samples form a row.
        several = self.samples_per_row is None and len(self.row_starts) - 1 < len(self)
        rows = [hashlib.sha256(self.row_starts.tobytes()).hexdigest()] if several else []
        # The pixels of an image also depend on the processor.
        images = [] if self._images is None else [self._images.settings.processor.digest]
        return hash_of([*self._digests, kept, *rows, *images])

    def __getitem__(self, index: SupportsIndex) -> Sample:
        number = self._checked(index)
        stored = int(self._kept[number])
        start = self._starts[stored]
        end = start + self.lengths[number]
        tokens = self._tokens[start:end]
        sample = Sample(
            tokens=tokens,
            loss_mask=self._mask[start:end],
            uid=self._uid(stored),
            group=None if self._turn(stored) is None else self._row_name(stored),
            source=self._files[self._rows[stored, 0]]["name"],
            images=() if self._images is None else self._images.of_sample(stored, tokens),
        )
        prepare = None if self._images is None else self._images.settings.prepare
        return sample if prepare is None else prepare(sample)

    @cached_property
    def _numbers(self) -> NDArray[np.float64] | None:
        """The margin or label stored for each sample, as an array [N]; None if the data set stores neither."""
        if not read_metadata(self.folder).get("numbers"):
            return None
        return np.asarray(open_array(self.folder, "numbers", (len(self._rows),)))

    def number(self, index: SupportsIndex) -> float | None:
        """Return the number that is stored for a sample's row (a margin or a label), or None if rows have none."""
        numbers = self._numbers
        return None if numbers is None else float(numbers[self._kept[as_index(index)]])

    def __reduce__(self) -> tuple[Any, ...]:
        images = None if self._images is None else self._images.settings
        return _reopened, (type(self), self.folder, self.max_length, self.overlong, images)


class PairDataset(TokenizedDataset):
    """Preference pairs: sample 2i is the chosen answer of pair i, and sample 2i + 1 is the rejected answer.

    Both samples of a pair have the same `group`. The `reward` is 1 for the chosen answer, else 0. A margin is
    `terms["margin"]` of the chosen sample.
    """

    samples_per_row: ClassVar[int | None] = 2
    drops_whole_rows: ClassVar[bool] = True

    def __getitem__(self, index: SupportsIndex) -> Sample:
        sample = super().__getitem__(index)
        chosen = as_index(index) % 2 == 0
        margin = self.number(index) if chosen else None
        return replace(
            sample,
            terms=None if margin is None else {"margin": margin},
            uid=f"{sample.uid} {'chosen' if chosen else 'rejected'}",
            group=sample.uid,
            reward=float(chosen),
        )


class MixedDataset(StoredSamples):
    """The samples of several named sources, one source after the other.

    The name of the source is the `source` of a sample, and the first part of the sample's `uid` and `group`.
    """

    def __init__(self, parts: Mapping[str, StoredSamples]) -> None:
        self.parts, self._names = dict(parts), list(parts)
        each = list(self.parts.values())
        self._firsts = np.cumsum([0, *map(len, each)])  # [P+1]
        self.lengths = np.concatenate([part.lengths for part in each])
        starts = [part.row_starts[:-1] + first for part, first in zip(each, self._firsts[:-1], strict=True)]
        self.row_starts = np.concatenate([*starts, self._firsts[-1:]])
        self.report = DataReport.merged({name: part.report for name, part in self.parts.items()})

    def _found(self, index: int) -> tuple[str, StoredSamples, int]:
        number = int(np.searchsorted(self._firsts, index, side="right")) - 1
        name = self._names[number]
        return name, self.parts[name], index - int(self._firsts[number])

    @property
    def digest(self) -> str:
        return hash_of([part.digest for part in self.parts.values()])

    def __getitem__(self, index: SupportsIndex) -> Sample:
        name, part, number = self._found(self._checked(index))
        return of_source(name, part[number])

    def place(self, index: int) -> str:
        name, part, number = self._found(index)
        return labelled(name, part.place(number))

    def first_token_from(self, least: int) -> tuple[int, int] | None:
        for part, first in zip(self.parts.values(), self._firsts, strict=False):
            if (found := part.first_token_from(least)) is not None:
                return int(first) + found[0], found[1]
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return MixedDataset, (self.parts,)


def of_source(name: str, sample: Sample) -> Sample:
    """Return a copy of the sample that is labelled with `name`, the name of its source in a mixture."""
    return replace(
        sample,
        uid=None if sample.uid is None else labelled(name, sample.uid),
        group=None if sample.group is None else labelled(name, sample.group),
        source=name,
    )


def _reopened(
    kind: type[TokenizedDataset],
    folder: Path,
    max_length: int | None,
    overlong: Overlong,
    images: ImageSettings | None,
) -> TokenizedDataset:
    return kind(folder, max_length=max_length, overlong=overlong, images=images)
