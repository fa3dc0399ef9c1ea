"""Read JSON objects from files that may contain anything, without raising an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def parsed_object(text: str) -> dict[str, Any] | None:
    """Parse a text as a JSON object. Return None if the text is not a JSON object."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def read_object(path: Path) -> dict[str, Any] | None:
    """Read a file with a JSON object. Return None if the file cannot be read, or does not contain a JSON object."""
    try:
        return parsed_object(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
