"""Several servers: each request goes to the least loaded one, and what a server fails to answer goes to another.

    queue   5 6 7 8         server 0   1 3     two requests under way
                            server 1   2       one: request 5 goes here
    server 1 fails          queue   2 6 7 8    its requests stand first; it is left alone for 0.5, 1, 2, ... seconds

A round (`Pool.ask_all`) ends when every request has its response, or when no server is left that has the weights: then
weights must be given to a server that has come back without, and what is missing is asked for in another round. A
request has one response: it is asked for again only after its connection has ended.

Standing work (`Pool.stand`) has no end: requests are added to it, and answered in their order. A response that a weight
sync has cut is asked for again, from where it was cut. With no server left the work is `stuck` until weights were
handed over.

While requests are under way each server is asked for its version every few seconds. One that does not answer hangs: its
requests are cancelled, and go to another.

What fails across a weight sync (`Gate`) is asked for again and does not count against the server: the sync has seen for
itself which servers are well.

Everything here runs on the event loop of the servers. Any thread may read `WorkInPool.stuck` and `error`.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from padfree.errors import UserError
from padfree.rollout.base import OnResponse, Response, SamplingRequest
from padfree.rollout.engines.servers.server_api import RestartedError, ServerApi, ServerLostError

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 15.0
POLL, PATIENCE = 0.2, 1.0
"""Seconds."""

Ask = Callable[[ServerApi, SamplingRequest], Awaitable[Response]]
Probe = Callable[[ServerApi], Awaitable[None]]
"""Raises what is wrong with a server."""


class SupersededError(Exception):
    """Weights were exchanged since a server was asked: it is asked again, and nobody has failed."""


class Gate:
    """Closed during a weight sync. Requests pass it with a number, and can tell whether it was closed since."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._turns = 0  # openings and closings

    @property
    def is_closed(self) -> bool:
        return not self._open.is_set()

    def close(self) -> None:
        self._open.clear()
        self._turns += 1

    def open(self) -> None:
        self._turns += 1
        self._open.set()

    async def passed(self) -> int:
        """Wait until it is open; the number for `closed_since`."""
        while self.is_closed:
            await self._open.wait()
        return self._turns

    def closed_since(self, number: int, *, times: int = 1) -> bool:
        return self._turns - number >= 2 * times - 1


@dataclass(kw_only=True, slots=True, eq=False)
class _State:
    """What this process knows of a server."""

    server: ServerApi
    asking: set[asyncio.Task[None]] = field(default_factory=set)  # requests under way
    failures: int = 0  # in a row
    not_before: float = 0.0
    down: bool = False
    restarted: bool = False  # it answers, and lacks the weights
    line: str = ""  # of what went wrong last

    @property
    def usable(self) -> bool:
        return not self.down and not self.restarted

    def hang_up(self) -> None:
        for task in self.asking:
            task.cancel()


class Pool:
    """Servers with the present weights, as this process sees them."""

    def __init__(
        self, servers: Sequence[ServerApi], *, concurrency: int, timeout: float, probe_every: float, probe: Probe
    ) -> None:
        self.states = [_State(server=server) for server in servers]
        self.most, self.timeout = concurrency * len(servers), timeout  # requests at a time
        self.probe_every, self.probe = probe_every, probe
        self.gate = Gate()
        self.changed = asyncio.Event()

    def reset(self, usable: Sequence[ServerApi]) -> None:
        """After a weight sync: these have the weights, the others are left out until the next one."""
        for state in self.states:
            state.restarted = state.server not in usable
            state.down, state.failures = False, 0
        self.changed.set()

    async def ask_all(self, requests: Sequence[SamplingRequest], ask: Ask, on_response: OnResponse) -> int:
        """Ask for these, and tell each response; how many were asked for again. Some may remain without one."""
        if not requests:
            return 0
        work = WorkInPool(self, ask, standing=False)
        work.add(requests, on_response)
        await work.run()
        return work.retried

    def stand(self, ask: Ask) -> WorkInPool:
        """Work without an end."""
        work = WorkInPool(self, ask, standing=True)
        work.task = asyncio.get_running_loop().create_task(work.run())
        return work


