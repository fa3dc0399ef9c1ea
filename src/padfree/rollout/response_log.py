"""Responses that came after the last checkpoint, on the disk: a run that is killed does not sample them again.

    checkpoint     10                                20
    training       |  11   12   13 ...               |  21 ...
    journal/       step-00000010.rank-00000.jsonl    step-00000020.rank-00000.jsonl
                   batches 11 12 13 ...              batches 21 ...

A part of the journal begins with every checkpoint: all before that is in the checkpoint, and is removed when it is
complete. A part is only ever appended to, one line for each response, or for those that were finished together:

    9f3ac01b {"step": 10, "weights": ..., "settings": ..., "before": [...]}       the first line: the part's origin
    04d2e7aa {"batch": 12, "responses": [{"number": 7, "prompt": ..., "tokens": ..., ...}]}

A line begins with its checksum; one that a kill has cut is passed over. Whatever is read comes from a part that began
with the weights and the settings that the run goes on with (`Origin`), or from parts that this one follows or that
follow it. The next steps are then made of the same responses, so that later versions of the policy are what they were.

Rewards are not in it: they are asked for again, by whatever the function is then.
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

from padfree.rollout.base import Response

NAME = re.compile(r"step-(\d{8,})\.rank-\d{5,}\.jsonl")
_CHECKSUM = 8

Tokens = NDArray[np.integer[Any]]
Kept = tuple[int, Tokens, Response]
"""The number of a response in its batch, the tokens that it follows, and the response."""

_Key = tuple[int, int, int]  # batch, number, and a checksum of the prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """What a part of the journal began with."""

    step: int
    weights: str  # a fingerprint
    settings: str  # a digest of all that decides what is sampled and trained

    @property
    def place(self) -> tuple[int, str]:
        return self.step, self.weights


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a response is: in which line of a file, and which of its responses."""

    path: Path
    offset: int
    index: int


@dataclass(slots=True, eq=False)
class _Part:
    """A part that is still needed."""

    weights: str
    highest: int = 0  # the last batch that it may have responses of


@dataclass(slots=True, eq=False)
class _Open:
    """The file that is written to."""

    origin: Origin
    path: Path
    before: list[tuple[int, str]]  # parts that are still needed
    file: int | None = None  # a descriptor, once there is something to write


@dataclass(slots=True, eq=False)
class ResponseLog:
    """The journal of a run, as one of its ranks sees it: it writes a file of its own, and reads those of all."""

    folder: Path
    rank: int
    failure: str | None = None  # why it could not be written: whoever calls must say so
    _index: dict[_Key, _Place] = field(default_factory=dict)
    _parts: dict[int, _Part] = field(default_factory=dict)  # by step
    _covered: dict[int, int] = field(default_factory=dict)  # by step of a checkpoint: the last batch that it covers
    _open: _Open | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _line: tuple[Path, int, dict[str, Any]] | None = None  # the one that was read last

    # Parts

    def purge(self, origin: Origin | None) -> int:
        """Remove what does not belong to a run that goes on from there, all with None; how many files. One rank."""
        kept = set() if origin is None else {path for path, _ in _belonging(self._files(), origin)}
        removed = [path for path in self._files() if path not in kept]
        for path in removed:
            path.unlink()
        return len(removed)

    def begin(self, origin: Origin, *, after: int) -> int:
        """Go on from there; how many responses there are of batches after this one. Every rank, after `purge`."""
        for path, head in _belonging(self._files(), origin):
            part = self._parts.setdefault(head["step"], _Part(head["weights"]))
            for offset, record in _records(path):
                part.highest = max(part.highest, record["batch"])
                for index, one in enumerate(record["responses"]):
                    if record["batch"] > after:
                        self._index[record["batch"], one["number"], one["prompt"]] = _Place(path, offset, index)
        self._start(origin, after=after)
        return len(self._index)

    def turn(self, origin: Origin, *, after: int, highest: int) -> None:
        """A checkpoint is being made that covers all batches up to `after`; `highest` is the last that was asked for.

        What comes from now on goes into a part of its own. The responses for the checkpoint are collected after this.
        """
        assert self._open is not None
        with self._lock:
            part = self._parts[self._open.origin.step]
            part.highest = max(part.highest, highest)
            self._close()
            self._start(origin, after=after)

    def drop(self, step: int) -> None:
        """The checkpoint of this step is complete: remove what it covers. One rank calls it."""
        covered = self._covered.get(step)
        if covered is None:
            return
        for earlier in [number for number, part in self._parts.items() if number < step and part.highest <= covered]:
            for path in self._files(earlier):
                path.unlink(missing_ok=True)
            del self._parts[earlier]

    def close(self) -> None:
        """No more is written; a file without a response is removed."""
        with self._lock:
            if self._open is None:
                return
            self._close()
            if self._open.path.exists() and not any(_records(self._open.path)):
                self._open.path.unlink()
            self._open = None
        with suppress(OSError):
            self.folder.rmdir()  # if nothing is left

    def _start(self, origin: Origin, *, after: int) -> None:
        self._covered[origin.step] = after
        path = self.folder / f"step-{origin.step:08d}.rank-{self.rank:05d}.jsonl"
        before = [(step, part.weights) for step, part in self._parts.items() if step < origin.step]
        self._open = _Open(origin, path, before)
        self._parts.setdefault(origin.step, _Part(origin.weights)).weights = origin.weights
        if self.rank == 0:  # the others' files begin with their first response
            self._create()

    def _create(self) -> None:
        """Open the file; one that is there goes on if it has the same origin."""
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
        elif os.pread(file, 1, size - 1) != b"\n":  # a line that a kill has cut
            _write(file, b"\n")

    def _close(self) -> None:
        if self._open is not None and self._open.file is not None:
            os.close(self._open.file)
            self._open.file = None

    def _files(self, step: int | None = None) -> list[Path]:
        """Those of a part, or of all."""
        if not self.folder.is_dir():
            return []
        found = sorted(path for path in self.folder.iterdir() if NAME.fullmatch(path.name))
        return [path for path in found if step is None or _step_of(path) == step]

    # Responses

    def keep(self, batch: int, responses: Sequence[Kept]) -> None:
        """Note responses that were finished together: either all of them are there, or none. Threads may call it."""
        rows = [
            {"number": number, "prompt": _checksum(tokens), **_encoded(response)}
            for number, tokens, response in responses
        ]
        line = _encoded_line({"batch": batch, "responses": rows})
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
                    f"run.folder: {self._open.path} cannot be written ({error.strerror or error}); free space or give "
                    "another folder"
                )

    def sync(self) -> None:
        """See that what was kept outlives the machine's end, too."""
        with self._lock:
            if self._open is not None and self._open.file is not None:
                os.fsync(self._open.file)

    def find(self, batch: int, number: int, tokens: Tokens) -> Response | None:
        """The response of this number that follows these tokens, whole or as far as it was written."""
        place = self._index.get((batch, number, _checksum(tokens)))
        if place is None:
            return None
        record = self._read(place)
        return None if record is None else _decoded(record["responses"][place.index])

    def _read(self, place: _Place) -> dict[str, Any] | None:
        if self._line is None or self._line[:2] != (place.path, place.offset):
            try:
                with place.path.open("rb") as file:
                    file.seek(place.offset)
                    record = _decoded_line(file.readline())
            except OSError:
                return None
            if record is None:
                return None
            self._line = place.path, place.offset, record
        return self._line[2]


