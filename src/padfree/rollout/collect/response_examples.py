"""Files of the run folder: `rollouts.jsonl` (a few responses of each batch), `failures.jsonl` (failed episodes)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from padfree.errors import UserError
from padfree.record.metrics_file import line_number
from padfree.rollout.environment.play import Played


class ResponseExamples:
    """A JSON Lines file with a batch number in each line. A resumed run removes the lines of the batches it repeats."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._trimmed = False

    def write(self, batch: int, examples: Sequence[dict[str, Any]]) -> None:
        lines = [json.dumps({"batch": batch, **one}, ensure_ascii=False) + "\n" for one in examples]
        try:
            if not self._trimmed:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self.path.write_text("".join(self._before(batch)), encoding="utf-8")
                self._trimmed = True
            with self.path.open("a", encoding="utf-8") as file:
                file.writelines(lines)
        except OSError as error:
            raise UserError(
                "run.folder",
                f"{self.path} cannot be written ({error.strerror or error})",
                "free disk space, or set another folder",
            ) from error

    def _before(self, batch: int) -> list[str]:
        """Return the complete lines of batches before `batch`."""
        kept: list[str] = []
        if self.path.exists():
            with self.path.open(encoding="utf-8", newline="\n") as file:  # a response may contain other line breaks
                for number, line in enumerate(file, start=1):
                    if not line.endswith("\n") or line_number(self.path, number, line, "batch") >= batch:
                        break
                    kept.append(line)
        return kept


def log_line(uid: str, prompt: str, played: Played, *, episodes: bool) -> dict[str, Any]:
    """Return a line for `rollouts.jsonl` that describes the first leaf (token sequence) of an episode.

    `episodes`: whether the run has an environment.
    """
    leaf = played.leaves[0]
    line = {
        "uid": uid,
        "prompt": prompt,
        "response": leaf.text,
        "reward": leaf.reward,
        "tokens": int(leaf.sampled.sum()),
        "ended": leaf.ended,
    }
    return {**line, "turns": leaf.turns, "leaves": len(played.leaves)} if episodes else line
