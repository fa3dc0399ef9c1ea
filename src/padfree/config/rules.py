"""How a setting that cannot be is refused."""

from __future__ import annotations

from typing import Any


def need(right: bool, name: str, value: Any, cure: str) -> None:
    """One line with the setting, its value and the cure, unless it is right."""
    if not right:
        raise ValueError(f"{name}: {value!r}; {cure}")
