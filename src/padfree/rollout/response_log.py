"""The response log: responses sampled since the last checkpoint, on disk, so that a resumed run can use them again.

The resumed run then trains on the same responses, and gives the same weights. Rewards are computed again.

With every checkpoint, each rank starts a new file, e.g. `response_log/step-00000010.rank-00000.jsonl` after step 10.
The first line describes the run, and the other lines have responses. Each line starts with a checksum, so that a line
that was cut off is recognised:

    9f3ac01b {"step": 10, "weights": ..., "settings": ..., "before": [...]}
    04d2e7aa {"batch": 12, "responses": [{"number": 7, "prompt": ..., "tokens": ..., ...}]}
"""

from __future__ import annotations

import json
import os
import re
import threading
import zlib
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from padfree.kept_sets import KeptSets
from padfree.rollout.base import Response

NAME = re.compile(r"step-(\d{8,})\.rank-\d{5,}\.jsonl")
_CHECKSUM = 8

Tokens = NDArray[np.integer[Any]]
Kept = tuple[int, Tokens, Response]
"""A response to store: its number in the batch, the tokens of its prompt, and the response."""

_Key = tuple[int, int, int]  # batch, number, and a checksum of the prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """The state of a run when it starts a new log file: its step, weights and settings."""

    step: int
    weights: str  # a fingerprint
    settings: str  # a digest of all settings that affect sampling and training

    @property
    def point(self) -> tuple[int, str]:
        return self.step, self.weights


@dataclass(frozen=True, slots=True)
class _Location:
    """Where a response is stored: the offset of its line in a file, and its index in this line."""

    path: Path
    offset: int
    index: int


@dataclass(slots=True, eq=False)
class _Part:
    """A part of the response log: the responses after one checkpoint. A resumed run may need it."""

    weights: str
    highest: int = 0  # the last batch whose responses this part may contain


@dataclass(slots=True, eq=False)
class _Open:
    """The file of the response log to which this rank currently writes."""

    origin: Origin
    path: Path
    before: list[tuple[int, str]]  # (step, weights) of the earlier parts that are still needed
    file: int | None = None  # a file descriptor, opened by the first write


