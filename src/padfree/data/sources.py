"""Read rows from JSON Lines, JSON, Parquet, folders of these, or a data set of the Hugging Face Hub.

    "data/"                                     every .jsonl, .json and .parquet file below it, sorted by path
    ["a/train.jsonl", "b/train.jsonl"]          two files, named by their paths relative to their common folder
    "openai/gsm8k"                              not a local path: a Hub id, read with the datasets package

A row is named by its file and its number, counted from 1 (`train.jsonl:17`). In JSON Lines, this is the number of the
line, and blank lines count.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from padfree.config.hub import check_name, shortened
from padfree.config.inputs import DATA_FILES, check_regular, is_data_file, is_saved_dataset
from padfree.config.packaged import VERIFIERS, is_packaged
from padfree.data.folders import MOST_NAMED, files_below
from padfree.data.record_source import CHUNK_ROWS, Chunk, Record, RecordSource
from padfree.data.records import RowError, as_record, parse_json, parse_line, shown
from padfree.data.verifiers_rows import open_verifiers
from padfree.errors import UserError, first_line, shown_error

CHUNK_BYTES = 1 << 20
LINE_BYTES = 1 << 28
"""The maximum number of bytes in a line of a JSON Lines file. If a line is longer, the file probably has no line
breaks.
"""


class FileSource(RecordSource):
    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self.name = name
        check_regular(path, "data")
        try:
            name.encode()
        except UnicodeEncodeError:
            raise UserError("data", f"the name of {str(path)!a} is not UTF-8", "rename the file") from None
        try:
            with open(path, "rb"):
                self._opened = path.stat()
        except OSError as error:
            raise UserError(
                "data", f"{path} cannot be read ({error.strerror})", "give a file that can be read"
            ) from None
        self.size = self._opened.st_size
        self.folder = str(path.absolute().parent)

    def check_unchanged(self) -> None:
        now = self.path.stat()
        if (now.st_size, now.st_mtime_ns) != (self._opened.st_size, self._opened.st_mtime_ns):
            raise UserError(
                "data", f"{self.name} changed while it was being read", "run again when no process writes to this file"
            )

    def digest(self) -> str:
        with open(self.path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()


class JsonLinesFile(FileSource):
    unit = "line"

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        with open(self.path, "rb") as file:
            number = 1
            while line := file.readline(LINE_BYTES):
                if len(line) == LINE_BYTES:
                    raise UserError(
                        "data",
                        f"{self.name} line {number} has {LINE_BYTES:,} bytes or more",
                        "put each row on a line of its own",
                    )
                yield number, line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                number += 1

    def first_rows(self) -> Iterator[dict[str, Any]]:
        for _, line in self._lines():
            with suppress(RowError):  # reported later, when the chunks are read
                yield parse_line(line)

    def chunks(self, columns: Sequence[str]) -> Iterator[Chunk]:
        numbers: list[int] = []
        records: list[Record] = []
        size = 0
        for number, line in self._lines():
            size += len(line)
            if line.isspace() or not line:
                continue
            numbers.append(number)
            records.append(line)  # the tokenising processes parse the line
            if len(records) == CHUNK_ROWS or size >= CHUNK_BYTES:
                yield self._chunk(numbers, records, size)
                numbers, records, size = [], [], 0
        if records:
            yield self._chunk(numbers, records, size)


class JsonFile(FileSource):
    unit = "record"

    def _records(self) -> list[Any]:
        text = self.path.read_bytes().removeprefix(b"\xef\xbb\xbf")
        try:
            records = parse_json(text.decode("utf-8"))
        except RowError as error:
            raise UserError(self.name, error.problem, "correct the file") from None
        except (ValueError, RecursionError) as error:
            raise UserError(
                self.name, f"is not valid JSON in UTF-8 ({error})", "give one list of objects, or use JSON Lines"
            ) from None
        if not isinstance(records, list):
            raise UserError(
                self.name,
                f"holds {shown(records)}, not a list of objects",
                "give one list of objects, or use JSON Lines",
            )
        return records

    def first_rows(self) -> Iterator[dict[str, Any]]:
        return (record for record in self._records() if isinstance(record, dict))

    def chunks(self, columns: Sequence[str]) -> Iterator[Chunk]:
        records = self._records()
        parts = (records[start : start + CHUNK_ROWS] for start in range(0, len(records), CHUNK_ROWS))
        yield from self._numbered(parts, len(records))


class ParquetFile(FileSource):
    def _open(self) -> Any:
        parquet = optional_package("pyarrow.parquet", "data", f"{self.name} is Parquet", install="pyarrow")
        try:
            file = parquet.ParquetFile(self.path)
        except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
            raise UserError(
                self.name, f"is not a valid Parquet file ({first_line(error)})", "replace or remove the file"
            ) from None
        for name, count in Counter(file.schema_arrow.names).items():
            if count > 1:
                raise UserError(self.name, f"has {count} columns named {name!r}", "rename or remove one of them")
        return file

    def first_rows(self) -> Iterator[dict[str, Any]]:
        file = self._open()
        if file.metadata.num_rows:
            yield {name: self._first_value(file, name) for name in file.schema_arrow.names}

    def _first_value(self, file: Any, column: str) -> Any:
        """Return the first value of a column, or None if it cannot be read. `chunks` reports this if it is needed."""
        with suppress(Exception):  # see `_converted`
            return next(file.iter_batches(batch_size=1, columns=[column]))[column].to_pylist()[0]
        return None

    def chunks(self, columns: Sequence[str]) -> Iterator[Chunk]:
        file = self._open()
        wanted = [name for name in file.schema_arrow.names if name in columns]
        yield from self._numbered(map(_converted, self._batches(file, wanted)), file.metadata.num_rows)

    def _batches(self, file: Any, columns: list[str]) -> Iterator[Any]:
        try:
            yield from file.iter_batches(batch_size=CHUNK_ROWS, columns=columns)
        except Exception as error:  # pyarrow raises errors of many kinds for damaged pages
            raise UserError(
                self.name, f"is damaged ({shown_error(error)})", "write the file again, or remove it"
            ) from error


def _converted(batch: Any) -> list[Any]:
    """Convert a batch of Arrow to rows. A row with a value that Python cannot represent becomes a `RowError`."""
    try:
        return list(batch.to_pylist())
    except Exception:  # for example text that is not UTF-8, or a date outside of Python's range
        return [_converted_row(batch.slice(index, 1)) for index in range(batch.num_rows)]


def _converted_row(batch: Any) -> dict[str, Any] | RowError:
    row = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            (row[name],) = column.to_pylist()
        except Exception as error:
            return RowError(f"{name!r} cannot be read ({shown_error(error)}); expected a valid value")
    return row


class HubSource(RecordSource):
    """A data set of the Hub, loaded as a `datasets.Dataset`, whose files are memory-mapped."""

    def __init__(self, dataset: Any, name: str) -> None:
        self.dataset = dataset
        self.name = name
        self.size = int(dataset.data.nbytes)

    def digest(self) -> str:
        # The fingerprint is the cache key of the datasets package. It changes with the content and with every
        # transformation.
        return str(self.dataset._fingerprint)

    def check_unchanged(self) -> None:
        """Do nothing, because a loaded data set does not change."""

    def first_rows(self) -> Iterator[dict[str, Any]]:
        if len(self.dataset):
            yield {name: self._first_value(name) for name in self.dataset.column_names}

    def _first_value(self, column: str) -> Any:
        """Return the first value of a column, or None if it cannot be read. `chunks` reports this if it is needed."""
        with suppress(Exception):  # see `_records`
            return self.dataset.select_columns([column])[:1][column][0]
        return None

    def chunks(self, columns: Sequence[str]) -> Iterator[Chunk]:
        wanted = self.dataset.select_columns([name for name in self.dataset.column_names if name in columns])
        parts = (_records(wanted, start, start + CHUNK_ROWS) for start in range(0, len(wanted), CHUNK_ROWS))
        yield from self._numbered(parts, len(wanted))


def _records(dataset: Any, start: int, end: int) -> list[Any]:
    """Return some rows of a `datasets.Dataset`. A row that cannot be decoded becomes a `RowError`."""
    try:
        table = dataset[start:end]
    except Exception as error:  # for example a damaged image, or text that is not UTF-8
        if end - start == 1:
            return [RowError(f"cannot be read ({shown_error(error)}); expected valid values")]
        return [
            record for index in range(start, min(end, len(dataset))) for record in _records(dataset, index, index + 1)
        ]
    return [dict(zip(table, values, strict=True)) for values in zip(*table.values(), strict=True)]


def optional_package(module: str, setting: str, reason: str, *, install: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        raise UserError(
            setting, f"{reason}, but the package {install} is not installed", f"pip install {install}"
        ) from None


def record_of(record: Record) -> dict[str, Any]:
    if isinstance(record, RowError):
        raise record
    return parse_line(record) if isinstance(record, bytes) else as_record(record)


def open_sources(
    data: str | Path | Iterable[str | Path], *, split: str = "train", subset: str | None = None
) -> list[RecordSource]:
    """Open files, folders and Hub ids, in the given order. The files of a folder are sorted by path."""
    entries = [data] if isinstance(data, (str, Path)) else list(data)
    if not entries:
        raise UserError("data", "is empty", "give a file, a folder or a Hub id")
    found: list[RecordSource | Path] = []
    bases: list[Path] = []
    for entry in entries:
        if is_packaged(str(entry)):
            found.append(_packaged_rows(str(entry)))
            continue
        try:
            path = Path(entry).expanduser().absolute()
            if path.is_dir() and is_saved_dataset(path):
                found.append(_saved_dataset(path, split))
            elif path.is_dir():
                bases.append(path)
                found.extend(_files_below(path))
            elif path.exists():
                bases.append(path.parent)
                found.append(path)
            else:
                found.append(_hub_dataset(str(entry), split, subset))
        # For example: the name is too long, permission is denied, or the user of `~user` does not exist.
        except (OSError, RuntimeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UserError(
                "data", f"{shortened(str(entry))} cannot be read ({reason})", "give a file, a folder or a Hub id"
            ) from None
    # Name files relative to their common folder: names must not change if this folder is moved or gets more files.
    base = os.path.commonpath(bases) if bases else ""
    sources = [
        _file_source(source, source.relative_to(base).as_posix()) if isinstance(source, Path) else source
        for source in found
    ]
    for name, count in Counter(source.name for source in sources).items():
        if count > 1:
            raise UserError("data", f"{name} is given twice", "give each file once")
    return sources


def _packaged_rows(name: str) -> RecordSource:
    if name.startswith(VERIFIERS):
        return open_verifiers(name)
    raise UserError("data.path", "is an OpenEnv environment, which has no rows", "give a file of prompts", value=name)


def _files_below(folder: Path) -> list[Path]:
    found, left_out = files_below(folder)
    if not found:
        others = f" (it has {', '.join(path.name for path in left_out[:MOST_NAMED])})" if left_out else ""
        raise UserError(
            "data", f"the folder {folder} has no {', '.join(DATA_FILES)} file{others}", "give a folder with data files"
        )
    return found


def _file_source(path: Path, name: str) -> FileSource:
    if not is_data_file(path):
        raise UserError(
            "data",
            f"{path} has the suffix {path.suffix!r}, which is not supported",
            f"give a {', '.join(DATA_FILES)} file, or a folder of them",
        )
    if path.suffix.lower() == ".parquet":
        return ParquetFile(path, name)
    lines = JsonLinesFile(path, name)  # the constructor also checks that the path is a readable regular file
    if path.suffix.lower() == ".json":
        with open(path, "rb") as file:
            head = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
        if not head.startswith(b"{"):  # most .json files that begin with a record are JSON Lines
            return JsonFile(path, name)
    return lines


def _saved_dataset(folder: Path, split: str) -> HubSource:
    datasets = optional_package("datasets", "data", f"{folder} was saved by datasets", install="datasets")
    try:
        loaded = datasets.load_from_disk(str(folder))
    except Exception as error:  # damaged or missing files make datasets raise errors of many kinds
        raise UserError(
            "data",
            f"{folder} is not a complete data set of save_to_disk ({shown_error(error)})",
            "save the data set again",
        ) from error
    if isinstance(loaded, dict):
        if split not in loaded:
            raise UserError(
                "data.split", f"is not a split of {folder}", f"set it to one of {', '.join(loaded)}", value=split
            )
        return HubSource(loaded[split], f"{folder.name}/{split}")
    return HubSource(loaded, folder.name)


def _hub_dataset(name: str, split: str, subset: str | None) -> HubSource:
    if is_data_file(name) or not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name):
        raise UserError("data", f"{name} does not exist", "give a file, a folder or a Hub id")
    datasets = optional_package(
        "datasets", "data", f"{name} is not a local path, so it is read as a Hub id", install="datasets"
    )
    check_name(name, "data", "dataset")
    try:
        loaded = datasets.load_dataset(name, subset, split=split)
    except (OSError, ValueError) as error:
        raise UserError(
            "data",
            f"{name} (data.subset {subset}, data.split {split}) cannot be loaded from the Hub ({first_line(error)})",
            "correct the name, data.subset or data.split",
        ) from error
    return HubSource(loaded, "/".join(filter(None, (name, subset, split))))
