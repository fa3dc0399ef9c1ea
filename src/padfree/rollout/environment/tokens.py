"""Requests of many episodes, and the two ways in which a sampler answers them.

    Rounds     episode 0   ask ------- wait      | sampled   ask --- wait |        a round begins when every episode
               episode 1   ask - wait ---------- | together  (ended)      |        that is still going waits for tokens
    Streams    each request goes to the sampler as it comes, and its response to its episode

Rounds are for samplers that only have `sample`. Which requests are in which round follows from the episodes and not
from how fast they are, so that a resumed run repeats it to the bit; a slow tool therefore holds the others up. Every
rank makes the same number of calls of `sample`, some of them with nothing.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol, cast

from padfree.errors import UserError
from padfree.rollout.base import AsyncSampler, Response, Sampler, SamplingRequest
from padfree.rollout.loop_thread import LoopThread

Place = tuple[int, ...]
Round = list[tuple[tuple[int, Place], SamplingRequest]]
Tell = Callable[[Any], list[Any]]
"""What every rank says, on every rank. A collective."""

POLL = 0.2
"""Seconds."""

SETTLED = 16
"""Turns of the event loop without a new request before a round begins: branches of an episode ask one by one."""


class TokenSource(Protocol):
    """Where the tokens of episodes come from. `respond`, `began` and `left` are called in the loop's thread."""

    def began(self, episode: int) -> None: ...

    def left(self, episode: int) -> None:
        """It will ask for no more tokens."""

    async def respond(self, episode: int, place: Place, request: SamplingRequest) -> Response: ...

    def serve(self, episodes: Future[Any], tell: Tell) -> None:
        """Answer until the episodes of all ranks have ended; an error of one rank is raised on all."""


class Rounds:
    """Requests that are gathered and sampled together."""

    def __init__(self, sampler: Sampler, thread: LoopThread, timeout: float) -> None:
        self._sampler, self._thread, self._timeout = sampler, thread, timeout
        self._asking: dict[int, int] = {}  # requests of each episode that is going
        self._waiting: dict[tuple[int, Place], tuple[SamplingRequest, asyncio.Future[Response]]] = {}
        self._calm: int | None = None  # turns of the loop since the last change; None: nobody counts
        self._out = False  # whether a round is being sampled
        self._rounds: queue.SimpleQueue[Round] = queue.SimpleQueue()

    # In the loop's thread

    def began(self, episode: int) -> None:
        self._asking[episode] = 0

    def left(self, episode: int) -> None:
        if self._asking.pop(episode, None) is not None:
            self._changed()

    async def respond(self, episode: int, place: Place, request: SamplingRequest) -> Response:
        future: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        name = (episode, place)
        assert name not in self._waiting, "a place of the tree is written once"
        if episode not in self._asking:
            raise UserError(
                "rollout.environment", "an episode asks for tokens after its end", "await what it has begun"
            )
        self._waiting[name] = request, future
        self._asking[episode] += 1
        self._changed()
        try:
            return await future
        finally:
            if self._waiting.pop(name, None) is not None:  # the episode has given up
                self._answered(episode)

    def _answered(self, episode: int) -> None:
        if episode in self._asking:
            self._asking[episode] -= 1

    def _changed(self) -> None:
        if self._calm is None:
            asyncio.get_running_loop().call_soon(self._settle)
        self._calm = 0

    def _settle(self) -> None:
        assert self._calm is not None
        if self._out or not self._waiting or not all(self._asking.values()):
            self._calm = None
        elif self._calm < SETTLED:
            self._calm += 1
            asyncio.get_running_loop().call_soon(self._settle)
        else:
            self._calm, self._out = None, True
            self._rounds.put([(name, self._waiting[name][0]) for name in sorted(self._waiting)])

    def _deliver(self, taken: Round, responses: list[Response]) -> None:
        self._out = False
        for (name, _), response in zip(taken, responses, strict=True):
            found = self._waiting.pop(name, None)
            if found is not None:
                self._answered(name[0])
                if not found[1].done():
                    found[1].set_result(response)
        self._changed()

    # In the thread that asked for a batch

    def serve(self, episodes: Future[Any], tell: Tell) -> None:
        while True:
            taken, error = self._next(episodes)
            everybody = tell((error, bool(taken)))
            for line, _ in everybody:
                if line is not None:
                    raise UserError.of(line)
            if not any(asks for _, asks in everybody):
                return
            responses = self._sampler.sample([request for _, request in taken])
            if taken:
                self._thread.call(self._deliver, taken, responses)

    def _next(self, episodes: Future[Any]) -> tuple[Round, str | None]:
        """The next round, or nothing once all episodes have ended, and what was wrong with one."""
        while True:
            if episodes.done():
                return [], failure_of(episodes)
            try:
                return self._rounds.get(timeout=POLL), None
            except queue.Empty:
                if (error := blocked(self._thread, self._timeout)) is not None:
                    return [], error


class Streams:
    """Requests that a sampler takes at any time."""

    def __init__(self, sampler: AsyncSampler, thread: LoopThread, timeout: float) -> None:
        self._sampler, self._thread, self._timeout = sampler, thread, timeout

    def began(self, episode: int) -> None:
        pass

    def left(self, episode: int) -> None:
        pass

    async def respond(self, episode: int, place: Place, request: SamplingRequest) -> Response:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Response] = loop.create_future()

        def deliver(response: Response) -> None:
            if not future.done():
                future.set_result(response)

        def arrived(_: int, response: Response) -> None:  # in a thread of the sampler
            if response.is_whole(request.max_new_tokens):
                loop.call_soon_threadsafe(deliver, response)

        self._sampler.begin([request], arrived)
        return await future

    def serve(self, episodes: Future[Any], tell: Tell) -> None:
        while True:
            error = self._wait(episodes)
            everybody = tell((error, not episodes.done()))
            for line, _ in everybody:
                if line is not None:
                    raise UserError.of(line)
            if not any(unfinished for _, unfinished in everybody):
                return
            self._sampler.renew()

    def _wait(self, episodes: Future[Any]) -> str | None:
        """Until this rank's episodes have ended, or something must be done about it; what is wrong."""
        ended = threading.Event()
        episodes.add_done_callback(lambda _: ended.set())
        while not ended.wait(POLL):
            if self._sampler.failure is not None:
                return str(self._sampler.failure)
            if self._sampler.stuck:
                return None
            if (error := blocked(self._thread, self._timeout)) is not None:
                return error
        return failure_of(episodes)


def make_token_source(sampler: Sampler, thread: LoopThread, timeout: float) -> TokenSource:
    if hasattr(sampler, "begin"):
        return Streams(cast(AsyncSampler, sampler), thread, timeout)
    return Rounds(sampler, thread, timeout)


def failure_of(episodes: Future[Any]) -> str | None:
    if episodes.cancelled():
        return "rollout.environment: the episodes were cancelled; see that no episode cancels another"
    error = episodes.exception()
    if error is None or isinstance(error, UserError):
        return None if error is None else str(error)
    raise error


def blocked(thread: LoopThread, timeout: float) -> str | None:
    """A line if an episode keeps the event loop for itself: no other can go on, nor can its time-out end it."""
    if thread.seconds_blocked() <= timeout:
        return None
    return (
        f"rollout.environment: an episode has kept the event loop for more than {timeout:g} s without an await; await "
        "what takes long, with asyncio.to_thread where it is a plain function"
    )