@dataclass(slots=True, eq=False)
class ResponseLog:
    """The response log of a run on one rank. Each rank writes its own file and reads the files of all ranks."""

    folder: Path
    rank: int
    failure: str | None = None  # error message of a failed write; the caller must raise it
    _index: dict[_Key, _Location] = field(default_factory=dict)
    _parts: dict[int, _Part] = field(default_factory=dict)  # parts by the step at which they start
    _covered: dict[int, int] = field(default_factory=dict)  # by step of a checkpoint: the last batch that it covers
    _open: _Open | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _line: tuple[Path, int, dict[str, Any]] | None = None  # the last line that was read

    # Parts

    def purge(self, origin: Origin | None) -> int:
        """Remove the files that the run cannot reuse, and return their number. Call this on one rank only.

        `origin`: the checkpoint from which the run resumes. None: the run is new, and all files are removed.
        """
        kept = set() if origin is None else {path for path, _ in _belonging(self._files(), origin)}
        removed = [path for path in self._files() if path not in kept]
        for path in removed:
            path.unlink()
        return len(removed)

    def begin(self, origin: Origin, *, after: int) -> int:
        """Start logging, and return the number of stored responses that this run can use again.

        `origin`: the state with which the run starts or resumes. `after`: the last batch whose responses the run does
        not need. Call this on every rank, after `purge`.
        """
        for path, head in _belonging(self._files(), origin):
            part = self._parts.setdefault(head["step"], _Part(head["weights"]))
            for offset, record in _records(path):
                part.highest = max(part.highest, record["batch"])
                for index, one in enumerate(record["responses"]):
                    if record["batch"] > after:
                        self._index[record["batch"], one["number"], one["prompt"]] = _Location(path, offset, index)
        self._start(origin, after=after)
        return len(self._index)

    def turn(self, origin: Origin, *, after: int, highest: int) -> None:
        """Start a new log file for a checkpoint. Call this before the state of the checkpoint is collected.

        `after`: the last batch before the checkpoint. `highest`: the newest batch for which responses have been
        requested.
        """
        assert self._open is not None
        with self._lock:
            part = self._parts[self._open.origin.step]
            part.highest = max(part.highest, highest)
            self._close()
            self._start(origin, after=after)

    def drop(self, step: int) -> None:
        """Remove log files from before a complete checkpoint, except those with responses for batches after it.

        `step`: the step of the checkpoint. Call this on one rank only.
        """
        covered = self._covered.get(step)
        if covered is None:
            return
        for earlier in [number for number, part in self._parts.items() if number < step and part.highest <= covered]:
            for path in self._files(earlier):
                path.unlink(missing_ok=True)
            del self._parts[earlier]

    def close(self) -> None:
        """Stop writing, and remove this rank's current file if it has no responses."""
        with self._lock:
            if self._open is None:
                return
            self._close()
            if self._open.path.exists() and not any(_records(self._open.path)):
                self._open.path.unlink()
            self._open = None
        with suppress(OSError):
            self.folder.rmdir()  # if it is empty

    def remove(self) -> None:
        """Remove the log files of all ranks. Call this on one rank only, after `close`."""
        self.purge(None)
        with suppress(OSError):
            self.folder.rmdir()  # if it is empty

    def _start(self, origin: Origin, *, after: int) -> None:
        self._covered[origin.step] = after
        path = self.folder / f"step-{origin.step:08d}.rank-{self.rank:05d}.jsonl"
        before = [(step, part.weights) for step, part in self._parts.items() if step < origin.step]
        self._open = _Open(origin, path, before)
        self._parts.setdefault(origin.step, _Part(origin.weights)).weights = origin.weights
        if self.rank == 0:  # other ranks create their file with their first response
            self._create()

    def _create(self) -> None:
        """Open this rank's log file for appending.

        Replace an existing file if its first line has another step, other weights or other settings than this run.
        """
        assert self._open is not None
        origin, path = self._open.origin, self._open.path
        self.folder.mkdir(parents=True, exist_ok=True)
        head = _head(path)
        if head is None or _origin_of(head) != origin:
            path.unlink(missing_ok=True)
        file = self._open.file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        size = os.fstat(file).st_size
        if not size:
            _write(file, _encoded_line({**asdict(origin), "before": self._open.before}))
        elif os.pread(file, 1, size - 1) != b"\n":  # the last line was cut off when the run was killed
            _write(file, b"\n")

    def _close(self) -> None:
        if self._open is not None and self._open.file is not None:
            os.close(self._open.file)
            self._open.file = None

    def _files(self, step: int | None = None) -> list[Path]:
        """Return the log files (of all ranks) that begin at step `step`, or all log files if `step` is None."""
        if not self.folder.is_dir():
            return []
        files = sorted(path for path in self.folder.iterdir() if NAME.fullmatch(path.name))
        return [path for path in files if step is None or _step_of(path) == step]

    # Responses

    def keep(self, batch: int, responses: Sequence[Kept]) -> None:
        """Store responses that finished together, atomically: a reader finds all or none of them. Thread-safe."""
        entries = [
            {"number": number, "prompt": _checksum(tokens), **_encoded(response)}
            for number, tokens, response in responses
        ]
        line = _encoded_line({"batch": batch, "responses": entries})
        with self._lock:
            if self._open is None or self.failure is not None:
                return
            try:
                if self._open.file is None:
                    self._create()
                assert self._open.file is not None
                _write(self._open.file, line)
            except OSError as error:
                self.failure = (
                    f"run.folder: {self._open.path} cannot be written ({error.strerror or error}); free disk space, or "
                    "set another folder"
                )

    def sync(self) -> None:
        """Flush the file to disk, so that the responses survive a crash of the machine."""
        with self._lock:
            if self._open is not None and self._open.file is not None:
                os.fsync(self._open.file)

    def find(self, batch: int, number: int, tokens: Tokens) -> Response | None:
        """Return the stored response, complete or partial, of episode `number` of batch `batch`, or None.

        A stored response is returned only if its prompt has the token ids `tokens`.
        """
        location = self._index.get((batch, number, _checksum(tokens)))
        if location is None:
            return None
        record = self._read(location)
        return None if record is None else _decoded(record["responses"][location.index])

    def _read(self, location: _Location) -> dict[str, Any] | None:
        if self._line is None or self._line[:2] != (location.path, location.offset):
            try:
                with location.path.open("rb") as file:
                    file.seek(location.offset)
                    record = _decoded_line(file.readline())
            except OSError:
                return None
            if record is None:
                return None
            self._line = location.path, location.offset, record
        return self._line[2]


