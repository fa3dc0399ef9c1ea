"""Find the data files of a folder.

    data/a.jsonl, data/B.JSONL, data/sub/c.parquet    read, sorted by path
    data/README.md, data/d.jsonl.gz                   left out, with a note
    data/.hidden.jsonl, data/.cache/                  left out

A link to a folder is followed, unless this folder is read anyway.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from padfree.config.inputs import is_data_file, is_saved_dataset
from padfree.config.packaged import is_packaged
from padfree.errors import UserError

MOST_NAMED = 5


def files_below(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the data files below a folder, sorted by path, and the files and links to folders that are left out."""
    read: list[Path] = []
    left_out: list[Path] = []
    for path in _visible(folder):
        (read if is_data_file(path) and not path.is_dir() else left_out).append(path)
    return sorted(read), sorted(left_out)


def _visible(folder: Path) -> Iterator[Path]:
    """Yield all files below a folder, and the links to folders that are not followed, without hidden ones."""

    def refuse(error: OSError) -> None:
        raise UserError(
            "data",
            f"the folder {error.filename} cannot be read ({error.strerror})",
            "make it readable, or move it out of the data folder",
        )

    known = {folder.resolve()}
    for base, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        here, followed = Path(base), []
        for name in sorted(name for name in folders if not name.startswith(".")):
            real = (here / name).resolve()
            if real in known:
                yield here / name
            else:
                known.add(real)
                followed.append(name)
        folders[:] = followed
        yield from (here / name for name in names if not name.startswith("."))


def left_out_notes(names: Iterable[str]) -> tuple[str, ...]:
    """Return a note for each folder of `data.path` with files that are not read.

    For example: `data: 2 files of data/ are left out: README.md, d.jsonl.gz`.
    """
    notes = []
    for name in names:
        folder = Path(name).expanduser()
        if is_packaged(name) or not folder.is_dir() or is_saved_dataset(folder):
            continue
        left_out = [path.relative_to(folder).as_posix() for path in files_below(folder)[1]]
        if left_out:
            more = f" and {len(left_out) - MOST_NAMED} more" if len(left_out) > MOST_NAMED else ""
            count = "1 file" if len(left_out) == 1 else f"{len(left_out)} files"
            verb = "is" if len(left_out) == 1 else "are"
            notes.append(f"data: {count} of {name} {verb} left out: {', '.join(left_out[:MOST_NAMED])}{more}")
    return tuple(notes)
