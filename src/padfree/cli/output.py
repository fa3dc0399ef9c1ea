"""Standard output and standard error of a run, which may fail in every way without a consequence for the run.

    run    -> write -> queue (bounded) -> thread -> pipe, file or terminal

A write never waits and never raises. The reader of a pipe may end (`| head`, Ctrl-C on `| tee`), the disk under a file
may be full, a terminal may be gone or stopped (Ctrl-S), a pipe may be full because nobody reads it, a descriptor may be
non-blocking, and an ASCII stream may be given other text. What was lost is said once, on the other stream; the run's
own files have all of it.

Commands whose result is what they print (`plan`, `--dry-run`) use plain streams: they wait for a slow reader, and a
reader that ends has seen enough.
"""

from __future__ import annotations

import errno
import io
import os
import select
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

MOST_CHARACTERS = 1 << 20
"""Of text that waits for its reader. More is left out."""

FLUSH_SECONDS, LAST_SECONDS = 0.2, 5.0
"""How long a flush waits for a reader that has kept up so far, and how long the end of a run waits for any reader."""


class SurvivingStream(io.TextIOBase):
    """A text stream that hands its text to a thread, which writes it to another stream."""

    def __init__(self, stream: TextIO, on_failure: Callable[[OSError | ValueError], None]) -> None:
        self.stream = stream
        self.failure: OSError | ValueError | None = None
        self._on_failure = on_failure
        self._texts: deque[str] = deque()
        self._waiting = 0  # characters, those that are being written included
        self._left_out = 0  # characters
        self._changed = threading.Condition()
        self._closing = self._stuck = False
        self._process = os.getpid()
        self._descriptor = _descriptor_of(stream)
        with suppress(OSError, ValueError):
            stream.flush()
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)
        self._thread.start()

    # What a text stream has

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(self.stream, "encoding", None) or "utf-8"

    @property
    def errors(self) -> str:  # type: ignore[override]
        return "backslashreplace"

    @property
    def buffer(self) -> Any:
        return self.stream.buffer

    def fileno(self) -> int:
        return self.stream.fileno()

    def isatty(self) -> bool:
        return self.stream.isatty()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if os.getpid() != self._process:  # forked: the thread stayed with the parent
            with suppress(OSError, ValueError):
                self._write(text)
            return len(text)
        with self._changed:
            if self.failure is None:
                if self._waiting + len(text) > MOST_CHARACTERS:
                    self._left_out += len(text)
                elif text:
                    self._texts.append(text)
                    self._waiting += len(text)
                    self._changed.notify_all()
        return len(text)

    def flush(self) -> None:
        if os.getpid() != self._process:
            return
        with self._changed:
            if not self._stuck and not self._changed.wait_for(self._is_written, FLUSH_SECONDS):
                self._stuck = True

    def finish(self) -> None:
        """Wait for the reader a last time, and end the thread unless it is in the middle of a write."""
        with self._changed:
            self._changed.wait_for(self._is_written, LAST_SECONDS)
            self._closing = True
            self._changed.notify_all()
        self._thread.join(FLUSH_SECONDS)

    # The thread

    def _is_written(self) -> bool:
        return self._waiting == 0 or self.failure is not None

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._texts or self._closing)
                if not self._texts:
                    return
                text = "".join(self._texts)
                self._texts.clear()
                size = len(text)
                if self._left_out:
                    text += f"\n... {self._left_out:,} characters are left out: the reader of the output was too slow\n"
                    self._left_out = 0
            try:
                self._write(text)
            except (OSError, ValueError) as error:
                with self._changed:
                    self.failure = error
                    self._texts.clear()
                    self._waiting = 0
                    self._changed.notify_all()
                self._on_failure(error)
                return
            with self._changed:
                self._waiting -= size
                self._stuck = False
                self._changed.notify_all()

    def _write(self, text: str) -> None:
        data = text.encode(self.encoding, "backslashreplace")
        if self._descriptor is None:
            self.stream.write(data.decode(self.encoding))
            self.stream.flush()
            return
        # Not through Python's buffer: a thread that is stuck inside it could not be left behind at the end.
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._descriptor, view) :]
            except BlockingIOError:  # somebody has made the descriptor non-blocking
                select.select([], [self._descriptor], [], 1.0)


def _descriptor_of(stream: TextIO) -> int | None:
    try:
        return stream.fileno()
    except (OSError, ValueError, AttributeError):
        return None


@contextmanager
def surviving_streams(command: str) -> Iterator[None]:
    """`sys.stdout` and `sys.stderr` for the length of a run."""
    before = sys.stdout, sys.stderr
    streams: list[SurvivingStream] = []

    def failed(name: str, error: OSError | ValueError) -> None:
        reason = getattr(error, "strerror", None) or error
        other = sys.stderr if name == "stdout" else sys.stdout
        other.write(
            f"padfree {command}: {name} cannot be written ({reason}); the run goes on without it, its folder has "
            "everything\n"
        )

    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None:
            made = SurvivingStream(stream, lambda error, name=name: failed(name, error))  # type: ignore[misc]
            streams.append(made)
            setattr(sys, name, made)
    try:
        yield
    finally:
        for each in streams:
            each.finish()
        sys.stdout, sys.stderr = before


def hold_standard_descriptors() -> None:
    """Put the null device in the place of a standard stream that is closed (`>&-`).

    Otherwise the next file that is opened gets its number, and whatever a library prints ends up in that file: in a
    checkpoint, say.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError as error:
            if error.errno != errno.EBADF:
                continue
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:  # a lower one is closed as well: it comes first, so this cannot be
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)
            if getattr(sys, name) is None:
                setattr(sys, name, open(number, "r" if number == 0 else "w", encoding="utf-8", closefd=False))  # noqa: SIM115


class NotedStream:
    """A plain stream that remembers how it failed, to tell its errors from those of other files."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.failure: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._noting():
            return self._stream.write(text)

    def flush(self) -> None:
        with self._noting():
            self._stream.flush()

    @contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.failure = error
            raise


@contextmanager
def noted_stdout() -> Iterator[NotedStream]:
    """`sys.stdout` of a command whose result is what it prints. What cannot be written is an error inside the block."""
    stream = sys.stdout if sys.stdout is not None else io.StringIO()
    noted: Any = NotedStream(stream)
    sys.stdout = noted
    try:
        yield noted
        noted.flush()
    finally:
        sys.stdout = stream
        if noted.failure is not None:
            leave(stream)


def leave(stream: TextIO) -> None:
    """Forget what a stream still holds, so that the interpreter does not fail to write it at its end."""
    descriptor = _descriptor_of(stream)
    if descriptor is not None:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, descriptor)
        os.close(null)
