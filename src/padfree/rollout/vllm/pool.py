"""Several servers: each request goes to the least loaded one, and what a server fails to answer goes to another.

    queue   5 6 7 8         server 0   1 3     two requests under way
                            server 1   2       one: request 5 goes here
    server 1 fails          queue   2 6 7 8    its requests stand first; it is left alone for 0.5, 1, 2, ... seconds

A round ends when every request has its response, or when no server is left that has the weights: then somebody must
give them to a server that has come back without, and what is `missing` is asked for in another round. A request has one
response: it is asked for again only after its connection has ended.

A standing round (`Pool.stand`) has no end: requests are added to it, and answered in their order by threads that stay.
A response that an exchange of weights has cut is asked for again, from where it was cut. With no server left the round
is `stuck` until weights were handed over.

While requests are under way each server is asked for its version every few seconds. One that does not answer hangs: its
connections are closed, which gives its requests back.

Whatever fails on the other side of an exchange of weights (`Gate`) is asked for again, and no server is blamed: the
exchange has seen for itself which of them are well.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from padfree.errors import UserError
from padfree.rollout.base import OnResponse, Response, SamplingRequest
from padfree.rollout.vllm.http import RestartedError, Server, ServerLostError

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 15.0
POLL, PATIENCE, GRACE = 0.2, 1.0, 5.0
"""Seconds."""

Ask = Callable[[Server, SamplingRequest], Response]
Probe = Callable[[Server], None]
"""Raises what is wrong with a server."""


class SupersededError(Exception):
    """Weights were exchanged since a server was asked: it is asked again, and nobody has failed."""


class Gate:
    """Closed while weights are exchanged. Threads pass it with a number, and can tell whether it was closed since."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self._turns = 0  # openings and closings: odd while it is closed

    @property
    def is_closed(self) -> bool:
        return self._turns % 2 == 1

    @contextmanager
    def closed(self) -> Iterator[None]:
        """A block in which no thread passes. One thread at a time enters it."""
        self._open.clear()
        self._turns += 1
        try:
            yield
        finally:
            self._turns += 1
            self._open.set()

    def passed(self) -> int:
        """Wait until it is open; the number for `closed_since`."""
        while True:
            self._open.wait()
            number = self._turns
            if number % 2 == 0:
                return number

    def closed_since(self, number: int) -> bool:
        return self._turns != number


@dataclass(kw_only=True, slots=True, eq=False)
class _State:
    """What this process knows of a server."""

    server: Server
    under_way: int = 0
    failures: int = 0  # in a row
    not_before: float = 0.0
    down: bool = False
    restarted: bool = False  # it answers, and lacks the weights
    line: str = ""  # of what went wrong last

    @property
    def usable(self) -> bool:
        return not self.down and not self.restarted


@dataclass(kw_only=True, slots=True, eq=False)
class Round:
    """What became of requests, by their numbers."""

    found: dict[int, Response] = field(default_factory=dict)
    missing: list[int] = field(default_factory=list)
    retried: int = 0


class Pool:
    """Servers with the present weights, as this process sees them."""

    def __init__(
        self, servers: Sequence[Server], *, concurrency: int, timeout: float, probe_every: float, probe: Probe
    ) -> None:
        self._states = [_State(server=server) for server in servers]
        self._concurrency, self._timeout = concurrency, timeout
        self._probe_every, self._probe = probe_every, probe
        self.gate = Gate()
        self._change = threading.Condition()

    @property
    def restarted(self) -> list[Server]:
        return [state.server for state in self._states if state.restarted]

    def reset(self, usable: Sequence[Server]) -> None:
        """After an exchange of weights: these have them; the others are down until they answer with them."""
        with self._change:
            for state in self._states:
                state.restarted = state.server not in usable
                state.down, state.failures = False, 0
            self._change.notify_all()

    def ask_all(
        self,
        requests: Sequence[SamplingRequest],
        numbers: Sequence[int],
        ask: Ask,
        on_response: OnResponse,
    ) -> Round:
        """Ask for the requests of these numbers, so many at a time."""
        if not numbers:
            return Round()
        work = _Work(self, {number: requests[number] for number in numbers}, ask, on_response)
        try:
            work.begin(min(len(numbers), self._concurrency * len(self._states)))
            work.ended.wait()
        finally:
            work.leave()
        if work.error is not None:
            raise work.error
        work.round.missing = sorted(work.queue)
        return work.round

    def stand(self, ask: Ask) -> StandingWork:
        """A round without an end."""
        work = StandingWork(self, ask)
        work.begin(self._concurrency * len(self._states))
        return work


