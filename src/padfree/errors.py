"""`UserError`: a mistake that a user can mend. Every other exception is a bug in padfree.

    batch.samples: 0; give 1 or more
    |              |  |
    setting        |  fix
                   value, problem or both

The commands print a `UserError` as that one line and end with exit code 1. They show the traceback of any other
exception, say that it is a bug, and end with exit code 70. Code of other people (a reward function, a chat template,
json, transformers) and the system (a full disk, a missing permission) raise what they like: whoever calls them knows
the setting that they belong to, catches their exceptions there, and raises a `UserError`.
"""

from __future__ import annotations

import difflib
import errno
import os
import platform
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from typing import Any, get_args

LONGEST_VALUE = 200
"""Characters of a value in a message."""

EXIT_BUG = 70
"""The exit code after a bug (EX_SOFTWARE); that of a `UserError` is 1."""


class UserError(ValueError):
    """`setting`: the name of a setting, flag, argument, column or variable. `fix`: what to do. If a
    `value` is given (it is `...` if not), it is shown before the `problem`, which may be an empty text then.

    A subclass of `ValueError`, so that a caller who catches that goes on working.
    """

    def __init__(self, setting: str, problem: str, fix: str, value: object = ...) -> None:
        super().__init__(setting, problem, fix, value)
        self.setting, self.value, self.problem, self.fix = setting, value, problem, fix

    def at(self, setting: str, argument: str | None = None) -> UserError:
        """The same error, located at another setting: `error.at("critic.path")`.

        With the name of an `argument` it is the caller's setting that stands for this argument; an error about
        anything else keeps its own name in the problem: `error.at("critic.path", "model")`.
        """
        if argument is None or self.setting == argument:
            return UserError(setting, self.problem, self.fix, self.value)
        return UserError(setting, str(UserError(self.setting, self.problem, "", self.value)), self.fix)

    @staticmethod
    def of(line: str) -> UserError:
        """The error whose line this is, for a line that came as text from a thread, a process or a server."""
        setting, colon, rest = line.partition(": ")
        problem, semicolon, fix = rest.rpartition("; ")
        return UserError(setting, problem, fix) if colon and semicolon else UserError("", line, "")

    def __str__(self) -> str:
        shown = "" if self.value is ... else shown_value(self.value)
        apart = " " if shown and self.problem and self.problem[0] not in ",:;" else ""
        facts = f"{shown}{apart}{self.problem}"
        line = f"{self.setting}: " * bool(self.setting) + facts + f"; {self.fix}" * bool(self.fix)
        return " ".join(line.splitlines())

    def __reduce__(self) -> tuple[Any, ...]:
        """Other processes get the value as text: it may be anything, and may be large."""
        line = str(UserError(self.setting, self.problem, "", self.value))
        return type(self), (self.setting, line.removeprefix(f"{self.setting}: "), self.fix)


def need(right: bool, setting: str, value: object, fix: str) -> None:
    """Refuse a value unless it is `right`."""
    if not right:
        raise UserError(setting, "", fix, value)


def check_choice(setting: str, value: object, choices: Any) -> None:
    """Refuse a value that is not among the `choices`, a `Literal` or a list of names."""
    names = get_args(choices) or tuple(choices)
    need(isinstance(value, str) and value in names, setting, value, f"give one of {', '.join(names)}")


def closest(value: str, names: Sequence[str]) -> str | None:
    """The name that was probably meant, if one is near."""
    found = difflib.get_close_matches(value, names, n=1, cutoff=0.5)
    return found[0] if found else None


def shown_value(value: object) -> str:
    """A value in a message, on one line and at most `LONGEST_VALUE` characters long."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}... ({len(text):,} characters)"


def shown_error(error: BaseException) -> str:
    """The first line of an exception's message, behind its class unless it is a `UserError`."""
    return first_line(error) if isinstance(error, UserError) else f"{type(error).__name__}: {first_line(error)}"


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or ["no message"])[0]


SYSTEM_FIXES = {
    errno.ENOSPC: "free space there, or choose another disk",
    errno.EDQUOT: "free space there, or raise the quota",
    errno.EFBIG: "choose a file system that takes larger files",
    errno.EACCES: "give the user of this process permission, or choose another path",
    errno.EPERM: "give the user of this process permission, or choose another path",
    errno.EROFS: "choose a path on a file system that can be written",
    errno.EMFILE: "raise the limit of open files, `ulimit -n`",
    errno.ENFILE: "close other programs, the system has no more open files to give",
    errno.ENOMEM: "free memory on this host",
    errno.EIO: "look at the disk, the system log says more",
    errno.ESTALE: "mount the file system again",
    errno.ENAMETOOLONG: "choose a shorter path",
}
"""Failures of the system that no correct program can avoid, and what a user does about them."""


def system_error(error: OSError, setting: str | None = None) -> UserError | None:
    """A failure of the system as a `UserError` at the setting, or at the file it is about; None: it may be a bug."""
    fix = SYSTEM_FIXES.get(error.errno or 0)
    if fix is None:
        return None
    file = None if error.filename is None else os.fsdecode(error.filename)
    if setting is None:
        return UserError(file or "system", error.strerror or str(error), fix)
    return UserError(setting, f"{f'{file}: ' if file else ''}{error.strerror or error}", fix)


def bug_note() -> str:
    """What follows the traceback of an exception that is not a `UserError`."""
    versions = [f"Python {platform.python_version()}"]
    for package in ("padfree", "torch", "transformers"):
        with suppress(metadata.PackageNotFoundError):
            versions.append(f"{package} {metadata.version(package)}")
    return (
        "this is a bug in padfree; report it at padfree's issue tracker with the traceback, the command and the "
        f"recipe ({', '.join(versions)})"
    )
