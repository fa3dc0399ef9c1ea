"""Parse rows of data files, check their fields, and report rows that cannot be used.

    train.jsonl line 17: 'response' is null; expected a string
    ^^^^^^^^^^^ ^^^^^^^   ^^^^^^^^           ^^^^^^^^
    file        line       field             what was expected

The message of a `RowError` names the field and what was expected. The caller adds the file and the line. The setting
`on_bad_row` decides what happens next: the first bad row stops the run, or bad rows are skipped and listed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from padfree.errors import UserError

LARGEST = 1e38
"""Numbers in data rows, and rewards, must be below this in absolute value, because they are converted to float32."""


class RowError(UserError):
    """A problem with one row of a data file. The message does not name the file and line; the caller adds them."""

    def __init__(self, reason: str) -> None:
        super().__init__("", reason, "")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.problem,)


_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def attempt(
    function: Callable[_Arguments, _Result], *arguments: _Arguments.args, **keywords: _Arguments.kwargs
) -> _Result | RowError:
    """Call the function and return its result, or return the `RowError` that it raises.

    When many rows are processed at once, an error of one row then does not stop the others.
    """
    try:
        return function(*arguments, **keywords)
    except RowError as error:
        return error


@dataclass(frozen=True, kw_only=True, slots=True)
class SkippedRow:
    """A row that was skipped, dropped or truncated, and the reason. `line` counts from 1."""

    file: str
    line: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class DataReport:
    """Counts of the rows of data files: used, skipped and dropped rows, whose sum is `num_rows`.

    Truncated rows count as used. `used`: the number of used rows. None: it equals `num_samples`, because every used row
    gives exactly one sample.
    """

    num_rows: int
    num_samples: int
    num_tokens: int
    rows_per_file: Mapping[str, int]
    skipped: Sequence[SkippedRow] = ()
    dropped: Sequence[SkippedRow] = ()
    truncated: Sequence[SkippedRow] = ()
    used: int | None = None

    def __post_init__(self) -> None:
        assert self.num_rows == self.num_used + len(self.skipped) + len(self.dropped)
        assert self.num_rows == sum(self.rows_per_file.values())

    @property
    def num_used(self) -> int:
        """The number of rows that give at least one sample."""
        return self.num_samples if self.used is None else self.used

    @staticmethod
    def merged(reports: Mapping[str, DataReport]) -> DataReport:
        """Merge the reports of several named sources. Each file name is prefixed with the name of its source."""
        each = list(reports.items())

        def rows(field: str) -> tuple[SkippedRow, ...]:
            return tuple(
                replace(row, file=labelled(name, row.file)) for name, report in each for row in getattr(report, field)
            )

        return DataReport(
            num_rows=sum(report.num_rows for _, report in each),
            num_samples=sum(report.num_samples for _, report in each),
            num_tokens=sum(report.num_tokens for _, report in each),
            rows_per_file={
                labelled(name, file): count for name, report in each for file, count in report.rows_per_file.items()
            },
            skipped=rows("skipped"),
            dropped=rows("dropped"),
            truncated=rows("truncated"),
            used=sum(report.num_used for _, report in each),
        )

    def summary(self) -> str:
        """Return one line: `7473 rows: 7470 samples, 1234567 tokens; 2 skipped, 1 dropped, 4 truncated`.

        Bad rows are skipped. Rows with too many tokens are dropped or truncated.
        """
        return (
            f"{self.num_rows} rows: {self.num_samples} samples, {self.num_tokens} tokens; {len(self.skipped)} skipped, "
            f"{len(self.dropped)} dropped, {len(self.truncated)} truncated"
        )

    def write(self, path: str | Path) -> None:
        """Write every skipped, dropped and truncated row as a line of JSON: action, file, line, reason."""
        with open(path, "w", encoding="utf-8") as file:
            for action, rows in (
                ("skipped", self.skipped),
                ("dropped", self.dropped),
                ("truncated", self.truncated),
            ):
                file.writelines(
                    json.dumps({"action": action, **asdict(row)}, ensure_ascii=False) + "\n" for row in rows
                )


def labelled(name: str, label: str | int) -> str:
    """Return the label of a file, sample or group in a mixture: `label` with the name of its source in front.

    The name is not repeated if the label already begins with it:

        source "math"       train.jsonl:18 -> math/train.jsonl:18
        source "a.jsonl"    a.jsonl:18 -> a.jsonl:18
    """
    text = str(label)
    return text if text == name or text.startswith(f"{name}:") else f"{name}/{text}"


def bad_row(row: SkippedRow, unit: str) -> UserError:
    return UserError(
        f"{row.file} {unit} {row.line}",
        f"{row.reason}",
        "correct the row, or set data.on_bad_row=skip to skip rows like this",
    )


def no_usable_row(files: Iterable[str], num_rows: int, rejected: Sequence[SkippedRow]) -> UserError:
    """Return the error for files from which no sample can be made. `rejected`: the rows that cannot be used."""
    if not num_rows:
        return UserError("data", f"{', '.join(files)} has no rows", "give a file with rows")
    first = rejected[0]
    return UserError(
        "data",
        f"none of {num_rows} rows can be used; for example, {first.file}:{first.line} is rejected: {first.reason}",
        "correct the rows",
    )


def shown(value: object) -> str:
    """Format a value for an error message: short, on one line, as in JSON."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)}"
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, int) and abs(value) >= 10**20:
        return "a huge integer"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise RowError(f"an object has the key {shown(twice)} twice; expected each key once")
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_object)
"""One decoder for all rows: `json.loads` with a hook would make a decoder for each row, which takes longer."""


