"""Whether a file that a setting names can be read to its end: opening a FIFO waits for a writer, perhaps for ever."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from padfree.errors import UserError

KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
OPEN_ALREADY = re.compile(r"/dev/(stdin|stdout|stderr|fd/\d+)|/proc/(self|\d+)/fd/\d+")
"""Descriptors of this process under a name: a shell's `<(...)` and `/dev/stdin`."""


def special_kind(path: str | Path, *, once: bool = True) -> str | None:
    """What a path is if it is neither a file nor a folder; None also where nothing is there.

    What is used only once may be a descriptor of this process: None for its name.
    """
    if once and OPEN_ALREADY.fullmatch(str(path)):
        return None
    try:
        return KINDS.get(stat.S_IFMT(os.stat(path).st_mode))
    except (OSError, ValueError):
        return None  # whoever opens it says why


def check_regular(path: str | Path, setting: str, *, once: bool = True) -> None:
    """Refuse what would be waited for instead of read; of a folder, each entry. `once`: see `special_kind`."""
    if (kind := special_kind(path, once=once)) is not None:
        raise UserError(setting, f"{path} is {kind}, not a file", "give a file")
    if os.path.isdir(path):
        try:
            entries = sorted(os.listdir(path))
        except OSError as error:
            raise UserError(setting, f"{path} cannot be read ({error.strerror})", "make it readable") from None
        for entry in entries:
            if (kind := special_kind(os.path.join(path, entry))) is not None:
                raise UserError(setting, f"{os.path.join(path, entry)} is {kind}, not a file", "remove it")
