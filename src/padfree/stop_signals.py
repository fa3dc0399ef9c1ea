"""Signals that end a command: the first one requests a stop, a second one ends the process at once.

    with StopSignals() as signals:              contains the whole command
        ...                                     here, a signal raises `StopRequested`
        with signals.deferred("saves ..."):     here, e.g. in a training step, a signal is only recorded
            if signals.received: save and leave
        with signals.lent(SIGINT, handler):     here, `handler` handles SIGINT (Ctrl-C), and the command goes on

Signals that schedulers send before a time limit (`WARNINGS`) request a stop. They never end the process at once.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any

REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
WARNINGS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
SAME_REQUEST_SECONDS = 1.0
PATIENCE = 15.0

_exit = os._exit  # kept because a run replaces `os._exit`


class StopRequested(KeyboardInterrupt):
    """Raised when a signal requests a stop while nothing needs to be saved (outside of `StopSignals.deferred`)."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number


def _to_stderr(line: str) -> None:
    with suppress(Exception):
        print(line, file=sys.stderr, flush=True)  # noqa: T201


class StopSignals:
    """A context manager that records signals and prints, for each signal, what happens next."""

    def __init__(self, say: Callable[[str], None] = _to_stderr) -> None:
        """Set the function `say` that prints a message. `say` is called from a thread and must not block."""
        self.number: int | None = None  # the first signal
        self._say = say
        self._then: str | None = None  # inside `deferred`: what the run will do after a signal, for the message
        self._raised = False
        self._lent: set[int] = set()
        self._before: dict[signal.Signals, Any] = {}
        self._pipe: tuple[int, int] | None = None
        self._wakeup_before = -1
        self._thread: threading.Thread | None = None

    @property
    def received(self) -> bool:
        return self.number is not None

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():  # Python handles signals in the main thread only
            self._pipe = os.pipe()
            os.set_blocking(self._pipe[1], False)
            self._wakeup_before = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
            self._thread = threading.Thread(target=self._listen, args=(self._pipe[0],), name="signals", daemon=True)
            self._thread.start()
            self._before = {number: signal.getsignal(number) for number in (*REQUESTS, *WARNINGS) if _is_ours(number)}
            for number in self._before:
                signal.signal(number, self._note)
            _INSTALLED.append(self)
        return self

    @contextmanager
    def deferred(self, then: str) -> Iterator[None]:
        """Context manager: signals are recorded and do not interrupt its block.

        `then` is the end of the message that is printed for a signal: with "saves a checkpoint" it is "SIGTERM: the run
        saves a checkpoint".
        """
        if self.number is not None:
            raise StopRequested(self.number)
        self._then = then
        try:
            yield
        finally:
            self._then = None

    @contextmanager
    def lent(self, number: signal.Signals, handler: Callable[[int, Any], Any]) -> Iterator[None]:
        """Context manager: in its block, `handler` handles signal `number`, and the signal does not stop the run."""
        self._lent.add(number)
        before = signal.signal(number, handler)
        try:
            yield
        finally:
            signal.signal(number, before)
            self._lent.discard(number)

    def _note(self, number: int, frame: Any) -> None:
        if self.number is None:
            self.number = number
        if self._then is None and not self._raised:
            self._raised = True
            raise StopRequested(number)

    def _listen(self, pipe: int) -> None:
        asked: float | None = None  # time of the first request
        deadline: float | None = None
        warned = False
        while True:
            wait = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([pipe], [], [], wait)[0]:
                assert self.number is not None
                _exit(128 + self.number)
            number = os.read(pipe, 1)[0]
            if not number:
                return
            if number not in self._before or number in self._lent:
                continue
            now = time.monotonic()
            if self.number is None:
                self.number = number
            if number in REQUESTS and asked is not None:
                if now - asked > SAME_REQUEST_SECONDS:
                    self._say(f"{signal.Signals(number).name}: ended at once, nothing more is saved")
                    _exit(128 + number)
                continue
            if number in REQUESTS:
                asked = now
            if self._then is None and deadline is None:
                deadline = now + PATIENCE
            if number in REQUESTS or not warned:
                warned = True
                self._say(self._line(number))

    def _line(self, number: int) -> str:
        name = signal.Signals(number).name
        if self._then is None:
            return f"{name}: stopping; there is nothing to save yet"
        return f"{name}: the run {self._then}; a second signal ends it at once, without saving"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pipe is None or self._thread is None:
            return
        _INSTALLED.remove(self)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        read, write = self._pipe
        os.write(write, bytes(1))
        self._thread.join()
        os.close(write)
        os.close(read)


_INSTALLED: list[StopSignals] = []
"""The `StopSignals` objects whose handlers are installed, the innermost last."""


def _is_ours(number: signal.Signals) -> bool:
    """Return whether this module may handle a signal.

    The module never handles an ignored signal. If other code has installed a handler, the module replaces it only for
    SIGINT and SIGTERM.
    """
    handler = signal.getsignal(number)
    if handler is signal.SIG_IGN or handler is None:  # None: installed by code outside Python
        return False
    if number in (signal.SIGINT, signal.SIGTERM) or handler is signal.SIG_DFL:
        return True
    return isinstance(getattr(handler, "__self__", None), StopSignals)


def _forget_in_child() -> None:
    """Reset the signal handlers in a forked process, because the inherited handlers would write to the pipe of the
    parent.
    """
    if not _INSTALLED:
        return
    signal.set_wakeup_fd(-1)
    for stop in _INSTALLED:
        for number in stop._before:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    _INSTALLED.clear()


os.register_at_fork(after_in_child=_forget_in_child)
