"""Tokenised samples on disk, opened in no time by any number of processes.

    <cache>/<key>/  tokens.npy   int32 [T]     all samples end to end
                    mask.npy     bool  [T]
                    offsets.npy  int64 [N+1]   sample i is [offsets[i], offsets[i+1])
                    rows.npy     int64 [N, 2]  its file (a place in metadata's list) and line
                    numbers.npy  float64 [N]   where a row has a number: a margin or a label
                    skipped.jsonl              rows that could not be used
                    metadata.json              what the key was made of, counts, digests of tokens and mask

The key is a hash of what the tokens depend on: the content of the files, the tokenizer, the settings that change
tokens, the versions of transformers and tokenizers, the format of this folder. Whoever finds the folder finds it
complete: it is written beside and renamed into place. One that is damaged all the same (a file is gone, or shorter than
it was written) is made anew. A lock lets one process build while others that want the same wait for it.

Hashing a file means reading it, which for a large one takes longer than a start should. So a hash is remembered under
the file's path, size, inode and times of change. A file changed within two seconds of being hashed is not remembered,
since it may change once more within the resolution of the clock.
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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from padfree.data.records import SkippedRow
from padfree.data.sources import FileSource, RecordSource
from padfree.errors import UserError

FORMAT = 2
_SETTLED_NANOSECONDS = 2_000_000_000


def default_cache_folder() -> Path:
    """`$PADFREE_CACHE`, or `padfree` in the user's cache folder."""
    if folder := os.environ.get("PADFREE_CACHE"):
        return Path(folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "padfree"


def content_digest(source: RecordSource, cache: Path) -> str:
    """The hash of a source's content, remembered for a file that has not changed."""
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
    if now - max(status.st_mtime_ns, status.st_ctime_ns) > _SETTLED_NANOSECONDS:
        with contextlib.suppress(OSError):  # a cache may be there to be read only
            remembered.parent.mkdir(parents=True, exist_ok=True)
            written = remembered.with_name(f"{remembered.name}.{os.getpid()}")
            written.write_text(digest)
            written.replace(remembered)
    return digest


def tokenizer_digest(tokenizer: Any) -> str:
    """A hash of all that decides what a tokenizer makes of a text or a conversation."""
    identity: dict[str, Any] = {
        "class": type(tokenizer).__name__,
        "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "eos": tokenizer.eos_token_id,
        "template": tokenizer.chat_template,
    }
    if tokenizer.is_fast:
        # Padding and truncation change with every call that pads or truncates; they stand before the added tokens.
        _, name, backend = tokenizer.backend_tokenizer.to_str().partition('"added_tokens"')
        assert name
        identity["backend"] = hashlib.sha256(backend.encode()).hexdigest()
    else:
        with tempfile.TemporaryDirectory() as folder:
            files = [path for name in sorted(tokenizer.save_pretrained(folder)) if (path := Path(name)).is_file()]
            identity["files"] = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    return hash_of(identity)


def hash_of(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """One line for what a disk refuses."""
    try:
        yield
    except OSError as error:
        raise UserError(
            "cache",
            f"{error.filename or folder} cannot be written ({error.strerror or error})",
            "free space there, or set PADFREE_CACHE to another folder",
        ) from error


class ArrayWriter:
    """An .npy file that grows: the header is written again with the final length, in the same place."""

    def __init__(self, path: Path, dtype: np.dtype[Any], row_shape: tuple[int, ...] = ()) -> None:
        self._file: BinaryIO = open(path, "wb")  # noqa: SIM115  closed by close()
        self._dtype = dtype
        self._row_shape = row_shape
        self._digest = hashlib.sha256()
        self.length = 0
        self._header_length = self._write_header()

    def _write_header(self) -> int:
        shape = (self.length, *self._row_shape)
        header = {"descr": np.lib.format.dtype_to_descr(self._dtype), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(self._file, header)
        return self._file.tell()

    def append(self, array: NDArray[Any]) -> None:
        assert array.dtype == self._dtype
        assert array.shape[1:] == self._row_shape
        content = np.ascontiguousarray(array).data
        self._file.write(content)
        self._digest.update(content)
        self.length += len(array)

    @property
    def digest(self) -> str:
        """Of all that was appended."""
        return self._digest.hexdigest()

    def finish(self) -> None:
        """Write the header and wait until all is on disk: a rename must not overtake the content."""
        self._file.seek(0)
        length = self._write_header()
        assert length == self._header_length  # numpy leaves room in it for a first dimension of any size
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class Writer(contextlib.ExitStack):
    """The files of one folder. It is complete after `finish`."""

    def __init__(self, folder: Path, *, numbers: bool = False) -> None:
        super().__init__()
        self._folder = folder
        self._numbers: ArrayWriter | None = None
        with writing(folder):
            self._tokens = ArrayWriter(folder / "tokens.npy", np.dtype(np.int32))
            self._mask = ArrayWriter(folder / "mask.npy", np.dtype(np.bool_))
            self._offsets = ArrayWriter(folder / "offsets.npy", np.dtype(np.int64))
            self._rows = ArrayWriter(folder / "rows.npy", np.dtype(np.int64), (2,))
            if numbers:
                self._numbers = ArrayWriter(folder / "numbers.npy", np.dtype(np.float64))
            self._offsets.append(np.zeros(1, dtype=np.int64))
        for array in self._arrays:
            self.callback(self._close, array)
        self.skipped: list[SkippedRow] = []

    def _close(self, array: ArrayWriter) -> None:
        with writing(self._folder):  # closing writes what is still in memory
            array.close()

    @property
    def _arrays(self) -> tuple[ArrayWriter, ...]:
        found = (self._tokens, self._mask, self._offsets, self._rows)
        return found if self._numbers is None else (*found, self._numbers)

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
    ) -> None:
        """Samples of one file: their tokens and masks end to end, their lengths, lines and numbers."""
        assert len(tokens) == len(mask) == lengths.sum()
        with writing(self._folder):
            self._offsets.append(self._tokens.length + np.cumsum(lengths, dtype=np.int64))
            self._tokens.append(tokens)
            self._mask.append(mask)
            self._rows.append(np.stack([np.full_like(lines, file), lines], axis=1))
            if self._numbers is not None:
                assert numbers is not None
                self._numbers.append(numbers)

    def finish(self, metadata: Mapping[str, Any]) -> None:
        skipped = "".join(json.dumps(asdict(row)) + "\n" for row in self.skipped)
        counts = {
            "format": FORMAT,
            "samples": self.num_samples,
            "tokens": self._tokens.length,
            "digests": [array.digest for array in (self._tokens, self._mask, self._numbers) if array is not None],
            "numbers": self._numbers is not None,
            "skipped_bytes": len(skipped.encode()),
        }
        with writing(self._folder):
            for array in self._arrays:
                array.finish()
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
    """The folder of this key; `build` fills it if it is not there, or not `intact`.

    Of several processes one builds, the others wait.
    """
    folder = cache / key
    if intact(folder):
        return folder
    # A process that is being spawned imports the script that started it. If that leads here, it would wait for the
    # lock of the very process that waits for it. multiprocessing itself tells by this attribute.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise UserError("num_workers", "the script loads its data on import", "put it under if __name__ == '__main__'")
    with writing(cache):
        cache.mkdir(parents=True, exist_ok=True)
    with _locked(cache / f"{key}.lock"):
        if intact(folder):
            return folder
        with writing(cache):
            if folder.exists():
                shutil.rmtree(folder)
            beside = Path(tempfile.mkdtemp(prefix=f"{key}.building-", dir=cache))
        try:
            build(beside)
            with writing(cache):
                beside.chmod(0o777 & ~_umask())
                beside.rename(folder)
        except (OSError, UserError):
            # On a file system without locks another process may have been first; both built the same.
            if not intact(folder):
                raise
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    return folder


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Wait until no other process has the lock; on a file system without locks do not."""
    from filelock import FileLock

    lock = FileLock(path)
    with contextlib.suppress(NotImplementedError), writing(path):
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def is_whole(folder: Path) -> bool:
    """Whether all files are there and as long as they were written."""
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
        raise UserError("cache", f"{folder} has no metadata.json", "delete the folder, it will be made anew")
    try:
        metadata: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        known = isinstance(metadata["format"], int)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError("cache", f"{path} is damaged ({error})", "delete the folder, it will be made anew") from None
    if not known or metadata["format"] != FORMAT:
        raise UserError("cache", f"{folder} has format {metadata['format']}, not {FORMAT}", "tokenise the data again")
    return metadata


def read_skipped(folder: Path) -> list[SkippedRow]:
    with open(folder / "skipped.jsonl", encoding="utf-8") as file:
        return [SkippedRow(**json.loads(line)) for line in file]


def open_array(folder: Path, name: str, shape: tuple[int, ...]) -> NDArray[Any]:
    """One array of the folder, read from disk only where it is touched."""
    path = folder / f"{name}.npy"
    try:
        array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UserError("cache", f"{path} is damaged ({error})", f"delete {folder}, it will be made anew") from None
    if array.shape != shape:
        raise UserError(
            "cache", f"{path} has shape {array.shape}, not {shape}", f"delete {folder}, it will be made anew"
        )
    return array
