"""Calls of a user's function that end in time, or in one line.

    main thread       an alarm interrupts the function: sleeping, computing in Python, matching a regular expression
    other threads     a daemon thread of its own runs it, and is left behind when it is late

A reward stays in the main thread where it was called there: libraries that grade answers set alarms of their own
(`signal.alarm`), which only the main thread can. One that does so has a limit of its own in place of this one.
"""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from padfree.errors import UserError, shown_error

Result = TypeVar("Result")

AGAIN = 1.0
"""Seconds between alarms, for a function that catches the first one."""


class _AlarmError(BaseException):
    """Not an `Exception`: a reward that catches those must not take it for a wrong answer."""


def call_within(seconds: float, line: str, function: Callable[..., Result], *args: Any) -> Result:
    """What the function returns; a UserError with this line if it takes longer."""
    if threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer"):
        return _with_alarm(seconds, line, function, *args)
    return _in_thread(seconds, line, function, *args)


def _with_alarm(seconds: float, line: str, function: Callable[..., Result], *args: Any) -> Result:
    found: list[Result] = []
    late = False

    def ring(*_: Any) -> None:
        nonlocal late
        late = True
        raise _AlarmError

    handler = signal.signal(signal.SIGALRM, ring)
    begin = time.monotonic()
    other, interval = signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN)
    try:
        try:
            found.append(function(*args))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except BaseException:  # the alarm, or what the function has made of it
        signal.setitimer(signal.ITIMER_REAL, 0)
        if not late:
            raise
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_DFL if handler is None else handler)
        if other:  # somebody else's alarm was set
            signal.setitimer(signal.ITIMER_REAL, max(other - (time.monotonic() - begin), 1e-3), interval)
    if late:
        raise UserError.of(line)
    return found[0]


def _in_thread(seconds: float, line: str, function: Callable[..., Result], *args: Any) -> Result:
    found: list[Result] = []
    errors: list[BaseException] = []
    ended = threading.Event()

    def run() -> None:
        try:
            found.append(function(*args))
        except BaseException as error:
            errors.append(error)
        ended.set()

    threading.Thread(target=run, name="reward", daemon=True).start()
    if not ended.wait(seconds):
        raise UserError.of(line)
    if errors:
        raise errors[0]
    return found[0]


def shown_safely(error: BaseException) -> str:
    """As `shown_error`; the class alone for an error whose message cannot be had."""
    try:
        return shown_error(error)
    except Exception:
        return type(error).__name__


class DaemonPool:
    """Threads that take calls in their order, `most` at a time. The process does not wait for them at its end."""

    def __init__(self, most: int, name: str) -> None:
        self._most, self._name = most, name
        self._calls: queue.SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...]]] = queue.SimpleQueue()
        self._num_threads = 0
        self._closed = False

    def submit(self, function: Callable[..., Any], *args: Any) -> None:
        """Call it soon; it must not raise."""
        self._calls.put((function, args))
        if self._num_threads < self._most:
            self._num_threads += 1
            threading.Thread(target=self._run, name=self._name, daemon=True).start()

    def close(self) -> None:
        """What has not begun is not called."""
        self._closed = True
        for _ in range(self._num_threads):
            self._calls.put((lambda: None, ()))

    def _run(self) -> None:
        while not self._closed:
            function, args = self._calls.get()
            if not self._closed:
                function(*args)
