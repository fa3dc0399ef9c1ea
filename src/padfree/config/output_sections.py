"""Check that output files and folders can be written, before the work of a command begins.

    check_output("report/page.html", "--html")       a file: its folder exists and is writable
    check_folder("runs/first", "run.folder")         a folder: it exists and is writable, or it can be created

The checks create a temporary file in the folder and remove it at once. The checks thus detect missing permissions,
read-only file systems, and files in place of folders.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from padfree.config.inputs import special_kind
from padfree.errors import UserError


def check_output(path: str | Path, name: str, *, makes_folder: bool = False) -> None:
    """Raise a `UserError` if the file `path` cannot be written. `name` is the setting that gave the path.

    `makes_folder`: the caller creates the folder of the file if it does not exist.
    """
    path = Path(path)
    kind = special_kind(path)
    if kind is not None and path != Path(os.devnull):  # opening a FIFO blocks until another process reads it
        raise UserError(name, f"{path} is {kind}", "give the name of a file")
    if path.is_dir():
        raise UserError(name, f"{path} is a folder", "give the name of a file")
    if makes_folder and not path.parent.exists():
        check_folder(path.parent, name)
        return
    try:
        if not path.parent.is_dir():
            fix = "give a file in a folder" if path.parent.exists() else "create it first"
            raise UserError(name, f"{path.parent} is not a folder", fix)
        if path.exists():
            with path.open("ab"):
                pass
        else:
            _try_folder(path.parent)
    except OSError as error:
        raise UserError(name, f"{path} cannot be written ({error.strerror or error})", "give another file") from None


def check_folder(path: str | Path, name: str) -> None:
    """Raise a `UserError` if the folder `path` cannot be created or written to. `name`: the setting with this path."""
    path = Path(path)
    try:
        with suppress(FileNotFoundError, NotADirectoryError):
            path.stat()  # raises an error if the name is too long or links form a loop
        nearest = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
        if not nearest.is_dir():
            raise UserError(name, f"{path} cannot be created: {nearest} is a file", "give another folder")
        _try_folder(nearest)
    except OSError as error:
        raise UserError(name, f"{path} cannot be written ({error.strerror or error})", "give another folder") from None


def _try_folder(folder: Path) -> None:
    with tempfile.TemporaryFile(dir=folder):
        pass