class WorkInPool:
    """Requests of one round, or of standing work."""

    def __init__(self, pool: Pool, ask: Ask, *, standing: bool) -> None:
        self._pool, self._ask, self._standing = pool, ask, standing
        self._requests: dict[int, SamplingRequest] = {}  # without a whole response
        self._told: dict[int, tuple[OnResponse, int]] = {}  # whom to tell of a response, and by which number
        self._queue: deque[int] = deque()
        self._asking: set[asyncio.Task[None]] = set()
        self._asked = 0
        self.retried = 0
        self.error: Exception | None = None
        self.task: asyncio.Task[None] | None = None  # of standing work
        self._last_sign = time.monotonic()  # of a response, or of a server that has not failed since its last one

    @property
    def stuck(self) -> bool:
        """Whether requests wait although a restarted server could serve them once it has the weights."""
        states = self._pool.states
        return bool(self._queue) and any(s.restarted for s in states) and not any(s.usable for s in states)

    def add(self, requests: Iterable[SamplingRequest], on_response: OnResponse) -> None:
        """Behind all others. Each response is told by the place of its request among these."""
        for place, request in enumerate(requests):
            number, self._asked = self._asked, self._asked + 1
            self._requests[number], self._told[number] = request, (on_response, place)
            self._queue.append(number)
        self._pool.changed.set()

    def take_retried(self) -> int:
        """How many requests were asked again since this was called last."""
        taken, self.retried = self.retried, 0
        return taken

    async def run(self) -> None:
        """Until all is answered or nothing more can be. Requests under way are waited for, unless there is an error."""
        watching = [asyncio.create_task(self._watch(state)) for state in self._pool.states]
        try:
            while self.error is None and (self._goes_on() or self._asking):
                self._pool.changed.clear()
                if self._goes_on():
                    self._assign()
                if self.error is None:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(PATIENCE):
                            await self._pool.changed.wait()
        except Exception as error:  # a mistake of ours: whoever waits must know
            self._stop(error)
        finally:
            tasks = [*watching, *self._asking]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if self.error is not None and not self._standing:
            raise self.error

    def _goes_on(self) -> bool:
        return self._standing or (bool(self._requests) and not self._without_servers())

    def _without_servers(self) -> bool:
        """Every server with the weights is gone: whoever waits must hand them over again."""
        states = self._pool.states
        return any(state.restarted for state in states) and not any(state.usable for state in states)

    def _assign(self) -> None:
        """Give requests of the queue to servers."""
        pool, now = self._pool, time.monotonic()
        usable = [state for state in pool.states if state.usable]
        well = any(not state.failures for state in usable)
        # A weight sync has a limit of its own, and so has whoever hands weights over again.
        if well or pool.gate.is_closed or not self._requests or self._without_servers():
            self._last_sign = now
        if now - self._last_sign > pool.timeout:
            self._stop(self._nobody())
            return
        while usable and self._queue and len(self._asking) < pool.most:
            state = min(usable, key=lambda state: len(state.asking))
            task = asyncio.create_task(self._answer(self._queue.popleft(), state))
            state.asking.add(task)
            self._asking.add(task)

    async def _answer(self, number: int, state: _State) -> None:
        try:
            response = await self._ask(state.server, self._requests[number])
        except (SupersededError, asyncio.CancelledError):  # cancelled: its server hangs, or the work has ended
            self._give_back(number)
        except ServerLostError as error:
            self._give_back(number)
            self._failed(state, error)
        except Exception as error:
            self._give_back(number)
            self._stop(error)
        else:
            state.failures, self._last_sign = 0, time.monotonic()
            try:
                self._keep(number, response)
            except Exception as error:  # of whoever is told of the response, and must know
                self._stop(error)
        finally:
            task = asyncio.current_task()
            assert task is not None
            state.asking.discard(task)
            self._asking.discard(task)
            self._pool.changed.set()

    def _keep(self, number: int, response: Response) -> None:
        on_response, place = self._told[number]
        request = self._requests[number]
        if response.is_whole(request.max_new_tokens):
            del self._requests[number], self._told[number]
        else:
            self._requests[number] = replace(request, partial=response)
            self._queue.appendleft(number)
        on_response(place, response)

    def _nobody(self) -> UserError:
        worst = max(self._pool.states, key=lambda state: state.failures)
        return UserError.of(
            f"{worst.line}, and no server gave a response for {self._pool.timeout:g} s; see that one runs, or raise "
            "rollout.timeout"
        )

    async def _watch(self, state: _State) -> None:
        """Find out that a server hangs, and that one that was down is there again."""
        every = self._pool.probe_every
        while True:
            await asyncio.sleep(min(every, POLL) if state.down else every)
            idle = state.usable and not state.asking
            if idle or state.restarted or time.monotonic() < state.not_before:
                continue
            try:
                await self._pool.probe(state.server)
            except SupersededError:
                continue
            except ServerLostError as error:
                self._failed(state, error)
                if not isinstance(error, RestartedError):
                    state.hang_up()
            except Exception as error:
                self._stop(error)
            else:
                state.down = False
                self._pool.changed.set()

    def _give_back(self, number: int) -> None:
        self.retried += 1
        self._queue.appendleft(number)

    def _failed(self, state: _State, error: ServerLostError) -> None:
        now = time.monotonic()
        if isinstance(error, RestartedError):
            state.restarted, state.down = True, False
        elif not state.down or now >= state.not_before:  # many requests fail at once: that is one failure
            state.failures += 1
            state.not_before = now + min(FIRST_PAUSE * 2.0 ** (state.failures - 1), LONGEST_PAUSE)
            state.down, state.line = True, str(error)
        self._pool.changed.set()

    def _stop(self, error: Exception) -> None:
        self.error = self.error or error
        self._pool.changed.set()
