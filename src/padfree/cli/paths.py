"""Paths on the command line. Each command declares its path arguments with `path_word`; `main` checks all of them.

add("--page", type=path_word("--page"))     settings.page: a `PathWord`, and a checked path after `expand_paths`
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from padfree.cli.flags import without_mark
from padfree.config.inputs import user_path


class PathWord(str):
    """A path on the command line. `option`: the name of its option or argument, for error messages."""

    option: str


def path_word(option: str) -> Callable[[str], PathWord]:
    """Return the `type` of an argument of argparse that is a path. The path is not checked yet."""

    def made(text: str) -> PathWord:
        word = PathWord(without_mark(text))
        word.option = option
        return word

    return made


def expand_paths(settings: argparse.Namespace) -> None:
    """Expand `~` in all path arguments. Raise a `UserError` if one is empty or names an unknown home."""
    for name, value in vars(settings).items():
        setattr(settings, name, _expanded(value))


def _expanded(value: Any) -> Any:
    if isinstance(value, list):
        return [_expanded(entry) for entry in value]
    return user_path(value, value.option) if isinstance(value, PathWord) else value
