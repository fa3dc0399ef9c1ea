"""Call user functions with a time limit. A call that exceeds the limit raises a `UserError`.

    called in the main thread    SIGALRM interrupts the function, e.g. while it sleeps or matches a regular expression
    called in another thread     a new daemon thread runs the function, and is abandoned when the limit is exceeded

In the main thread, a reward function is not moved to a new thread, because libraries that grade answers set alarms
themselves (`signal.alarm`), which is possible in the main thread only. The alarm of such a library replaces the alarm
of this module.
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
"""Seconds between repeated alarms. The alarm repeats, because the function may catch the exception of the first one."""


class _AlarmError(BaseException):
    """Raised by the alarm. It is not an `Exception`, so that `except Exception` in a reward does not catch it."""


def call_within(seconds: float, message: str, function: Callable[..., Result], *args: Any) -> Result:
    """Return `function(*args)`. Raise a `UserError` with the text `message` if the call takes longer than `seconds`."""
    if threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer"):
        return _with_alarm(seconds, message, function, *args)
    return _in_thread(seconds, message, function, *args)


def _with_alarm(seconds: float, message: str, function: Callable[..., Result], *args: Any) -> Result:
    results: list[Result] = []
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
            results.append(function(*args))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except BaseException:  # the alarm, or an exception that the function raised because of it
        signal.setitimer(signal.ITIMER_REAL, 0)
        if not late:
            raise
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_DFL if handler is None else handler)
        if other:  # another alarm was set before: restore its remaining time
            signal.setitimer(signal.ITIMER_REAL, max(other - (time.monotonic() - begin), 1e-3), interval)
    if late:
        raise UserError.of(message)
    return results[0]


def _in_thread(seconds: float, message: str, function: Callable[..., Result], *args: Any) -> Result:
    results: list[Result] = []
    errors: list[BaseException] = []
    ended = threading.Event()

    def run() -> None:
        try:
            results.append(function(*args))
        except BaseException as error:
            errors.append(error)
        ended.set()

    threading.Thread(target=run, name="reward", daemon=True).start()
    if not ended.wait(seconds):
        raise UserError.of(message)
    if errors:
        raise errors[0]
    return results[0]


def shown_safely(error: BaseException) -> str:
    """Return the first line of the error, or only the name of its class if its `__str__` raises an exception."""
    try:
        return shown_error(error)
    except Exception:
        return type(error).__name__


class DaemonPool:
    """A pool of at most `max_threads` daemon threads. At exit, the process does not wait for these threads."""

    def __init__(self, max_threads: int, name: str) -> None:
        self._max_threads, self._name = max_threads, name
        self._calls: queue.SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...]]] = queue.SimpleQueue()
        self._num_threads = 0
        self._closed = False

    def submit(self, function: Callable[..., Any], *args: Any) -> None:
        """Call the function in a thread of the pool. The function must not raise an exception."""
        self._calls.put((function, args))
        if self._num_threads < self._max_threads:
            self._num_threads += 1
            threading.Thread(target=self._run, name=self._name, daemon=True).start()

    def close(self) -> None:
        """Close the pool: drop calls that have not started."""
        self._closed = True
        for _ in range(self._num_threads):
            self._calls.put((lambda: None, ()))

    def _run(self) -> None:
        while not self._closed:
            function, args = self._calls.get()
            if not self._closed:
                function(*args)
