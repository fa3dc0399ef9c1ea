"""Tokenised samples on disk, memory-mapped by any number of processes. A folder holds N samples with T tokens:

    tokens.npy   int32 [T]     all samples end to end
    mask.npy     bool  [T]     which tokens are trained
    offsets.npy  int64 [N+1]   sample i is [offsets[i], offsets[i+1])
    rows.npy     int64 [N, 2]  file (index in the list of metadata.json) and line of each sample
    numbers.npy  float64 [N]   only if rows have a margin or a label
    image_*                    only if rows may have images: see `image_store`
    skipped.jsonl              rows that could not be used
    metadata.json              counts and hashes

The name of the folder is a hash of everything that the tokens depend on.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from padfree.config.inputs import user_path
from padfree.data.array_files import ArrayWriter, open_array, unusable_cache
from padfree.data.hashing import hash_of
from padfree.data.image_store import ImageWriter, ReadImage
from padfree.data.record_source import RecordSource
from padfree.data.records import SkippedRow
from padfree.data.sources import FileSource
from padfree.errors import UserError

FORMAT = 2
_MINIMUM_AGE = 2_000_000_000  # nanoseconds; the hash of a file that changed less than this before hashing is not cached


def default_cache_folder() -> Path:
    """Return the folder `$PADFREE_CACHE` if this variable is set, else `padfree` in the user's cache folder."""
    if folder := os.environ.get("PADFREE_CACHE"):
        return Path(user_path(folder, "PADFREE_CACHE"))
    return Path(user_path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "XDG_CACHE_HOME")) / "padfree"


def content_digest(source: RecordSource, cache: Path) -> str:
    """Return a hash of the content of a data file or Hub data set. A file's hash is cached until the file changes."""
    if not isinstance(source, FileSource):
        return source.digest()
    now = time.time_ns()
    status = source.path.stat()
    identity = (str(source.path.absolute()), status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns)
    remembered = cache / "digests" / hash_of(identity)
    with contextlib.suppress(OSError, UnicodeDecodeError):
        digest = remembered.read_text()
        if re.fullmatch("[0-9a-f]{64}", digest):  # else the file is damaged
            return digest
    digest = source.digest()
    # Another change in the same moment would have the same time stamp.
    if now - max(status.st_mtime_ns, status.st_ctime_ns) > _MINIMUM_AGE:
        with contextlib.suppress(OSError):  # the cache can be read-only
            remembered.parent.mkdir(parents=True, exist_ok=True)
            written = remembered.with_name(f"{remembered.name}.{os.getpid()}")
            written.write_text(digest)
            written.replace(remembered)
    return digest


