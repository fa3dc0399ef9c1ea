"""Standard output and standard error of a run. If writing to them fails, the run continues.

    run    -> write -> queue (bounded) -> thread -> pipe, file or terminal

A write never blocks and never raises, even if the reader of a pipe ends or a terminal is stopped (Ctrl-S). If stdout
fails, stderr gets one message that says so. If stderr fails, stdout gets the message.

Commands whose result is their output (`plan`, `--dry-run`) use plain streams. They wait for a slow reader, and they end
when the reader ends.
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
"""Maximum number of characters in the queue. More text is dropped."""

FLUSH_SECONDS, LAST_SECONDS = 0.2, 5.0
"""Maximum seconds to wait for a slow reader of the output: `FLUSH_SECONDS` in a flush, `LAST_SECONDS` at the end of a
run."""


class SurvivingStream(io.TextIOBase):
    """A text stream whose writes never block or fail: a background thread passes the text on to `stream`."""

    def __init__(self, stream: TextIO, on_failure: Callable[[OSError | ValueError], None]) -> None:
        self.stream = stream
        self.failure: OSError | ValueError | None = None
        self._on_failure = on_failure
        self._texts: deque[str] = deque()
        self._waiting = 0  # number of characters in the queue or being written
        self._left_out = 0  # number of characters that were dropped
        self._changed = threading.Condition()
        self._closing = self._stuck = False
        self._process = os.getpid()
        self._descriptor = _descriptor_of(stream)
        with suppress(OSError, ValueError):
            stream.flush()
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)
        self._thread.start()

    # The interface of a text stream

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
        if os.getpid() != self._process:  # a forked process does not have the thread
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
        """Wait at most `LAST_SECONDS` until all queued text is written, and end the writing thread.

        A thread whose write is blocked, e.g. by a stopped terminal, does not end.
        """
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
                    text += f"\n... {self._left_out:,} characters were dropped: the reader of the output was too slow\n"
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
        # Bypass Python's buffer: a thread that blocks while it holds the buffer's lock would block the process's exit.
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._descriptor, view) :]
            except BlockingIOError:  # the descriptor is non-blocking
                select.select([], [self._descriptor], [], 1.0)


def _descriptor_of(stream: TextIO) -> int | None:
    try:
        return stream.fileno()
    except (OSError, ValueError, AttributeError):
        return None


@contextmanager
def surviving_streams(command: str) -> Iterator[None]:
    """Context manager that replaces `sys.stdout` and `sys.stderr` by streams whose failure does not end the run."""
    before = sys.stdout, sys.stderr
    streams: list[SurvivingStream] = []

    def failed(name: str, error: OSError | ValueError) -> None:
        reason = getattr(error, "strerror", None) or error
        other = sys.stderr if name == "stdout" else sys.stdout
        other.write(
            f"padfree {command}: {name} cannot be written ({reason}); the run continues without it, and its folder "
            "has all results\n"
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


def open_closed_descriptors() -> None:
    """Open the null device for each standard stream that is closed (`>&-`).

    Otherwise a file that is opened later, such as a checkpoint, could get the descriptor of the closed stream, and
    printed text would end up in this file.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError as error:
            if error.errno != errno.EBADF:
                continue
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:  # cannot happen, because all lower descriptors are open
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)
            if getattr(sys, name) is None:
                setattr(sys, name, open(number, "r" if number == 0 else "w", encoding="utf-8", closefd=False))  # noqa: SIM115


class ErrorRecordingStream:
    """A text stream that keeps the error of a failed write, so that callers can recognise this error later."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.failure: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._recording():
            return self._stream.write(text)

    def flush(self) -> None:
        with self._recording():
            self._stream.flush()

    @contextmanager
    def _recording(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.failure = error
            raise


@contextmanager
def error_recording_stdout() -> Iterator[ErrorRecordingStream]:
    """Context manager that replaces `sys.stdout` by an `ErrorRecordingStream`, for commands such as `plan` that print
    their result.

    A failed write raises its error in the block, or at the end of the block, where the stream is flushed.
    """
    stream = sys.stdout if sys.stdout is not None else io.StringIO()
    recorded: Any = ErrorRecordingStream(stream)
    sys.stdout = recorded
    try:
        yield recorded
        recorded.flush()
    finally:
        sys.stdout = stream
        if recorded.failure is not None:
            discard_buffer(stream)


def discard_buffer(stream: TextIO) -> None:
    """Discard the unwritten text of a stream, so that the interpreter does not fail to flush it at exit."""
    descriptor = _descriptor_of(stream)
    if descriptor is not None:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, descriptor)
        os.close(null)
