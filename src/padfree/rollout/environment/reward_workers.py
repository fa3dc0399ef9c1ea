"""Compute rewards: in the calling thread, in new threads, in processes (`rollout.reward_processes`), or by a model.

    workers.within(text, row, ...)    in the calling thread: rewards of single-turn episodes, if there are no processes
    await workers(text, row, ...)     in a new thread or, if there are processes, in one of them
    RewardsLater                      returns None: `Collector` calls the reward model when the batch is complete

A process (`data.reward_worker`) computes one reward at a time. A process that hangs or dies is replaced.
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
from padfree.rollout.time_limit import call_within


class RewardWorkers:
    """Calls a reward function from an event loop: in `processes` processes or, if `processes` is 0, in threads."""

    def __init__(self, reward: Reward, processes: int = 0) -> None:
        self._reward, self.name, self.processes = reward, reward.name, processes
        self._free: asyncio.Queue[_Worker] | None = None
        self._workers: list[_Worker] = []

    def within(self, seconds: float, text: str, row: Mapping[str, Any], uid: str) -> float | None:
        """Return the reward of a text, computed in the calling thread with a time limit in seconds (`call_within`).

        `row`: the data row of the prompt. `uid`: the name of the sample, for messages.
        """
        return call_within(seconds, self._late(seconds, uid), self._reward, text, row, uid)

    async def __call__(self, text: str, row: Mapping[str, Any], uid: str, seconds: float | None = None) -> float | None:
        """Return the reward of a text, computed in a process or a thread. `row` and `uid`: see `within`.

        `seconds`: the time limit in a process, not counting the wait for a free process.
        """
        if not self.processes:
            return await asyncio.to_thread(self._reward, text, row, uid)
        if self._free is None:
            self._free = asyncio.Queue()
            self._workers = [_Worker(self.name) for _ in range(self.processes)]
            for each in self._workers:
                self._free.put_nowait(each)
        worker = await self._free.get()
        try:
            async with asyncio.timeout(seconds) as clock:
                return await worker.rewarded(text, row, uid)
        except TimeoutError:
            if seconds is None or not clock.expired():
                raise
            raise UserError.of(self._late(seconds, uid)) from None
        finally:
            self._free.put_nowait(worker)

    def _late(self, seconds: float, uid: str) -> str:
        return (
            f"reward: {self.name} took more than {seconds:g} s (rollout.episode_timeout) for sample {uid!r}; make the "
            "function faster, or raise rollout.episode_timeout"
        )

    async def close(self) -> None:
        for worker in self._workers:
            await worker.end()


class RewardsLater(RewardWorkers):
    """Placeholder for a reward model, which computes the rewards of all ranks when a batch is complete."""

    def __init__(self, name: str) -> None:
        self.name, self.processes = name, 0
        self._workers = []

    def within(self, seconds: float, text: str, row: Mapping[str, Any], uid: str) -> float | None:
        return None

    async def __call__(self, text: str, row: Mapping[str, Any], uid: str, seconds: float | None = None) -> float | None:
        return None


class _Worker:
    """A process that computes rewards. It starts with the first call."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._process: asyncio.subprocess.Process | None = None

    async def rewarded(self, text: str, row: Mapping[str, Any], uid: str) -> float:
        finished = False
        try:
            succeeded, value = await self._call(pickle.dumps((text, dict(row), uid)))
            finished = True
        except (asyncio.IncompleteReadError, BrokenPipeError, ConnectionResetError):
            raise UserError(
                "reward",
                f"{self._name} ended its process while it graded sample {uid!r}",
                "correct the function or the row",
            ) from None
        finally:
            if not finished:
                await self.end()
        if not succeeded:
            raise value
        return float(value)

    async def _call(self, message: bytes) -> tuple[bool, Any]:
        process = self._process = self._process or await self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(LENGTH.pack(len(message)) + message)
        await process.stdin.drain()
        (length,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
        answer: tuple[bool, Any] = pickle.loads(await process.stdout.readexactly(length))
        return answer

    async def _start(self) -> asyncio.subprocess.Process:
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