def tokenizer_digest(tokenizer: Any) -> str:
    """Return a hash of everything that affects how a tokenizer encodes a text or renders a conversation."""
    identity: dict[str, Any] = {
        "class": type(tokenizer).__name__,
        "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "eos": tokenizer.eos_token_id,
        "template": tokenizer.chat_template,
    }
    if tokenizer.is_fast:
        # Hash the JSON text of the tokenizer from "added_tokens" on. The settings of padding and truncation come before
        # it, and are left out because every call of the tokenizer may change them.
        _, name, backend = tokenizer.backend_tokenizer.to_str().partition('"added_tokens"')
        assert name
        identity["backend"] = hashlib.sha256(backend.encode()).hexdigest()
    else:
        with tempfile.TemporaryDirectory() as folder:
            files = [path for name in sorted(tokenizer.save_pretrained(folder)) if (path := Path(name)).is_file()]
            identity["files"] = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    return hash_of(identity)


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Context manager that turns an `OSError` into a `UserError`, which names the file that could not be written.

    If the `OSError` names no file, the `UserError` names `folder`.
    """
    try:
        yield
    except OSError as error:
        raise UserError(
            "cache",
            f"{error.filename or folder} cannot be written ({error.strerror or error})",
            "free disk space or correct the permissions, or set PADFREE_CACHE to another folder",
        ) from error


class Writer(contextlib.ExitStack):
    """Writes the files of one folder of the token cache. The folder is complete after `finish`."""

    def __init__(self, folder: Path, *, numbers: bool = False, images: bool = False) -> None:
        super().__init__()
        self._folder = folder
        self._numbers: ArrayWriter | None = None
        self.images: ImageWriter | None = None
        with writing(folder):
            self._tokens = ArrayWriter(folder / "tokens.npy", np.dtype(np.int32))
            self._mask = ArrayWriter(folder / "mask.npy", np.dtype(np.bool_))
            self._offsets = ArrayWriter(folder / "offsets.npy", np.dtype(np.int64))
            self._rows = ArrayWriter(folder / "rows.npy", np.dtype(np.int64), (2,))
            if numbers:
                self._numbers = ArrayWriter(folder / "numbers.npy", np.dtype(np.float64))
            if images:
                self.images = ImageWriter(folder)
                self.callback(self.images.close)
            self._offsets.append(np.zeros(1, dtype=np.int64))
        for array in self._arrays:
            self.callback(self._close, array)
        self.skipped: list[SkippedRow] = []

    def _close(self, array: ArrayWriter) -> None:
        with writing(self._folder):  # closing flushes buffered data
            array.close()

    @property
    def _arrays(self) -> tuple[ArrayWriter, ...]:
        found = (self._tokens, self._mask, self._offsets, self._rows)
        images = () if self.images is None else self.images.arrays
        return (*found, *(() if self._numbers is None else (self._numbers,)), *images)

    @property
    def num_samples(self) -> int:
        return self._rows.length

    def append(
        self,
        tokens: NDArray[np.int32],
        mask: NDArray[np.bool_],
        lengths: NDArray[np.int64],
        file: int,
        lines: NDArray[np.int64],
        numbers: NDArray[np.float64] | None = None,
        images: Sequence[Sequence[ReadImage]] = (),
    ) -> None:
        """Append several samples of one file.

        `tokens` and `mask` hold the samples end to end. The other arrays have one entry per sample. `file`: the index
        of the file in metadata.json. `lines`: line numbers. `numbers`: margins or labels.
        """
        assert len(tokens) == len(mask) == lengths.sum()
        with writing(self._folder):
            self._offsets.append(self._tokens.length + np.cumsum(lengths, dtype=np.int64))
            self._tokens.append(tokens)
            self._mask.append(mask)
            self._rows.append(np.stack([np.full_like(lines, file), lines], axis=1))
            if self._numbers is not None:
                assert numbers is not None
                self._numbers.append(numbers)
            if self.images is not None:
                self.images.append(images)

    def finish(self, metadata: Mapping[str, Any]) -> None:
        skipped = "".join(json.dumps(asdict(row)) + "\n" for row in self.skipped)
        counts = {
            "format": FORMAT,
            "samples": self.num_samples,
            "tokens": self._tokens.length,
            "digests": [
                part.digest for part in (self._tokens, self._mask, self._numbers, self.images) if part is not None
            ],
            "numbers": self._numbers is not None,
            "skipped_bytes": len(skipped.encode()),
        }
        with writing(self._folder):
            for array in self._arrays:
                array.finish()
            if self.images is not None:
                counts["image_counts"] = self.images.finish()
            _write_text(self._folder / "skipped.jsonl", skipped)
            _write_text(self._folder / "metadata.json", json.dumps({**counts, **metadata}, indent=1, default=str))


def _write_text(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def find_or_build(
    cache: Path, key: str, build: Callable[[Path], None], *, intact: Callable[[Path], bool] = Path.exists
) -> Path:
    """Return the cache folder of `key`. If it is missing or `intact(folder)` is False, let `build` create it first.

    If several processes call this function, one of them builds the folder and the others wait.
    """
    folder = cache / key
    if intact(folder):
        return folder
    # A spawned worker process imports the main script. If this import calls `find_or_build`, the worker waits for the
    # lock of its parent, while the parent waits for the worker. multiprocessing sets the attribute `_inheriting` during
    # the import.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise UserError(
            "num_workers",
            "the main script loads its data when it is imported, and every worker process imports it",
            "put the call that loads data under if __name__ == '__main__', or set num_workers=0",
        )
    with writing(cache):
        cache.mkdir(parents=True, exist_ok=True)
    with _locked(cache / f"{key}.lock"):
        if intact(folder):
            return folder
        with writing(cache):
            if folder.exists():
                shutil.rmtree(folder)
            temporary = Path(tempfile.mkdtemp(prefix=f"{key}.building-", dir=cache))
        try:
            build(temporary)
            with writing(cache):
                temporary.chmod(0o777 & ~_umask())
                temporary.rename(folder)  # other processes never see an incomplete folder
        except (OSError, UserError):
            # On a file system without locks, another process can have built the same folder first.
            if not intact(folder):
                raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Context manager that holds the lock file `path`. On a file system without locks, it does nothing."""
    from filelock import FileLock

    lock = FileLock(path)
    with contextlib.suppress(NotImplementedError), writing(path):
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def is_whole(folder: Path) -> bool:
    """Return whether all files of a cache folder exist and have their full length."""
    if not folder.exists():
        return False
    try:
        metadata = read_metadata(folder)
        samples, tokens = int(metadata["samples"]), int(metadata["tokens"])
        for name, shape in (
            ("tokens", (tokens,)),
            ("mask", (tokens,)),
            ("offsets", (samples + 1,)),
            ("rows", (samples, 2)),
            *([("numbers", (samples,))] if metadata.get("numbers") else []),
        ):
            open_array(folder, name, shape)
        return (folder / "skipped.jsonl").stat().st_size == int(metadata["skipped_bytes"])
    except (ValueError, OSError, KeyError, TypeError):
        return False


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def read_metadata(folder: Path) -> dict[str, Any]:
    path = folder / "metadata.json"
    if not path.exists():
        raise unusable_cache(folder, f"{folder} has no metadata.json")
    try:
        metadata: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        known = isinstance(metadata["format"], int)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise unusable_cache(folder, f"{path} is damaged ({error})") from None
    if not known or metadata["format"] != FORMAT:
        version = metadata["format"]
        raise unusable_cache(folder, f"{folder} has format {version}, but this version reads format {FORMAT}")
    return metadata


def read_skipped(folder: Path) -> list[SkippedRow]:
    with open(folder / "skipped.jsonl", encoding="utf-8") as file:
        return [SkippedRow(**json.loads(line)) for line in file]