# Files


def _step_of(path: Path) -> int:
    found = NAME.fullmatch(path.name)
    assert found is not None
    return int(found[1])


def _belonging(files: Iterable[Path], origin: Origin) -> list[tuple[Path, dict[str, Any]]]:
    """Return the log files that can be reused if a run resumes at `origin`, each with its first line.

    If no file starts at `origin`, the result is empty. Otherwise, it also has the earlier and later files of the same
    run.
    """
    heads = [(path, head) for path in files if (head := _head(path)) is not None]
    own = [head for _, head in heads if _origin_of(head) == origin]
    if not own:
        return []
    # The field `before` of a file lists the step and weights of earlier files of the same run.
    before = {(step, weights) for head in own for step, weights in head["before"]}

    def belongs(head: dict[str, Any]) -> bool:
        if head["settings"] != origin.settings:
            return False
        point = head["step"], head["weights"]
        return point == origin.point or point in before or list(origin.point) in head["before"]

    return [(path, head) for path, head in heads if belongs(head)]


def _head(path: Path) -> dict[str, Any] | None:
    """Return the content of a file's first line; None if the line is not a valid first line of a response log."""
    try:
        with path.open("rb") as file:
            head = _decoded_line(file.readline())
    except OSError:
        return None
    return head if head is not None and {"step", "weights", "settings", "before"} <= head.keys() else None


def _origin_of(head: dict[str, Any]) -> Origin:
    return Origin(step=head["step"], weights=head["weights"], settings=head["settings"])


def _records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each line with responses: its offset in the file, and its content."""
    with path.open("rb") as file:
        offset = 0
        for line in file:
            record = _decoded_line(line)
            if record is not None and "responses" in record:
                yield offset, record
            offset += len(line)


def _write(file: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(file, rest) :]


# Lines


def _encoded_line(values: dict[str, Any]) -> bytes:
    text = json.dumps(values, separators=(",", ":")).encode()
    return f"{zlib.crc32(text):0{_CHECKSUM}x} ".encode() + text + b"\n"


def _decoded_line(line: bytes) -> dict[str, Any] | None:
    """Return the JSON content of a line; None if the line is incomplete or damaged."""
    text = line[_CHECKSUM + 1 :].rstrip(b"\n")
    try:
        whole = line.endswith(b"\n") and int(line[:_CHECKSUM], 16) == zlib.crc32(text)
        return json.loads(text) if whole else None
    except ValueError:
        return None


def _checksum(tokens: Tokens) -> int:
    return zlib.crc32(np.asarray(tokens, np.int64).tobytes())


def _encoded(response: Response) -> dict[str, Any]:
    """Return all fields of a response as JSON values. The bytes of arrays are encoded in base64, without loss."""
    entry: dict[str, Any] = {}
    for item in fields(response):
        value = getattr(response, item.name)
        if isinstance(value, KeptSets):
            value = {"counts": _encoded_array(value.counts), "ids": _encoded_array(value.ids)}
        elif isinstance(value, np.ndarray):
            value = _encoded_array(value)
        entry[item.name] = value
    return entry


def _encoded_array(array: NDArray[Any]) -> dict[str, Any]:
    shape = {} if array.ndim == 1 else {"shape": array.shape}
    return {"dtype": array.dtype.str, "bytes": b64encode(array.tobytes()).decode(), **shape}


def _decoded_array(entry: dict[str, Any]) -> NDArray[Any]:
    flat = np.frombuffer(b64decode(entry["bytes"]), np.dtype(entry["dtype"]))
    return flat.reshape(entry.get("shape", [-1])).copy()


def _decoded(entry: dict[str, Any]) -> Response:
    values: dict[str, Any] = {}
    for item in fields(Response):
        value = entry.get(item.name)
        if isinstance(value, dict):
            value = (
                KeptSets(_decoded_array(value["counts"]), _decoded_array(value["ids"]))
                if "counts" in value
                else _decoded_array(value)
            )
        values[item.name] = value
    return Response(**values)
