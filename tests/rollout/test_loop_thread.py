"""Closing the event loop of a thread."""

from __future__ import annotations

import asyncio
import gc
import threading
from concurrent.futures import Future

import pytest

from padfree.rollout import loop_thread
from padfree.rollout.loop_thread import LoopThread


@pytest.mark.filterwarnings("error")
def test_tasks_that_start_while_the_loop_closes_are_cancelled() -> None:
    """The second task is submitted by another thread once the first is cancelled, and starts a program."""
    thread, started, submitted = LoopThread("closing"), threading.Event(), list[Future[None]]()

    async def second() -> None:
        process = await asyncio.create_subprocess_exec("sleep", "60", stdin=-1, stdout=-1)
        process.kill()
        await process.wait()

    async def first() -> None:
        started.set()
        try:
            await asyncio.sleep(60)
        finally:
            other = threading.Thread(target=lambda: submitted.append(thread.submit(second())))
            other.start()
            await asyncio.to_thread(other.join)

    thread.submit(first())
    assert started.wait(10)
    thread.close()
    assert submitted[0].done()
    gc.collect()  # a task that was destroyed while pending would warn here


def test_a_task_that_ignores_its_cancellation_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_thread, "CLOSING", 0.4)
    thread, started, release = LoopThread("stubborn"), threading.Event(), threading.Event()

    async def stubborn() -> None:
        started.set()
        while not release.is_set():
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                continue

    future = thread.submit(stubborn())
    assert started.wait(10)
    thread.close()
    assert not future.done() or future.cancelled()
    release.set()