# Files


def _step_of(path: Path) -> int:
    found = NAME.fullmatch(path.name)
    assert found is not None
    return int(found[1])


def _belonging(files: Iterable[Path], origin: Origin) -> list[tuple[Path, dict[str, Any]]]:
    """The files of parts that a run from there goes on with, and their heads; oldest first.

    The part that began there, those that it names as being before it, and those that name it.
    """
    heads = [(path, head) for path in files if (head := _head(path)) is not None]
    own = [head for _, head in heads if _origin_of(head) == origin]
    if not own:
        return []
    before = {(step, weights) for head in own for step, weights in head["before"]}

    def belongs(head: dict[str, Any]) -> bool:
        if head["settings"] != origin.settings:
            return False
        place = head["step"], head["weights"]
        return place == origin.place or place in before or list(origin.place) in head["before"]

    return [(path, head) for path, head in heads if belongs(head)]


def _head(path: Path) -> dict[str, Any] | None:
    """The first line of a file; None where that is none of ours."""
    try:
        with path.open("rb") as file:
            head = _decoded_line(file.readline())
    except OSError:
        return None
    return head if head is not None and {"step", "weights", "settings", "before"} <= head.keys() else None


def _origin_of(head: dict[str, Any]) -> Origin:
    return Origin(step=head["step"], weights=head["weights"], settings=head["settings"])


def _records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Where each line with responses begins, and what it says."""
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
    """None: the line is not whole."""
    text = line[_CHECKSUM + 1 :].rstrip(b"\n")
    try:
        whole = line.endswith(b"\n") and int(line[:_CHECKSUM], 16) == zlib.crc32(text)
        return json.loads(text) if whole else None
    except ValueError:
        return None


def _checksum(tokens: Tokens) -> int:
    return zlib.crc32(np.asarray(tokens, np.int64).tobytes())


def _encoded(response: Response) -> dict[str, Any]:
    """Every field; arrays [n] as their bytes, so that they come back to the bit."""
    found: dict[str, Any] = {}
    for about in fields(response):
        value = getattr(response, about.name)
        if isinstance(value, np.ndarray):
            assert value.ndim == 1
            value = {"dtype": value.dtype.str, "bytes": b64encode(value.tobytes()).decode()}
        found[about.name] = value
    return found


def _decoded(row: dict[str, Any]) -> Response:
    found: dict[str, Any] = {}
    for about in fields(Response):
        value = row[about.name]
        if isinstance(value, dict):
            value = np.frombuffer(b64decode(value["bytes"]), np.dtype(value["dtype"])).copy()
        found[about.name] = value
    return Response(**found)
