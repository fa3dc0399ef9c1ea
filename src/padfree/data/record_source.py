"""`RecordSource`: rows of one file or data set, in chunks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from padfree.choices import OnBadRow
from padfree.data.fields import Fields, Schema, resolve
from padfree.errors import UserError

CHUNK_ROWS = 512
MOST_PASSED = 512
"""The maximum number of rows in which the columns of a file are looked for."""

Record = bytes | Any
"""One row: an unparsed line of JSON Lines, a parsed record, or the `RowError` of a row that cannot be read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Consecutive rows of one source, with their row numbers and their approximate total size in bytes."""

    source: str
    unit: str
    numbers: list[int]
    records: list[Record]
    size: int
    folder: str | None = None  # the folder of the file, for relative paths in its rows


class RecordSource(ABC):
    """One data file, or one data set of the Hub. Its rows are read in chunks.

    `size`: its size in bytes, for the progress bar and for the choice of the number of tokenising processes.
    """

    name: str
    unit: str = "row"
    size: int
    folder: str | None = None

    @abstractmethod
    def digest(self) -> str:
        """A hash of the content of the file or data set."""

    @abstractmethod
    def check_unchanged(self) -> None:
        """Raise `UserError` if the content has changed since the source was opened."""

    @abstractmethod
    def first_rows(self) -> Iterator[dict[str, Any]]:
        """Yield the first rows that can be read and that can have different columns."""

    def columns(self) -> list[str] | None:
        """Return the names of the columns, or None if no row can be read."""
        first = next(self.first_rows(), None)
        return None if first is None else list(first)

    @abstractmethod
    def chunks(self, columns: Sequence[str]) -> Iterator[Chunk]:
        """Yield all rows in order, in chunks. A source need not read columns other than `columns`."""

    def _chunk(self, numbers: list[int], records: list[Record], size: int) -> Chunk:
        return Chunk(source=self.name, unit=self.unit, numbers=numbers, records=records, size=size, folder=self.folder)

    def _numbered(self, parts: Iterable[list[Any]], num_rows: int) -> Iterator[Chunk]:
        """Convert each list of rows to a chunk with row numbers (from 1 on) and an estimate of its size in bytes.

        `num_rows`: the number of rows in all lists together.
        """
        first = 0
        for records in parts:
            end = first + len(records)
            size = self.size * end // num_rows - self.size * first // num_rows
            yield self._chunk(list(range(first + 1, end + 1)), records, size)
            first = end


def resolve_source(
    source: RecordSource, mapping: Mapping[str, str], schema: Schema, also: Sequence[str] = (), *, on_bad_row: OnBadRow
) -> tuple[dict[str, Any], Fields] | None:
    """Determine the column of each field of a source (see `resolve`), and return them with the row that shows them.

    Return None if no row can be read. If bad rows are skipped, first rows without the required columns are passed over.
    """
    problem = None
    for row in islice(source.first_rows(), MOST_PASSED if on_bad_row == "skip" else 1):
        try:
            return row, resolve(row, mapping, schema, source.name, also)
        except UserError as error:
            problem = problem or error
    if problem is not None:
        raise problem
    return None
