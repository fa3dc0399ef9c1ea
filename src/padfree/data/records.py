"""One row of a data file: how it is parsed, how a field is checked, and what is said of a row that cannot be used.

    train.jsonl line 17: 'response' is null; expected a string
    ^^^^^^^^^^^ ^^^^^^^   ^^^^^^^^           ^^^^^^^^
    file        line       field             what was expected

A `RowError` knows the field and what was expected; who knows the file and the line puts them in front. What becomes of
a bad row is the caller's setting (`on_bad_row`): the first one stops the run, or each is skipped and listed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from padfree.errors import UserError

LARGEST = 1e38
"""Numbers end here: they become float32."""


class RowError(UserError):
    """What is wrong with one row, without the place of the row."""

    def __init__(self, reason: str) -> None:
        super().__init__("", reason, "")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.problem,)


_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def attempt(
    function: Callable[_Arguments, _Result], *arguments: _Arguments.args, **keywords: _Arguments.kwargs
) -> _Result | RowError:
    """What the function returns, or the `RowError` it raises, for work on many rows at once."""
    try:
        return function(*arguments, **keywords)
    except RowError as error:
        return error


@dataclass(frozen=True, kw_only=True, slots=True)
class SkippedRow:
    """A row that is not in the data set as it stands in its file, and why. `line` counts from 1."""

    file: str
    line: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class DataReport:
    """What became of every row: `num_rows` = used + skipped + dropped; the truncated rows are among the used ones.

    A used row gives one sample, or several. `used` is None if every used row gives one.
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
        """Rows that gave at least one sample."""
        return self.num_samples if self.used is None else self.used

    @staticmethod
    def merged(reports: Mapping[str, DataReport]) -> DataReport:
        """One report of several sources, by name; file names get the name of their source."""
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
        """`7473 rows: 7470 samples, 1234567 tokens; 2 skipped, 1 dropped, 4 truncated`"""
        return (
            f"{self.num_rows} rows: {self.num_samples} samples, {self.num_tokens} tokens; {len(self.skipped)} skipped, "
            f"{len(self.dropped)} dropped, {len(self.truncated)} truncated"
        )

    def write(self, path: str | Path) -> None:
        """Every skipped, dropped and truncated row as a line of JSON: action, file, line, reason."""
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
    """The label of a file, sample or group of the source `name` in a mixture: unique if the names are.

    source math     train.jsonl:18 -> math/train.jsonl:18        a.jsonl: a.jsonl:18 -> a.jsonl:18
    """
    text = str(label)
    return text if text == name or text.startswith(f"{name}:") else f"{name}/{text}"


def bad_row(row: SkippedRow, unit: str) -> UserError:
    return UserError(f"{row.file} {unit} {row.line}", f"{row.reason}", "correct it, or set data.on_bad_row=skip")


def shown(value: object) -> str:
    """A value in an error message: short, on one line, in JSON's words."""
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


def parse_line(line: bytes) -> dict[str, Any]:
    """One line of JSON Lines, with or without what ends it."""
    try:
        record = json.loads(line.rstrip(b"\r\n").decode("utf-8"))
    except UnicodeDecodeError as error:
        raise RowError(f"byte {error.start + 1} is not UTF-8; expected a JSON object in UTF-8") from None
    except RecursionError:
        raise RowError("nested too deeply; expected a JSON object") from None
    except json.JSONDecodeError as error:
        raise RowError(f"not JSON at column {error.colno} ({error.msg}); expected one JSON object") from None
    except ValueError:  # Python converts no integers of more than a few thousand digits
        raise RowError("an integer of thousands of digits; expected numbers a computer can hold") from None
    return as_record(record)


def as_record(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RowError(f"{shown(value)} as a row; expected a JSON object")
    return value


def present(record: Mapping[str, Any], field: str, expected: str) -> Any:
    if field not in record:
        raise RowError(f"no {field!r}; expected {expected} (the row has {', '.join(map(repr, record)) or 'no fields'})")
    if record[field] is None:
        raise RowError(f"{field!r} is null; expected {expected}")
    return record[field]


def string(record: Mapping[str, Any], field: str) -> str:
    value = present(record, field, "a string")
    if not isinstance(value, str):
        raise RowError(f"{field!r} is {shown(value)}; expected a string")
    return check_encodable(value, field)


def check_encodable(text: str, field: str) -> str:
    """JSON can spell half of a surrogate pair, which is no character and which no tokenizer takes."""
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RowError(
                f"{field!r} has a lone surrogate at character {error.start + 1}; expected Unicode text"
            ) from None
    return text


def number(record: Mapping[str, Any], field: str) -> float:
    """A finite number; true and false count as 1 and 0."""
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
