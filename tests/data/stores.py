"""Token stores with known content: rows of one or several samples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from padfree.data.store import Writer

Tokens = Sequence[int]
Made = tuple[Tokens, Sequence[int]]
"""Tokens of a sample, and its mask."""


def write_store(folder: Path, rows: Sequence[Sequence[Made]], name: str = "train.jsonl") -> Path:
    """Write rows with their samples, as lines 1, 2, ... of one file."""
    folder.mkdir(parents=True, exist_ok=True)
    with Writer(folder) as writer:
        for line, samples in enumerate(rows, start=1):
            writer.append(
                np.concatenate([np.array(tokens, dtype=np.int32) for tokens, _ in samples]),
                np.concatenate([np.array(mask, dtype=np.bool_) for _, mask in samples]),
                np.array([len(tokens) for tokens, _ in samples], dtype=np.int64),
                0,
                np.full(len(samples), line, dtype=np.int64),
            )
        writer.finish({"files": [{"name": name, "unit": "line", "rows": len(rows)}]})
    return folder


def conversation(seed: int, turns: int, *, system: int = 60, vocabulary: int = 40, thought: int = 20) -> list[Made]:
    """One sample per turn of a conversation whose template drops the reasoning of earlier turns.

    turn 2     system user-1 answer-1 user-2 | thought-2 answer-2          tokens after the bar are trained
    """
    rng = np.random.default_rng(seed)

    def new(length: int) -> list[int]:
        return rng.integers(0, vocabulary, length).tolist()

    context, found = new(system), []
    for _ in range(turns):
        context = context + new(12)
        answer = new(int(rng.integers(4, 9)))
        trained = new(thought) + answer
        found.append((context + trained, [0] * len(context) + [1] * len(trained)))
        context = context + answer
    return found