class _Work:
    """One round, shared by its threads; `pool._change` guards all of it."""

    def __init__(self, pool: Pool, requests: dict[int, SamplingRequest], ask: Ask, on_response: OnResponse) -> None:
        self._pool, self._change, self._states = pool, pool._change, pool._states
        self._requests, self._ask, self._on_response = requests, ask, on_response
        self.queue = deque(requests)
        self.round = Round()
        self.error: Exception | None = None
        self._total = len(requests)
        self.ended = threading.Event()  # nothing more is asked for
        self._last_sign = time.monotonic()  # of a response, or of a server that has not failed since its last one
        self._wanted = True  # whether anybody wants what is still under way
        self._left = threading.Event()  # and nothing is
        self._asking: list[threading.Thread] = []
        self._watching: list[threading.Thread] = []

    def begin(self, number: int) -> None:
        """With so many requests at a time."""
        self._asking = [threading.Thread(target=self.answer_some, name="request", daemon=True) for _ in range(number)]
        self._watching = [
            threading.Thread(target=self.watch, args=(state,), name="probe", daemon=True) for state in self._states
        ]
        for thread in (*self._watching, *self._asking):
            thread.start()

    def leave(self) -> None:
        """End the threads. Requests under way are waited for, with their servers watched, unless nobody wants them.

        That is so after an error, and where the caller was interrupted and the round has not ended. A connection that
        is being made cannot be closed: a thread may outlive this by its timeout, and what it gets is not told.
        """
        with self._change:
            self._wanted = self._wanted and self.ended.is_set() and self.error is None
            self._end()
        deadline = time.monotonic() + GRACE
        for thread in self._asking:
            while thread.is_alive() and (self._wanted or time.monotonic() < deadline):
                if not self._wanted:
                    self._hang_up()
                thread.join(POLL)
        self._left.set()
        if not self._wanted:
            self._hang_up()  # probes, too
        for thread in self._watching:
            thread.join(None if self._wanted else GRACE)

    def _hang_up(self) -> None:
        for state in self._states:
            state.server.hang_up()

    def answer_some(self) -> None:
        while (task := self._next()) is not None:
            number, state = task
            try:
                response = self._ask(state.server, self._requests[number])
            except SupersededError:
                with self._change:
                    self._give_back(number, state)
            except ServerLostError as error:
                with self._change:
                    self._give_back(number, state)
                    self._failed(state, error)
            except Exception as error:
                with self._change:
                    self._give_back(number, state)
                    self._stop(error)
            else:
                with self._change:
                    state.under_way -= 1
                    state.failures = 0
                    self._last_sign = time.monotonic()
                    try:
                        if self._wanted:
                            self._keep(number, response)
                    except Exception as error:  # of whoever is told of the response, and must know
                        self._stop(error)

    def _keep(self, number: int, response: Response) -> None:
        assert number not in self.round.found, "a request is asked for again only when it has no response"
        self.round.found[number] = response
        self._on_response(number, response)
        if len(self.round.found) == self._total:
            self._end()

    def _is_waited_for(self) -> bool:
        """Whether there are requests without a response."""
        return True

    def _without_servers(self) -> None:
        """Every server with the weights is gone: whoever calls must hand them over again."""
        self._end()

    def _next(self) -> tuple[int, _State] | None:
        """A request and the server for it; None: there is nothing left to ask."""
        with self._change:
            while not self.ended.is_set():
                now = time.monotonic()
                usable = [state for state in self._states if state.usable]
                well = any(not state.failures for state in usable)
                if well or self._pool.gate.is_closed or not self._is_waited_for():
                    self._last_sign = now  # an exchange of weights has a limit of its own
                if not usable and any(state.restarted for state in self._states):
                    self._without_servers()
                elif now - self._last_sign > self._pool._timeout:
                    self._stop(self._nobody())
                elif usable and self.queue:
                    state = min(usable, key=lambda state: state.under_way)
                    state.under_way += 1
                    return self.queue.popleft(), state
                if not self.ended.is_set():
                    self._change.wait(PATIENCE)
            return None

    def _nobody(self) -> ValueError:
        worst = max(self._states, key=lambda state: state.failures)
        return UserError.of(
            f"{worst.line}, and no server gave a response for {self._pool._timeout:g} s; see that one runs, or raise "
            "rollout.timeout"
        )

    def watch(self, state: _State) -> None:
        """Find out that a server hangs, and that one that was down is there again."""
        while not self._left.wait(min(self._pool._probe_every, POLL if state.down else self._pool._probe_every)):
            with self._change:
                idle = state.usable and not state.under_way
                if idle or state.restarted or time.monotonic() < state.not_before:
                    continue
            try:
                self._pool._probe(state.server)
            except SupersededError:
                continue
            except ServerLostError as error:
                with self._change:
                    self._failed(state, error)
                if not isinstance(error, RestartedError):
                    state.server.hang_up()
            except Exception as error:
                with self._change:
                    self._stop(error)
            else:
                with self._change:
                    state.down = False
                    self._change.notify_all()

    def _give_back(self, number: int, state: _State) -> None:
        state.under_way -= 1
        self.round.retried += 1
        self.queue.appendleft(number)
        self._change.notify()

    def _failed(self, state: _State, error: ServerLostError) -> None:
        now = time.monotonic()
        if isinstance(error, RestartedError):
            state.restarted, state.down = True, False
        elif not state.down or now >= state.not_before:  # many requests fail at once: that is one failure
            state.failures += 1
            state.not_before = now + min(FIRST_PAUSE * 2.0 ** (state.failures - 1), LONGEST_PAUSE)
            state.down, state.line = True, str(error)
        self._change.notify()

    def _stop(self, error: Exception) -> None:
        self.error = self.error or error
        self._end()

    def _end(self) -> None:
        self.ended.set()
        self._change.notify_all()


