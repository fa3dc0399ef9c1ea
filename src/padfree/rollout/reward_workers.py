"""Compute rewards with a reward function (`RewardWorkers`) or with a reward model (`score_by_model`).

- `RewardWorkers.within` waits for the reward, with a time limit. In the main thread, the signal SIGALRM interrupts a
  late function. In another thread, a late function is abandoned.
- `await workers(...)` runs the function in another thread, without a time limit. With `rollout.reward_processes`, it
  runs the function in a worker process, and replaces a process that hangs or dies.

A reward function may set alarms of its own in the main thread (`signal.alarm`). They replace the time limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from padfree.data import Reward
from padfree.data.reward_worker import LENGTH
from padfree.errors import UserError
from padfree.rollout.base import Gather
from padfree.rollout.group import Played
from padfree.rollout.prompts import Prompt

Result = TypeVar("Result")

AGAIN = 1.0
"""Seconds between the alarms that interrupt a reward function after its time limit. The alarm repeats, because the
function may catch the exception of the first one.
"""


class _AlarmError(BaseException):
    """Raised when the alarm signal interrupts a reward function that takes too long.

    The class is not an `Exception`, because a reward function may catch any `Exception`.
    """


RewardModel = Callable[[Sequence[tuple[Prompt, str]]], "list[float | str]"]
"""Takes this rank's (prompt, response text) pairs. Returns, for each, a reward or an error message. Collective."""


class RewardWorkers:
    """Calls a reward function from an event loop: in `processes` processes, or in threads if `processes` is 0."""

    def __init__(self, reward: Reward, processes: int = 0) -> None:
        self._reward, self.name, self.processes = reward, reward.name, processes
        self._free: asyncio.Queue[_Worker] | None = None
        self._workers: list[_Worker] = []

    def within(self, seconds: float, text: str, row: Mapping[str, Any], uid: str) -> float | None:
        """Return the reward of a text, computed in the calling thread in at most `seconds` seconds (`call_within`).

        `row`: the data row of the prompt. `uid`: the name of the sample, for messages.
        """
        return call_within(seconds, self._late(seconds, uid), self._reward, text, row, uid)

    async def __call__(self, text: str, row: Mapping[str, Any], uid: str, seconds: float | None = None) -> float | None:
        """Compute the reward of a text in a worker process, or in a thread if there are no worker processes.

        `uid`: the name of the sample, for messages. `seconds`: the time limit in a worker process, without the wait for
        a free process. A thread has no time limit.
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
    """Stands in for a reward function: returns no reward, because the reward model scores the complete batch later."""

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
                f"{self._name} ended its worker process while it graded sample {uid!r}",
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


def score_by_model(
    reward_model: RewardModel,
    played: dict[int, Played],
    prompts: Mapping[int, Prompt],
    gather: Gather,
    *,
    skip_failures: bool,
) -> None:
    """Let the reward model score the episodes that have no reward yet. Collective.

    Scored episodes are replaced in `played` (this rank's episodes, by index in the batch). With `skip_failures`, an
    episode that cannot be scored becomes a failed episode. Otherwise, all ranks raise the error.
    """
    unscored = [one for one in played.values() if len(one.rewards) < len(one.leaves)]
    pairs = [
        (prompts[one.number], leaf.text if leaf.answer is None else leaf.answer)
        for one in unscored
        for leaf in one.leaves
    ]
    rewards = iter(reward_model(pairs))
    first_error = None
    for one in unscored:
        values = [next(rewards) for _ in one.leaves]
        failure = next((value for value in values if isinstance(value, str)), None)
        first_error = first_error or failure
        leaves = tuple(
            replace(leaf, reward=value)
            for leaf, value in zip(one.leaves, values, strict=True)
            if not isinstance(value, str)
        )
        failed = Played(number=one.number, failure=failure)
        played[one.number] = failed if failure is not None else replace(one, leaves=leaves)
    for message in gather(None if skip_failures else first_error):
        if message is not None:
            raise UserError.of(message)


def call_within(seconds: float, message: str, function: Callable[..., Result], *args: Any) -> Result:
    """Return `function(*args)`. Raise a `UserError` with the text `message` if the call takes longer than `seconds`."""
    # In the main thread, the function is not called in a new thread, so that it can set alarms of its own.
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
        if other:  # an alarm was set before this one: restore its remaining time
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
