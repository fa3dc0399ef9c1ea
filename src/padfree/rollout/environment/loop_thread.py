"""An event loop in a thread of its own: episodes run there, the sampler runs in the thread that asks for a batch.

The thread and those that serve `asyncio.to_thread` are daemons: a tool that never returns does not keep the process.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

Result = TypeVar("Result")


class DaemonThreads(ThreadPoolExecutor):
    """Every call has a thread of its own, which nobody waits for at the end of the process."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = function(*args, **named)
            except BaseException as error:  # whoever waits for the future gets it
                future.set_exception(error)
            else:
                future.set_result(result)

        threading.Thread(target=run, name="environment call", daemon=True).start()
        return future


class LoopThread:
    """The loop, begun when it is first needed."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._beat = time.monotonic()  # when the loop was last seen to move
        self._asked = False

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._loop.set_default_executor(DaemonThreads(1))
            threading.Thread(target=self._loop.run_forever, name="episodes", daemon=True).start()
        return self._loop

    def submit(self, coroutine: Coroutine[Any, Any, Result]) -> Future[Result]:
        self._beat = time.monotonic()
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def call(self, function: Callable[..., Any], *args: Any) -> None:
        self.loop.call_soon_threadsafe(function, *args)

    def seconds_blocked(self) -> float:
        """For how long the loop has not moved, at least. To be asked again and again."""
        if not self._asked:
            self._asked = True
            self.call(self._moved)
        return time.monotonic() - self._beat

    def rested(self) -> None:
        """The thread that asks was away itself, and has not looked."""
        self._beat = time.monotonic()

    def _moved(self) -> None:
        self._beat, self._asked = time.monotonic(), False

    def close(self) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None
