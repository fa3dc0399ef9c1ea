"""A table of evenly spread responses of an RL run.

    lines of rollouts.jsonl    0 1 2 3 | 4 5 6 7 | 8 9 10 11     blocks of 4 lines, which most batches write
    lines in the table         0 1 2 3           | 8 9 10 11     here, every second block

A block can begin or end within a batch, because a small batch writes fewer lines. Each row names its batch. A table has
at most `MOST_ROWS` responses, with `MOST_LETTERS` characters in total. The middle of long texts is cut out. The file is
read line by line, because it can be larger than memory.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from padfree.tools.json_objects import parsed_object

Record = dict[str, Any]

MOST_ROWS = 400
MOST_LETTERS = 2_000_000
MOST_LETTERS_OF_TEXT = 20_000
BLOCK = 4
"""The report shows or omits this many consecutive lines of `rollouts.jsonl` together. Most batches write this many."""

FIRST = ("batch", "reward", "tokens", "ended", "turns", "leaves", "failure", "prompt", "response", "uid")
"""The first columns of the table, in this order. Other fields of the file follow as further columns."""

TEXTS = ("prompt", "response", "failure")
SHORT, MOST_COLUMNS = 200, 20
"""`SHORT`: the maximum number of characters of a cell, except in the columns of `TEXTS`. `MOST_COLUMNS`: the maximum
number of columns of the table."""

LARGEST = 1 << 53
NUMBERS = ("batch", "reward", "tokens", "turns", "leaves", "episode")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Responses:
    """Lines of `rollouts.jsonl` or `failures.jsonl` that were read (`rows`), and the number of all lines (`total`)."""

    rows: Sequence[Record]
    total: int
    broken: int = 0  # chosen lines that are not JSON objects


def read_responses(path: Path, most: int = MOST_ROWS) -> Responses:
    """Read at most `most` lines of an existing `rollouts.jsonl` or `failures.jsonl`."""
    with path.open("rb") as file:
        count = sum(1 for line in file if line.strip())
    chosen = set(shown_lines(count, most).tolist())
    rows: list[Record] = []
    broken = number = 0
    with path.open("rb") as file:
        for line in file:
            if not line.strip():
                continue
            if number in chosen:
                record = parsed_object(line.decode("utf-8", "replace"))
                broken += record is None
                if record is not None:
                    rows.append(record)
            number += 1
    return Responses(rows=rows, total=count, broken=broken)


def shown_lines(count: int, most: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Choose at most `most` of the `count` lines of a file, and return their indices in ascending order.

    The chosen lines form blocks of consecutive lines, spread evenly over the file, including its first and last block.
    """
    if count <= most:
        return np.arange(count)
    blocks = -(-count // BLOCK)
    kept = np.unique(np.linspace(0, blocks - 1, max(most // BLOCK, 1)).astype(np.int64))
    lines = (kept[:, None] * BLOCK + np.arange(BLOCK)).ravel() + count - blocks * BLOCK  # the last block is whole
    return lines[lines >= 0]


def table_of(rows: Sequence[Record], letters: int) -> tuple[list[str], list[list[Any]]]:
    """Return the column names of the table, and a list of cells for each record.

    A cell is a number, a text of at most about `letters` characters, or None.
    """
    names = dict.fromkeys(name for row in rows for name in row)
    columns = [*(name for name in FIRST if name in names), *(name for name in names if name not in FIRST)]
    columns = columns[:MOST_COLUMNS]
    return columns, [[_cell(name, row.get(name), letters) for name in columns] for row in rows]


def common_beginning(rows: Sequence[Record]) -> str:
    """Return the lines of text with which all prompts begin, e.g. the system message; "" if there are none."""
    prompts: list[str] = [row["prompt"] for row in rows if isinstance(row.get("prompt"), str)]
    if len(set(prompts)) < 2:
        return ""
    least, greatest = min(prompts), max(prompts)  # the common prefix of these two is common to all prompts
    same = next((i for i, pair in enumerate(zip(least, greatest, strict=False)) if pair[0] != pair[1]), len(least))
    return least[: least.rfind("\n", 0, same) + 1]


def without_beginning(rows: Sequence[Record], beginning: str) -> list[Record]:
    """Return copies of the responses, with `beginning` removed from the beginning of their prompts."""
    return [
        {**row, "prompt": row["prompt"].removeprefix(beginning)} if isinstance(row.get("prompt"), str) else row
        for row in rows
    ]


def _cell(name: str, value: Any, letters: int) -> Any:
    if value is None:
        return None
    if name in NUMBERS and isinstance(value, int | float) and not isinstance(value, bool):
        return value if abs(value) < LARGEST else None  # NaN and numbers that JavaScript rounds are left out
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return without_middle(text, letters if name in TEXTS else SHORT)


def without_middle(text: str, letters: int) -> str:
    """Cut the middle out of a text of more than `letters` characters, because the end of a response matters as well."""
    if len(text) <= letters:
        return text
    end = letters // 4
    return f"{text[: letters - end]}\n[… {len(text) - letters:,} characters omitted …]\n{text[len(text) - end :]}"
