"""How a setting that cannot be is refused, and how an error of other code is shown."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any, get_args

LONGEST_SECONDS = 1e8
"""Of a timeout, three years: what waits counts in nanoseconds, in 64 bits."""

SMALLEST_GIB, LARGEST_GIB = 2.0**-30, 2.0**20
"""Of memory: a byte, and a pebibyte."""


def need(right: bool, name: str, value: Any, cure: str) -> None:
    """One line with the setting, its value and the cure, unless it is right."""
    if not right:
        raise ValueError(f"{name}: {shown_value(value)}; {cure}")


def check_seconds(name: str, value: float) -> None:
    """Refuse what is not a time to wait."""
    need(0 < value <= LONGEST_SECONDS, name, value, f"give more than 0 seconds, {LONGEST_SECONDS:.0e} at most")


def shown_value(value: Any) -> str:
    """A value in a message, which is one line that can be read."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}... ({len(text):,} characters)"


LONGEST_VALUE = 200
"""Characters of a value in a message."""


def check_choice(name: str, value: object, choices: Any) -> None:
    """Refuse what is none of the `choices`, a `Literal` or a list of names."""
    names = get_args(choices) or tuple(choices)
    need(isinstance(value, str) and value in names, name, value, f"give one of {', '.join(names)}")


def closest(value: str, names: Sequence[str]) -> str | None:
    """The name that was probably meant, if one is near."""
    found = difflib.get_close_matches(value, names, n=1, cutoff=0.5)
    return found[0] if found else None


def shown_error(error: BaseException) -> str:
    """What kind of error it is, and the first line of its message."""
    return f"{type(error).__name__}: {first_line(error)}"


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or ["no message"])[0]
