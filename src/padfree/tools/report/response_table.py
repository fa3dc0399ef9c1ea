"""Responses of an RL run, as many as a page can hold.

    rollouts.jsonl    0 1 2 3 | 4 5 6 7 | 8 9 10 11 | ...     a few lines a batch
    shown             0 1 2 3           | 8 9 10 11 | ...     blocks of lines, evenly over the file, its ends included

A page has at most `MOST_ROWS` responses and `MOST_LETTERS` letters of their texts; long texts lose their middle.
The page says how many responses are left out. The file is read line by line: it may be larger than memory.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Record = dict[str, Any]

MOST_ROWS = 400
MOST_LETTERS = 2_000_000
MOST_LETTERS_OF_TEXT = 20_000
BLOCK = 4
"""Lines that are shown or left out together: a batch writes so many."""

FIRST = ("batch", "reward", "tokens", "ended", "turns", "leaves", "failure", "prompt", "response", "uid")
"""Columns in this order; others that a file has stand behind them."""

TEXTS = ("prompt", "response", "failure")
SHORT, MOST_COLUMNS = 200, 20
"""Letters of a text in another column, and columns."""

LARGEST = 1 << 53
NUMBERS = ("batch", "reward", "tokens", "turns", "leaves", "episode")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Responses:
    """Lines of a file that are shown, and how many it has."""

    rows: Sequence[Record]
    total: int
    broken: int = 0  # of the lines that were looked at


def read_responses(path: Path, most: int = MOST_ROWS) -> Responses:
    """The file must be there."""
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
                record = _parsed(line)
                broken += record is None
                if record is not None:
                    rows.append(record)
            number += 1
    return Responses(rows=rows, total=count, broken=broken)


def shown_lines(count: int, most: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Which of `count` lines are shown: rising, `most` or fewer, in blocks, the first and the last block included."""
    if count <= most:
        return np.arange(count)
    blocks = -(-count // BLOCK)
    kept = np.unique(np.linspace(0, blocks - 1, max(most // BLOCK, 1)).astype(np.int64))
    lines = (kept[:, None] * BLOCK + np.arange(BLOCK)).ravel() + count - blocks * BLOCK  # the last block is whole
    return lines[lines >= 0]


def table_of(rows: Sequence[Record], letters: int) -> tuple[list[str], list[list[Any]]]:
    """Columns, and a cell for each: a number, a text of about `letters` or less, or None."""
    names = dict.fromkeys(name for row in rows for name in row)
    columns = [*(name for name in FIRST if name in names), *(name for name in names if name not in FIRST)]
    columns = columns[:MOST_COLUMNS]
    return columns, [[_cell(name, row.get(name), letters) for name in columns] for row in rows]


def common_beginning(rows: Sequence[Record]) -> str:
    """Whole lines with which every prompt begins: a chat template's header and system message, say."""
    prompts: list[str] = [row["prompt"] for row in rows if isinstance(row.get("prompt"), str)]
    if len(set(prompts)) < 2:
        return ""
    least, greatest = min(prompts), max(prompts)  # what these two share, all share
    same = next((i for i, pair in enumerate(zip(least, greatest, strict=False)) if pair[0] != pair[1]), len(least))
    return least[: least.rfind("\n", 0, same) + 1]


def without_beginning(rows: Sequence[Record], beginning: str) -> list[Record]:
    """Rows whose prompts leave this out."""
    return [
        {**row, "prompt": row["prompt"].removeprefix(beginning)} if isinstance(row.get("prompt"), str) else row
        for row in rows
    ]


def _cell(name: str, value: Any, letters: int) -> Any:
    if value is None:
        return None
    if name in NUMBERS and isinstance(value, int | float) and not isinstance(value, bool):
        return value if abs(value) < LARGEST else None  # neither NaN nor more than a page can tell apart
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return without_middle(text, letters if name in TEXTS else SHORT)


def without_middle(text: str, letters: int) -> str:
    """A text of more than `letters` without its middle: the end of a response is as telling as its beginning."""
    if len(text) <= letters:
        return text
    end = letters // 4
    return f"{text[: letters - end]}\n[… {len(text) - letters:,} characters left out …]\n{text[len(text) - end :]}"


def _parsed(line: bytes) -> Record | None:
    try:
        value = json.loads(line.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
