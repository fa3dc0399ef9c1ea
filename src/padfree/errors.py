"""`UserError`: a mistake that a user can fix. Every other exception is a bug in padfree.

The message of a `UserError` names the setting, the problem and the fix, as in `batch.samples: 0; give 1 or more`.
Commands print a `UserError` as one line and exit with code 1. They print any other exception with its traceback, and
exit with code 70.

Where padfree knows which setting is wrong, it converts exceptions of user code, libraries and the operating system to a
`UserError`.
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
"""The maximum number of characters of a value in an error message."""

EXIT_BUG = 70
"""The exit code after a bug (EX_SOFTWARE). The exit code after a `UserError` is 1."""


class UserError(ValueError):
    """A mistake that the user can fix.

    `setting`: the name of a setting, flag, argument, column or variable. `fix`: what to do. `value`, if given, is shown
    before `problem`, which may then be empty.
    """

    def __init__(self, setting: str, problem: str, fix: str, value: object = ...) -> None:
        super().__init__(setting, problem, fix, value)
        self.setting, self.value, self.problem, self.fix = setting, value, problem, fix

    def at(self, setting: str, argument: str | None = None) -> UserError:
        """Return a copy with another setting: `error.at("critic.path")` turns `model: is empty` into
        `critic.path: is empty`.

        If `argument` is given, only this name is replaced, and any other name stays: `error.at("critic.path", "model")`
        turns `dtype: is unknown` into `critic.path: dtype: is unknown`.
        """
        if argument is None or self.setting == argument:
            return UserError(setting, self.problem, self.fix, self.value)
        return UserError(setting, str(UserError(self.setting, self.problem, "", self.value)), self.fix)

    @staticmethod
    def of(line: str) -> UserError:
        """Make a `UserError` from the message of a `UserError` that another thread, process or server has sent."""
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
        """Pickle the error with its `value` as text, because the value itself may be too large or impossible to
        pickle.
        """
        line = str(UserError(self.setting, self.problem, "", self.value))
        return type(self), (self.setting, line.removeprefix(f"{self.setting}: "), self.fix)


def need(right: bool, setting: str, value: object, fix: str) -> None:
    """Raise a `UserError` unless `right` is true. The message shows `setting`, its `value` and `fix`, which says what
    to do.
    """
    if not right:
        raise UserError(setting, "", fix, value)


def check_choice(setting: str, value: object, choices: Any) -> None:
    """Raise a `UserError` if the value is not among the `choices`. `choices` is a `Literal` type or a list of names."""
    names = get_args(choices) or tuple(choices)
    need(isinstance(value, str) and value in names, setting, value, f"give one of {', '.join(names)}")


def closest(value: str, names: Sequence[str]) -> str | None:
    """Return the name that is most similar to `value`, or None if no name is similar. Messages ask "did you mean" this
    name.
    """
    found = difflib.get_close_matches(value, names, n=1, cutoff=0.5)
    return found[0] if found else None


def shown_value(value: object) -> str:
    """Format a value for a message: on one line, and cut to `LONGEST_VALUE` characters."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}... ({len(text):,} characters)"


def shown_error(error: BaseException) -> str:
    """Return the first line of an exception's message. Unless it is a `UserError`, the name of its class comes first.

    If `__str__` fails, return only the name of the class.
    """
    try:
        return first_line(error) if isinstance(error, UserError) else f"{type(error).__name__}: {first_line(error)}"
    except Exception:
        return type(error).__name__


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or ["no message"])[0]


SYSTEM_FIXES = {
    errno.ENOSPC: "free some space there, or choose another disk",
    errno.EDQUOT: "free some space there, or raise the quota",
    errno.EFBIG: "choose a file system that takes larger files",
    errno.EACCES: "give the user of this process permission, or choose another path",
    errno.EPERM: "give the user of this process permission, or choose another path",
    errno.EROFS: "choose a path on a file system that can be written",
    errno.EMFILE: "raise the limit of open files with `ulimit -n`",
    errno.ENFILE: "close other programs: the system limit of open files is reached",
    errno.ENOMEM: "free memory on this host",
    errno.EIO: "check the disk and the system log",
    errno.ESTALE: "mount the file system again",
    errno.ENAMETOOLONG: "choose a shorter path",
}
"""For each system error that is not a bug: what the user can do."""


def system_error(error: OSError, setting: str | None = None) -> UserError | None:
    """Convert a system error to a `UserError` about `setting` or, if `setting` is None, about the file that the error
    names.

    Returns None if the error may be a bug.
    """
    fix = SYSTEM_FIXES.get(error.errno or 0)
    if fix is None:
        return None
    file = None if error.filename is None else os.fsdecode(error.filename)
    if setting is None:
        return UserError(file or "system", error.strerror or str(error), fix)
    return UserError(setting, f"{f'{file}: ' if file else ''}{error.strerror or error}", fix)


def bug_note() -> str:
    """Return the note that is printed after the traceback of a bug."""
    versions = [f"Python {platform.python_version()}"]
    for package in ("padfree", "torch", "transformers"):
        with suppress(metadata.PackageNotFoundError):
            versions.append(f"{package} {metadata.version(package)}")
    return (
        "this is a bug in padfree; report it at padfree's issue tracker with the traceback, the command and the "
        f"recipe ({', '.join(versions)})"
    )
