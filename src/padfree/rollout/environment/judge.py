"""Rewards of episodes, judged concurrently: in threads, or in processes where `rollout.reward_processes` asks for them.

text, row -> Judge -> thread                                  one for each call
                   -> process 0, 1, ...   `data.reward_worker`   each judges one text at a time; one that hangs or dies
                                                              is ended, and another takes its place
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import sys
from collections.abc import Mapping
from typing import Any

from padfree.data import Reward
from padfree.data.reward_worker import LENGTH
from padfree.errors import UserError


class Judge:
    """A reward, called from a loop. `processes` 0: threads of this process call it."""

    def __init__(self, reward: Reward, processes: int = 0) -> None:
        self.reward = reward
        self._processes = processes
        self._free: asyncio.Queue[_Worker] | None = None
        self._workers: list[_Worker] = []

    async def __call__(self, text: str, row: Mapping[str, Any], uid: str) -> float:
        if not self._processes:
            return await asyncio.to_thread(self.reward, text, row, uid)
        if self._free is None:
            self._free = asyncio.Queue()
            self._workers = [_Worker(self.reward.name) for _ in range(self._processes)]
            for each in self._workers:
                self._free.put_nowait(each)
        worker = await self._free.get()
        try:
            return await worker.judged(text, row, uid)
        finally:
            self._free.put_nowait(worker)

    async def close(self) -> None:
        for worker in self._workers:
            await worker.end()


class _Worker:
    """A process that judges, started when there is something for it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._process: asyncio.subprocess.Process | None = None

    async def judged(self, text: str, row: Mapping[str, Any], uid: str) -> float:
        finished = False
        try:
            found, value = await self._asked(pickle.dumps((text, dict(row), uid)))
            finished = True
        except (asyncio.IncompleteReadError, BrokenPipeError, ConnectionResetError):
            raise UserError(
                "reward", f"{self._name} ended its process for sample {uid!r}", "correct the function or the row"
            ) from None
        finally:
            if not finished:
                await self.end()
        if not found:
            raise value
        return float(value)

    async def _asked(self, message: bytes) -> tuple[bool, Any]:
        process = self._process = self._process or await self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(LENGTH.pack(len(message)) + message)
        await process.stdin.drain()
        (length,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
        answer: tuple[bool, Any] = pickle.loads(await process.stdout.readexactly(length))
        return answer

    async def _started(self) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "padfree.data.reward_worker",
            self._name,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "CUDA_VISIBLE_DEVICES": ""},
        )

    async def end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            assert process.stdin is not None
            process.stdin.close()
            await process.wait()
