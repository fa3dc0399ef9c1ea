"""Write the report of a command to the file that `--json` names, and show a status line while the command computes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from padfree.config.output_sections import check_output
from padfree.errors import UserError


def json_target(given: str | None, *, writes: bool = True) -> Path | None:
    """Return the path that the option `--json` gives, or None without this option.

    Raise a `UserError` if the file cannot be written. Processes that will not write the file (`writes` is False) skip
    this check.
    """
    if given is not None and writes:
        check_output(given, "--json")
    return None if given is None else Path(given)


def write_json(target: Path | None, report: dict[str, Any]) -> None:
    """Write the report to the file that `--json` names. Without `--json`, do nothing."""
    if target is None:
        return
    try:
        target.write_text(json.dumps(report, indent=2, default=str) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError("--json", f"{target} cannot be written ({error.strerror})", "give another file") from None


def show_status(line: str) -> None:
    """Show `line` in place of the previous status line, if the output is a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{line} ...", end="", file=sys.stderr, flush=True)


def clear_status() -> None:
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)
