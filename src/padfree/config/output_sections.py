"""Whether what a command is asked to write can be written, tried before the work and not after it.

    check_output("report/page.html", "--html")       a file: its folder is there, and takes files
    check_folder("runs/first", "run.folder")         a folder: it is there and takes files, or it can be made

Permissions, read-only file systems and files in the way all look alike from here: a nameless temporary file is made in
the folder and is gone at once. Nothing that is there is changed.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from padfree.config.inputs import special_kind
from padfree.errors import UserError


def check_output(path: str | Path, name: str, *, makes_folder: bool = False) -> None:
    """Refuse a file that could not be written. `makes_folder`: whoever writes it makes the folder that it is in."""
    path = Path(path)
    kind = special_kind(path)
    if kind is not None and path != Path(os.devnull):  # opening a FIFO would wait for its reader
        raise UserError(name, f"{path} is {kind}", "give the name of a file")
    if path.is_dir():
        raise UserError(name, f"{path} is a folder", "give the name of a file")
    if makes_folder and not path.parent.exists():
        check_folder(path.parent, name)
        return
    try:
        if not path.parent.is_dir():
            cure = "give a file in a folder" if path.parent.exists() else "create it first"
            raise UserError(name, f"{path.parent} is no folder", cure)
        if path.exists():
            with path.open("ab"):
                pass
        else:
            _try_folder(path.parent)
    except OSError as error:
        raise UserError(name, f"{path} cannot be written ({error.strerror or error})", "give another file") from None


def check_folder(path: str | Path, name: str) -> None:
    """Refuse a folder that could not be made, or in which nothing could be written."""
    path = Path(path)
    try:
        with suppress(FileNotFoundError, NotADirectoryError):
            path.stat()  # a name that is too long, or a loop of links, is no folder that can be made
        nearest = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
        if not nearest.is_dir():
            raise UserError(name, f"{path}, but {nearest} is a file", "give another folder")
        _try_folder(nearest)
    except OSError as error:
        raise UserError(name, f"{path} cannot be written ({error.strerror or error})", "give another folder") from None


def _try_folder(folder: Path) -> None:
    with tempfile.TemporaryFile(dir=folder):
        pass
