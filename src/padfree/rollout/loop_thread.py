"""An asyncio event loop in its own thread, which plays episodes and sends requests while other threads compute.

The thread of the loop and those of `asyncio.to_thread` are daemons: a call that never returns does not keep the process
alive.
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
"""Seconds in which cancelled tasks must end when the loop is closed."""

CONNECTING = "BaseSubprocessTransport._connect_pipes"
"""Name of the asyncio task that connects the pipes of a new program. It is not cancelled at `close`, because the start
of the program would then hang.
"""


class DaemonThreads(ThreadPoolExecutor):
    """An executor that runs each call in a new daemon thread. At exit, the process does not wait for these threads."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = function(*args, **named)
            except BaseException as error:  # `future.result()` raises it
                future.set_exception(error)
            else:
                future.set_result(result)

        threading.Thread(target=run, name="blocking call", daemon=True).start()
        return future


class LoopThread:
    """An asyncio event loop in its own thread, which starts on first use. `name`: the name of the thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._probe_sent: float | None = None  # time of a probe that the loop has not answered yet
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
        """Run the loop until `close`, even if an episode stops it or a task calls `sys.exit()`.

        A SystemExit or KeyboardInterrupt in a task also ends `run_forever`. Here it is ignored and the loop continues,
        because the exception also reaches the code that awaits the task.
        """
        while not self._closing:
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                loop.run_forever()
        loop.close()

    def submit(self, coroutine: Coroutine[Any, Any, Result]) -> Future[Result]:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run the coroutine in the loop and return its result.

        If the calling thread is interrupted while it waits, the coroutine is cancelled.
        """
        future = self.submit(coroutine)
        try:
            return future.result()
        finally:
            future.cancel()  # has no effect if the coroutine has ended

    def call(self, function: Callable[..., Any], *args: Any) -> None:
        self.loop.call_soon_threadsafe(function, *args)

    def seconds_blocked(self) -> float:
        """Return a lower bound on how long the loop has been blocked, in seconds.

        Call this repeatedly: a call sends a probe to the loop, and later calls see whether it was answered.
        """
        sent = self._probe_sent
        if sent is None:
            self._probe_sent = sent = time.monotonic()
            self.call(self._answer_probe)
        return time.monotonic() - sent

    def _answer_probe(self) -> None:
        self._probe_sent = None

    def close(self, last: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """Cancel all tasks, run the coroutine that `last` returns, and stop the loop, in at most CLOSING seconds."""
        if self._loop is not None:
            asyncio.run_coroutine_threadsafe(self._end(last), self._loop)
            assert self._thread is not None
            self._thread.join(CLOSING)
            self._loop = self._thread = None

    async def _end(self, last: Callable[[], Coroutine[Any, Any, None]] | None) -> None:
        loop = asyncio.get_running_loop()
        until = time.monotonic() + CLOSING / 2
        # Other threads may submit coroutines meanwhile, and a cancelled task may start another one.
        while (tasks := asyncio.all_tasks() - {asyncio.current_task()}) and time.monotonic() < until:
            # A task that is cancelled before its first step never closes the socket that it was given.
            await asyncio.sleep(0)
            for task in tasks:
                if getattr(task.get_coro(), "__qualname__", "") != CONNECTING:
                    task.cancel()
            await asyncio.wait(tasks, timeout=until - time.monotonic())
        for task in tasks:
            task._log_destroy_pending = False  # type: ignore[attr-defined]  # the failure is already reported
        try:
            if last is not None:
                await asyncio.wait_for(last(), CLOSING / 2)
        finally:
            self._closing = True
            loop.call_soon(loop.stop)
