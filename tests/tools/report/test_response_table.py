"""The responses that a page shows, and how they are shortened."""

from __future__ import annotations

from pathlib import Path

import pytest

from padfree.tools.report.response_table import (
    common_beginning,
    read_responses,
    shown_lines,
    table_of,
    without_beginning,
    without_middle,
)
from tests.tools.report.run_folders import write_lines


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 100, 4001])
@pytest.mark.parametrize("most", [8, 40, 400])
def test_lines_are_spread_over_the_file(count: int, most: int) -> None:
    lines = shown_lines(count, most).tolist()
    assert lines == sorted(set(lines))
    assert len(lines) <= most
    assert len(lines) == count or len(lines) > most - 4
    if lines:
        assert (lines[0], lines[-1]) == (0, count - 1)


def test_broken_and_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    path.write_bytes(b'{"batch": 0}\n\n[1]\n\xff\n{"batch": 1}\n{"a":' + b"[" * 100_000)
    found = read_responses(path)
    assert [row["batch"] for row in found.rows] == [0, 1]
    assert (found.total, found.broken) == (5, 3)
    assert read_responses(write_lines(tmp_path / "none.jsonl", [])).rows == []


def test_cells_of_any_value() -> None:
    rows = [
        {"batch": 1, "reward": float("nan"), "prompt": "a" * 50, "other": {"x": None}, "ended": True},
        {"batch": 10**400, "reward": "high", "response": None, "uid": "b" * 300},
    ]
    columns, cells = table_of(rows, 20)
    assert columns == ["batch", "reward", "ended", "prompt", "response", "uid", "other"]
    assert cells[0][:3] == [1, None, "yes"]
    assert cells[0][3].startswith("a" * 15 + "\n[… 30 characters omitted …]")
    assert cells[0][-1] == '{"x": null}'
    assert cells[1][:5] == [None, "high", None, None, None]
    assert len(cells[1][5]) < 250
    many = [{f"column {number}": number for number in range(1000)}]
    assert len(table_of(many, 20)[0]) == 20


def test_a_long_text_keeps_both_ends() -> None:
    assert without_middle("short", 5) == "short"
    assert without_middle("0123456789", 8) == "012345\n[… 2 characters omitted …]\n89"


def test_the_beginning_of_all_prompts() -> None:
    rows = [{"prompt": "system\nbe kind\nuser\nHello"}, {"prompt": "system\nbe kind\nuser\nHelp"}, {"reward": 1}]
    assert common_beginning(rows) == "system\nbe kind\nuser\n"
    assert [row.get("prompt") for row in without_beginning(rows, common_beginning(rows))] == ["Hello", "Help", None]
    assert common_beginning(rows[:1] * 2) == common_beginning([]) == ""
    assert common_beginning([{"prompt": "Hello"}, {"prompt": "Help"}]) == ""
