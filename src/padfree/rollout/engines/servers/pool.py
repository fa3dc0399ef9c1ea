"""A pool of servers: each request goes to the least loaded server, and a failed request goes to another server.

- A server that fails gets no requests for 0.5 s. This pause doubles with each further failure in a row, up to 15 s.
- A server with requests in flight is probed every few seconds. If it hangs, its requests are cancelled and retried.
- During a weight sync, `Gate` holds new requests back. A request that fails then is retried.

All code runs on the event loop for the servers. Any thread may read `RequestQueue.stuck` and `RequestQueue.error`.
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
POLL, WAIT = 0.2, 1.0
"""`POLL`: seconds between two probes of a server that is down. `WAIT`: maximum seconds between two attempts to assign
waiting requests to servers.
"""

Respond = Callable[[ServerApi, SamplingRequest], Awaitable[Response]]
Probe = Callable[[ServerApi], Awaitable[None]]
"""Checks a server, and raises an error if it does not work."""


class SupersededError(Exception):
    """Raised if a weight sync takes place during a request. The request is retried and does not count as a failure."""


class Gate:
    """Holds new requests back while it is closed, i.e. during a weight sync.

    A request that passes the open gate gets a ticket, a number. `closed_since(ticket)` tells whether the gate has been
    closed since the request passed.
    """

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._changes = 0  # number of times it was opened or closed

    @property
    def is_closed(self) -> bool:
        return not self._open.is_set()

    def close(self) -> None:
        self._open.clear()
        self._changes += 1

    def open(self) -> None:
        self._changes += 1
        self._open.set()

    async def wait_open(self) -> int:
        """Wait until the gate is open (no weight sync runs). Return a ticket, a number to pass to `closed_since`."""
        while self.is_closed:
            await self._open.wait()
        return self._changes

    def closed_since(self, ticket: int, *, times: int = 1) -> bool:
        """Return whether at least `times` weight syncs have begun since `wait_open` returned `ticket`."""
        return self._changes - ticket >= 2 * times - 1


@dataclass(kw_only=True, slots=True, eq=False)
class _ServerState:
    """What this process knows about one server: the requests in flight to it, and whether the server is down."""

    server: ServerApi
    in_flight: set[asyncio.Task[None]] = field(default_factory=set)  # tasks of its requests that have no answer yet
    failures: int = 0  # consecutive failures
    not_before: float = 0.0  # time of the next attempt
    down: bool = False
    restarted: bool = False  # the server answers, but has lost the weights
    message: str = ""  # error message of the last failure

    @property
    def usable(self) -> bool:
        return not self.down and not self.restarted

    def cancel_requests(self) -> None:
        for task in self.in_flight:
            task.cancel()


class Pool:
    """The servers of a run and their state, as this process sees them."""

    def __init__(
        self,
        servers: Sequence[ServerApi],
        *,
        concurrency: int,
        timeout: float,
        probe_every: float,
        probe: Probe,
        continues: bool = True,
    ) -> None:
        """`continues`: whether a response that a weight sync interrupts keeps its tokens and is continued."""
        self.states = [_ServerState(server=server) for server in servers]
        self.max_in_flight, self.timeout = concurrency * len(servers), timeout
        self.probe_every, self.probe, self.continues = probe_every, probe, continues
        self.draining = False
        self.gate = Gate()
        self.changed = asyncio.Event()

    def reset(self, usable: Sequence[ServerApi]) -> None:
        """Use only the servers in `usable`, which received the weights, until the next weight sync.

        Call this after a weight sync.
        """
        for state in self.states:
            state.restarted = state.server not in usable
            state.down, state.failures = False, 0
        self.changed.set()

    async def drain(self) -> None:
        """Start no request until `resume`, and wait until none is in flight. Hanging servers are still detected."""
        self.draining = True
        while tasks := {task for state in self.states for task in state.in_flight}:
            await asyncio.wait(tasks)

    def resume(self) -> None:
        """Send requests to the servers again, after a weight sync held them back."""
        self.draining = False
        self.gate.open()
        self.changed.set()

    async def run_all(self, requests: Sequence[SamplingRequest], respond: Respond, on_response: OnResponse) -> int:
        """Process these requests and return the number of retries.

        `respond` sends a request to a server. `on_response` receives each response with the index of its request. If no
        server has the weights any more, the method returns early, and some requests have no response.
        """
        if not requests:
            return 0
        queue = RequestQueue(self, respond, endless=False)
        queue.add(requests, on_response)
        await queue.run()
        return queue.retried

    def start_queue(self, respond: Respond) -> RequestQueue:
        """Start and return a queue that processes the requests added to it until its task is cancelled.

        `respond`: a function that sends a request to a server and returns the server's response.
        """
        queue = RequestQueue(self, respond, endless=True)
        queue.task = asyncio.get_running_loop().create_task(queue.run())
        return queue


class RequestQueue:
    """Requests that a pool processes: a fixed batch of them, or an endless queue."""

    def __init__(self, pool: Pool, respond: Respond, *, endless: bool) -> None:
        self._pool, self._respond, self._endless = pool, respond, endless
        self._requests: dict[int, SamplingRequest] = {}  # requests without a complete response, by number
        self._callbacks: dict[int, tuple[OnResponse, int]] = {}  # callback of each request, and its index argument
        self._queue: deque[int] = deque()
        self._in_flight: set[asyncio.Task[None]] = set()
        self._num_added = 0
        self.retried = 0
        self.error: Exception | None = None
        self.task: asyncio.Task[None] | None = None  # the task that runs an endless queue
        self._last_progress = time.monotonic()  # time of the last response, or when a healthy server was last seen

    @property
    def stuck(self) -> bool:
        """Whether queued requests must wait for a weight sync: no server that answers has the current weights."""
        states = self._pool.states
        return bool(self._queue) and any(s.restarted for s in states) and not any(s.usable for s in states)

    def add(self, requests: Iterable[SamplingRequest], on_response: OnResponse) -> None:
        """Append requests to the queue.

        `on_response` receives each response with the index of its request in `requests`.
        """
        for index, request in enumerate(requests):
            number, self._num_added = self._num_added, self._num_added + 1
            self._requests[number], self._callbacks[number] = request, (on_response, index)
            self._queue.append(number)
        self._pool.changed.set()

    def take_retried(self) -> int:
        """Return the number of retries since the previous call of this method."""
        retried, self.retried = self.retried, 0
        return retried

    async def run(self) -> None:
        """Process requests. A fixed batch ends when all are answered, or when no server has the weights any more.

        An endless queue runs until its task is cancelled. An error ends the queue and is stored in `error`. A fixed
        batch also raises the error.
        """
        watching = [asyncio.create_task(self._watch(state)) for state in self._pool.states]
        try:
            while self.error is None and (self._continues() or self._in_flight):
                self._pool.changed.clear()
                if self._continues():
                    self._assign()
                if self.error is None:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(WAIT):
                            await self._pool.changed.wait()
        except Exception as error:
            # This is a bug in padfree. The thread that waits for the queue must see it.
            self._stop(error)
        finally:
            tasks = [*watching, *self._in_flight]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if self.error is not None and not self._endless:
            raise self.error

    def _continues(self) -> bool:
        return self._endless or (bool(self._requests) and not self._needs_weights())

    def _needs_weights(self) -> bool:
        """Return whether a weight sync is needed, because no server that answers has the weights any more."""
        states = self._pool.states
        return any(state.restarted for state in states) and not any(state.usable for state in states)

    def _assign(self) -> None:
        """Send queued requests to the least loaded servers, up to `max_in_flight` requests in flight."""
        pool, now = self._pool, time.monotonic()
        usable = [state for state in pool.states if state.usable]
        healthy = any(not state.failures for state in usable)
        # No timeout counts during a weight sync, which has its own, or while the servers need a weight sync.
        if healthy or pool.gate.is_closed or pool.draining or not self._requests or self._needs_weights():
            self._last_progress = now
        if now - self._last_progress > pool.timeout:
            self._stop(self._timeout_error())
            return
        while usable and self._queue and not pool.draining and len(self._in_flight) < pool.max_in_flight:
            state = min(usable, key=lambda state: len(state.in_flight))
            task = asyncio.create_task(self._process(self._queue.popleft(), state))
            state.in_flight.add(task)
            self._in_flight.add(task)

    async def _process(self, number: int, state: _ServerState) -> None:
        try:
            response = await self._respond(state.server, self._requests[number])
        except (SupersededError, asyncio.CancelledError):  # cancelled because the server hangs, or the queue has ended
            self._requeue(number)
        except ServerLostError as error:
            self._requeue(number)
            self._failed(state, error)
        except Exception as error:
            self._requeue(number)
            self._stop(error)
        else:
            state.failures, self._last_progress = 0, time.monotonic()
            try:
                self._keep(number, response)
            except Exception as error:  # raised by the callback
                self._stop(error)
        finally:
            task = asyncio.current_task()
            assert task is not None
            state.in_flight.discard(task)
            self._in_flight.discard(task)
            self._pool.changed.set()

    def _keep(self, number: int, response: Response) -> None:
        on_response, index = self._callbacks[number]
        request = self._requests[number]
        is_whole = response.is_whole(request.max_new_tokens)
        if not is_whole and not self._pool.continues:
            self._requeue(number)
            return
        if is_whole:
            del self._requests[number], self._callbacks[number]
        else:
            self._requests[number] = replace(request, partial=response)
            self._queue.appendleft(number)
        on_response(index, response)

    def _timeout_error(self) -> UserError:
        worst = max(self._pool.states, key=lambda state: state.failures)
        return UserError.of(
            f"{worst.message}, and no server gave a response for {self._pool.timeout:g} s; check that a server is "
            "running, or raise rollout.timeout"
        )

    async def _watch(self, state: _ServerState) -> None:
        """Probe a server repeatedly, to find out whether it hangs, or works again after it was down."""
        every = self._pool.probe_every
        while True:
            await asyncio.sleep(min(every, POLL) if state.down else every)
            idle = state.usable and not state.in_flight
            if idle or state.restarted or time.monotonic() < state.not_before:
                continue
            try:
                await self._pool.probe(state.server)
            except SupersededError:
                continue
            except ServerLostError as error:
                self._failed(state, error)
                if not isinstance(error, RestartedError):
                    state.cancel_requests()
            except Exception as error:
                self._stop(error)
            else:
                state.down = False
                self._pool.changed.set()

    def _requeue(self, number: int) -> None:
        self.retried += 1  # the request's connection has ended, so a request gets only one response
        self._queue.appendleft(number)

    def _failed(self, state: _ServerState, error: ServerLostError) -> None:
        now = time.monotonic()
        if isinstance(error, RestartedError):
            state.restarted, state.down = True, False
        elif not state.down or now >= state.not_before:  # count requests that fail at the same time only once
            state.failures += 1
            state.not_before = now + min(FIRST_PAUSE * 2.0 ** (state.failures - 1), LONGEST_PAUSE)
            state.down, state.message = True, str(error)
        self._pool.changed.set()

    def _stop(self, error: Exception) -> None:
        self.error = self.error or error
        self._pool.changed.set()
