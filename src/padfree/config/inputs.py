"""Paths that a user gives: expand `~`, tell files, folders and Hub ids apart, refuse what cannot be read.

Opening a FIFO blocks until another process writes to it, possibly for ever.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from pathlib import Path

from padfree.config.packaged import is_packaged
from padfree.errors import UserError, system_error

DATA_FILES = (".jsonl", ".json", ".parquet")
"""The suffixes of data files, in upper or lower case."""
SAVED = ("state.json", "dataset_dict.json")
"""The files that the datasets package writes into a folder with `save_to_disk`. The second has several splits."""
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


def user_path(path: str, setting: str) -> str:
    """Return the path with `~` expanded. Raise a `UserError` about `setting` for an empty path, a null character or an
    unknown home.
    """
    if not path.strip():
        raise UserError(setting, "is empty", "give a path", value=path)
    if "\0" in path:
        raise UserError(setting, "", "remove the null character", value=path)
    found = str(os.path.expanduser(path))  # a plain string, also for a `PathWord`
    if found.startswith("~"):
        fix = f"give the full path, or ./{path} if the name of the file begins with ~"
        raise UserError(setting, "names the home folder of an unknown user", fix, value=path)
    return found


class PathWord(str):
    """A path on the command line. `option`: the name of its option or argument, for error messages."""

    option: str


def path_word(option: str) -> Callable[[str], PathWord]:
    """Return the `type` of an argument of argparse that is a path. `padfree.cli.main` checks the path later."""

    def made(text: str) -> PathWord:
        word = PathWord(text)
        word.option = option
        return word

    return made


def is_data_file(path: str | Path) -> bool:
    return Path(path).suffix.lower() in DATA_FILES


def is_saved_dataset(folder: str | Path) -> bool:
    """Return whether a folder was written by `save_to_disk` of the datasets package."""
    return any(os.path.exists(os.path.join(folder, name)) for name in SAVED)


def is_hub_id(name: str) -> bool:
    """Return whether a data path is the id of a data set of the Hub: it is neither on disk nor a data file."""
    return not (is_data_file(name) or is_packaged(name) or os.path.exists(os.path.expanduser(name)))


def has_splits(name: str) -> bool:
    """Return whether a data path can have several splits: a Hub id, or a folder of `DatasetDict.save_to_disk`."""
    return is_hub_id(name) or os.path.exists(os.path.join(os.path.expanduser(name), SAVED[1]))


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
