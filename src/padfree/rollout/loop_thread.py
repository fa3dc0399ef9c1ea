"""An event loop in a thread of its own, for what goes on while other threads compute: episodes, requests to servers.

The thread and those that serve `asyncio.to_thread` are daemons: a call that never returns does not keep the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

Result = TypeVar("Result")


CLOSING = 10.0
"""Seconds that tasks get to end when they are cancelled."""


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

        threading.Thread(target=run, name="blocking call", daemon=True).start()
        return future


class LoopThread:
    """The loop, begun when it is first needed. `name` is that of its thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._asked: float | None = None  # when the loop was asked to give a sign, if it has not yet
        self._closing = False

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._closing = False
            self._loop = asyncio.new_event_loop()
            self._loop.set_default_executor(DaemonThreads(1))
            self._thread = threading.Thread(target=self._run, args=(self._loop,), name=self._name, daemon=True)
            self._thread.start()
        return self._loop

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        """Until `close`: neither an episode that stops the loop nor `sys.exit()` in a task of its own ends it.

        asyncio lets SystemExit and KeyboardInterrupt of a task through to whoever runs the loop, and keeps them for
        whoever awaits the task.
        """
        while not self._closing:
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                loop.run_forever()
        loop.close()

    def submit(self, coroutine: Coroutine[Any, Any, Result]) -> Future[Result]:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """What the coroutine returns. An interrupt of the thread that waits cancels it."""
        future = self.submit(coroutine)
        try:
            return future.result()
        finally:
            future.cancel()  # which does nothing if it has ended

    def call(self, function: Callable[..., Any], *args: Any) -> None:
        self.loop.call_soon_threadsafe(function, *args)

    def seconds_blocked(self) -> float:
        """For how long the loop has not moved, at least. To be asked again and again."""
        asked = self._asked
        if asked is None:
            self._asked = asked = time.monotonic()
            self.call(self._moved)
        return time.monotonic() - asked

    def _moved(self) -> None:
        self._asked = None

    def close(self, last: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """End what is left on the loop, do what is to be done `last`, and end the loop, unless something keeps it."""
        if self._loop is not None:
            asyncio.run_coroutine_threadsafe(self._end(last), self._loop)
            assert self._thread is not None
            self._thread.join(CLOSING)
            self._loop = self._thread = None

    async def _end(self, last: Callable[[], Coroutine[Any, Any, None]] | None) -> None:
        loop = asyncio.get_running_loop()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        if tasks:
            _, left = await asyncio.wait(tasks, timeout=CLOSING / 2)
            for task in left:
                task._log_destroy_pending = False  # type: ignore[attr-defined]  # its episode's failure has told
        try:
            if last is not None:
                await asyncio.wait_for(last(), CLOSING / 2)
        finally:
            self._closing = True
            loop.call_soon(loop.stop)
