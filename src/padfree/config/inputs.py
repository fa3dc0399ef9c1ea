"""Refuse FIFOs, sockets and devices among the files that a setting names, and files of a model that cannot be opened.

Opening a FIFO blocks until another process writes to it, possibly for ever.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from padfree.errors import UserError, system_error

KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
MODEL_FILES = (".json", ".jinja", ".model", ".safetensors", ".txt")
"""The suffixes of the files that padfree and transformers read from a model folder."""
OPEN_ALREADY = re.compile(r"/dev/(stdin|stdout|stderr|fd/\d+)|/proc/(self|\d+)/fd/\d+")
"""Matches paths of open file descriptors, such as `/dev/stdin` and a shell's `<(...)`."""


def special_kind(path: str | Path, *, once: bool = True) -> str | None:
    """Return the kind of a path that is a FIFO, socket or device, else None.

    `once`: the caller reads the path only once. An open file descriptor such as `/dev/stdin` is then allowed.
    """
    if once and OPEN_ALREADY.fullmatch(str(path)):
        return None
    try:
        return KINDS.get(stat.S_IFMT(os.stat(path).st_mode))
    except (OSError, ValueError):
        return None  # opening the path reports the error


def check_regular(path: str | Path, setting: str, *, once: bool = True) -> None:
    """Raise a `UserError` if reading `path` could block, because `path` is a FIFO, a socket or a device.

    `once`: the caller reads the path only once. An open file descriptor such as `/dev/stdin` is then allowed.
    """
    if (kind := special_kind(path, once=once)) is not None:
        raise UserError(setting, f"{path} is {kind}, not a file", "give a file")
    if os.path.isdir(path):
        try:
            entries = sorted(os.listdir(path))
        except OSError as error:
            raise UserError(setting, f"{path} cannot be read ({error.strerror})", "make the folder readable") from None
        for entry in entries:
            if (kind := special_kind(os.path.join(path, entry))) is not None:
                raise UserError(setting, f"{os.path.join(path, entry)} is {kind}, not a file", "move it away")


def check_readable(path: Path, setting: str) -> None:
    """Raise a `UserError` if the system does not let this process open a file of a model.

    `path`: a file, or the folder of the model. The readers of transformers would call such a file missing or damaged.
    """
    files = [entry for entry in sorted(path.iterdir()) if entry.suffix in MODEL_FILES] if path.is_dir() else [path]
    for file in files:
        try:
            with file.open("rb"):
                pass
        except OSError as error:
            reason = system_error(error, setting)
            if reason is not None:  # anything else, such as a broken link, is an error only if the file is needed
                raise reason from None
