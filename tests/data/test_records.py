"""Parsing and checking rows: errors and their wording."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from padfree.data.records import (
    DataReport,
    RowError,
    SkippedRow,
    integer,
    items,
    number,
    parse_line,
    shown,
    string,
    token_ids,
)


def test_a_line_is_one_object_whatever_ends_it() -> None:
    for end in (b"", b"\n", b"\r\n", b"  \r\n"):
        assert parse_line(b'{"a": [1, "\xc3\xa9"]}' + end) == {"a": [1, "é"]}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"a": 1', r"is not valid JSON at character 8 .*; expected one JSON object"),
        (b'{"a": 1} {"b": 2}', r"is not valid JSON at character 10 \(Extra data\)"),
        (b"", r"is not valid JSON at character 1"),
        (b'{"a": "\xff\xfe"}', r"byte 8 is not UTF-8; expected"),
        (b"\xff\xfe{\x00", r"byte 1 is not UTF-8"),
        (b"[1, 2]", r"the row is a list of 2; expected a JSON object"),
        (b"null", r"the row is null"),
        (b'"text"', r"the row is 'text'"),
        (b"[" * 200_000, r"nested too deeply"),
        (b'{"a": ' + b"9" * 10_000 + b"}", r"an integer with thousands of digits"),
    ],
)
def test_a_malformed_line_says_where_and_what_was_expected(line: bytes, words: str) -> None:
    with pytest.raises(RowError, match=words):
        parse_line(line)


ROW: dict[str, Any] = {
    "null": None,
    "text": "x",
    "number": 1.5,
    "true": True,
    "nan": float("nan"),
    "infinite": float("inf"),
    "huge": 10**400,
    "list": [1, 2],
    "object": {},
    "surrogate": "a\ud800",
}


@pytest.mark.parametrize(
    ("check", "field", "words"),
    [
        (string, "missing", r"'missing' is missing; expected a string \(the row has 'null', 'text'"),
        (string, "null", r"'null' is null; expected a string"),
        (string, "number", r"'number' is 1\.5; expected a string"),
        (string, "list", r"'list' is a list of 2; expected a string"),
        (string, "object", r"'object' is an object; expected a string"),
        (string, "surrogate", r"'surrogate' has a lone surrogate .* at position 2"),
        (number, "missing", r"'missing' is missing; expected a number"),
        (number, "null", r"'null' is null; expected a number"),
        (number, "text", r"'text' is 'x'; expected a finite number"),
        (number, "nan", r"'nan' is nan; expected a finite number"),
        (number, "infinite", r"'infinite' is inf; expected a finite number"),
        (number, "huge", r"'huge' is a huge integer; expected a finite number"),
        (token_ids, "text", r"'text' is 'x'; expected a list of token ids"),
        (token_ids, "null", r"'null' is null; expected a list of token ids"),
    ],
)
def test_a_field_is_named_with_what_was_expected(
    check: Callable[[dict[str, Any], str], object], field: str, words: str
) -> None:
    with pytest.raises(RowError, match=words):
        check(ROW, field)


def test_what_is_right_is_returned() -> None:
    assert string(ROW, "text") == "x"
    assert string({"a": "é🙂"}, "a") == "é🙂"
    assert number(ROW, "number") == 1.5
    assert number(ROW, "true") == 1.0
    assert items(ROW, "list", "a list") == [1, 2]
    assert integer({"n": 3}, "n", 0, 3) == 3
    assert token_ids({"ids": [0, 2**31 - 1]}, "ids") == [0, 2**31 - 1]


@pytest.mark.parametrize("value", [-1, 4, True, 1.0, "1", 10**30])
def test_an_integer_is_in_its_range(value: object) -> None:
    with pytest.raises(RowError, match="expected an integer from 0 to 3"):
        integer({"n": value}, "n", 0, 3)


@pytest.mark.parametrize("value", [-1, 2**31, 10**30, True, 1.0, "1", None, [1]])
def test_a_token_id_is_an_integer_of_31_bits(value: object) -> None:
    with pytest.raises(RowError, match=r"ids\[1\] is .*; expected a token id"):
        token_ids({"ids": [5, value]}, "ids")


def test_shown_values_are_short_and_on_one_line() -> None:
    assert shown("a\nb" * 100) == r"'a\nba\nba\nba\nba\nba\nba\nba\nba\nb" + "..."
    assert len(shown("x" * 1000)) == 40


def test_the_report_accounts_for_every_row(tmp_path: Path) -> None:
    row = SkippedRow(file="é.jsonl", line=3, reason="no 'text'")
    report = DataReport(
        num_rows=4,
        num_samples=2,
        num_tokens=9,
        rows_per_file={"é.jsonl": 4},
        skipped=[row],
        dropped=[row],
        truncated=[row],
    )
    assert report.summary() == "4 rows: 2 samples, 9 tokens; 1 skipped, 1 dropped, 1 truncated"
    report.write(tmp_path / "rows.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line.pop("action") for line in lines] == ["skipped", "dropped", "truncated"]
    assert lines == [{"file": "é.jsonl", "line": 3, "reason": "no 'text'"}] * 3
    with pytest.raises(AssertionError):
        DataReport(num_rows=4, num_samples=3, num_tokens=9, rows_per_file={"a": 4})