def parse_json(text: str) -> Any:
    """Parse JSON like `json.loads`. Raise a `RowError` if an object has a key twice."""
    return _DECODER.decode(text)


def parse_line(line: bytes) -> dict[str, Any]:
    """Parse one line of JSON Lines, with or without its line ending."""
    try:
        record = parse_json(line.rstrip(b"\r\n").decode("utf-8"))
    except RowError:
        raise
    except UnicodeDecodeError as error:
        raise RowError(f"byte {error.start + 1} is not UTF-8; expected a JSON object in UTF-8") from None
    except RecursionError:
        raise RowError("the JSON is nested too deeply; expected a JSON object with fewer levels") from None
    except json.JSONDecodeError as error:
        raise RowError(
            f"is not valid JSON at character {error.colno} ({error.msg}); expected one JSON object per line"
        ) from None
    except ValueError:  # by default, Python does not convert integers of more than a few thousand digits
        raise RowError("has an integer with thousands of digits; expected smaller numbers") from None
    return as_record(record)


def as_record(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RowError(f"the row is {shown(value)}; expected a JSON object")
    return value


def present(record: Mapping[str, Any], field: str, expected: str) -> Any:
    if field not in record:
        columns = ", ".join(map(repr, record)) or "no columns"
        raise RowError(f"{field!r} is missing; expected {expected} (the row has {columns})")
    if record[field] is None:
        raise RowError(f"{field!r} is null; expected {expected}")
    return record[field]


def string(record: Mapping[str, Any], field: str) -> str:
    value = present(record, field, "a string")
    if not isinstance(value, str):
        raise RowError(f"{field!r} is {shown(value)}; expected a string")
    return check_encodable(value, field)


def check_encodable(text: str, field: str) -> str:
    """Return the text if it has no lone surrogate (half of a surrogate pair), else raise a `RowError`.

    JSON can encode a lone surrogate, but no tokenizer accepts it.
    """
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RowError(
                f"{field!r} has a lone surrogate (half of a character) at position {error.start + 1}; expected valid "
                "Unicode text"
            ) from None
    return text


def number(record: Mapping[str, Any], field: str) -> float:
    """Return the value of a field as a finite number. `true` and `false` count as 1 and 0."""
    value = present(record, field, "a number")
    if not isinstance(value, (int, float)) or not -LARGEST < value < LARGEST:
        raise RowError(f"{field!r} is {shown(value)}; expected a finite number")
    return float(value)


def integer(record: Mapping[str, Any], field: str, low: int, high: int) -> int:
    value = present(record, field, "an integer")
    if type(value) is not int or not low <= value <= high:
        raise RowError(f"{field!r} is {shown(value)}; expected an integer from {low} to {high}")
    return value


def items(record: Mapping[str, Any], field: str, expected: str) -> list[Any]:
    value = present(record, field, expected)
    if not isinstance(value, list):
        raise RowError(f"{field!r} is {shown(value)}; expected {expected}")
    return value


def token_ids(record: Mapping[str, Any], field: str) -> list[int]:
    ids = items(record, field, "a list of token ids")
    for index, value in enumerate(ids):
        if type(value) is not int or not 0 <= value < 2**31:
            raise RowError(f"{field}[{index}] is {shown(value)}; expected a token id (an integer of 0 or more)")
    return ids