class StandingWork(_Work):
    """A round without an end, that requests are added to."""

    def __init__(self, pool: Pool, ask: Ask) -> None:
        super().__init__(pool, {}, ask, self._tell)
        self._told: dict[int, tuple[OnResponse, int]] = {}  # whom to tell of a response, and by which number

    @property
    def stuck(self) -> bool:
        """Whether requests wait for a server that has the weights, and there is one that could have them."""
        with self._change:
            states = self._states
            return bool(self.queue) and any(s.restarted for s in states) and not any(s.usable for s in states)

    def add(self, requests: Iterable[SamplingRequest], on_response: OnResponse) -> None:
        """Behind all others. Each response is told by the place of its request among these."""
        with self._change:
            for place, request in enumerate(requests):
                number = self._total
                self._total += 1
                self._requests[number], self._told[number] = request, (on_response, place)
                self.queue.append(number)
            self._change.notify_all()

    def take_retried(self) -> int:
        """How many requests were asked for again since this was asked last."""
        with self._change:
            retried, self.round.retried = self.round.retried, 0
            return retried

    def close(self) -> None:
        with self._change:
            self._wanted = False
        self.leave()

    def _keep(self, number: int, response: Response) -> None:
        request = self._requests[number]
        self._on_response(number, response)
        if response.is_whole(request.room):
            del self._requests[number], self._told[number]
        else:
            self._requests[number] = replace(request, begun=response)
            self.queue.appendleft(number)
            self._change.notify()

    def _tell(self, number: int, response: Response) -> None:
        on_response, place = self._told[number]
        on_response(place, response)

    def _is_waited_for(self) -> bool:
        return bool(self._requests)

    def _without_servers(self) -> None:
        self._last_sign = time.monotonic()  # the run waits for a server itself, and for no longer than it may
