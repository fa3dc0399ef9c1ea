"""Closing the event loop of a thread."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
from concurrent.futures import Future
from functools import partial
from typing import Any

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


@pytest.mark.filterwarnings("error")
def test_a_connection_that_is_being_accepted_while_the_loop_closes_is_closed() -> None:
    thread, client = LoopThread("accepting"), socket.socket()
    listening = socket.create_server(("127.0.0.1", 0))

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.read()
        finally:
            writer.close()

    async def connected() -> None:
        """Close the loop in the iteration between accepting the connection and the first step of asyncio's task."""
        await asyncio.start_server(serve, sock=listening)
        client.connect(listening.getsockname())
        loop = asyncio.get_running_loop()
        loop.call_soon(lambda: loop.call_soon(close_loop))

    def close_loop() -> None:
        assert "_accept_connection2" in str(asyncio.all_tasks()), "asyncio accepts connections in another way now"
        end(thread._end(None))

    def end(coroutine: Any, done: Any = None) -> None:
        """Run the coroutine step by step, as a task that had begun earlier would."""
        try:
            future = coroutine.send(None)
        except StopIteration:
            return
        if future is None:  # asyncio.sleep(0)
            thread.loop.call_soon(end, coroutine)
        else:
            future._asyncio_future_blocking = False
            future.add_done_callback(partial(end, coroutine))

    thread.submit(connected()).result(10)
    running = thread._thread
    assert running is not None
    running.join(10)
    client.settimeout(10)
    assert client.recv(1) == b""
    client.close()
    listening.close()
    gc.collect()  # a socket that was never closed would warn here
