"""Sampling for many concurrent episodes, with a synchronous or an asynchronous sampler.

`Rounds` is for samplers that have only the method `sample`. When all running episodes wait for tokens, one call of
`sample` (a round) answers all their requests. The rounds do not depend on timing, so a resumed run repeats them.
However, a slow tool in one episode delays all episodes. Every rank calls `sample` once per round, even without a
request.

`Streams` is for an `AsyncSampler`. It sends each request to the sampler without waiting for other episodes.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from concurrent.futures import Future
from typing import Any, Protocol, cast

from padfree.errors import UserError
from padfree.rollout.base import AsyncSampler, Gather, Response, Sampler, SamplingRequest
from padfree.rollout.loop_thread import LoopThread

TurnPath = tuple[int, ...]
"""Identifies a turn of an episode. The requests that are sampled together (a round) are sorted by episode and turn."""
Round = list[tuple[tuple[int, TurnPath], SamplingRequest]]

POLL = 0.2
"""Seconds between two checks while waiting for episodes."""

QUIET_ITERATIONS = 16
"""How many event-loop iterations `Rounds` waits for further requests after all running episodes wait for tokens.

Further requests come from episodes that sample several continuations concurrently. Each new request restarts the count.
After the wait, all requests are sampled together.
"""


class TokenSource(Protocol):
    """Samples tokens for episodes. Its methods are called in the thread of the event loop."""

    def started(self, episode: int) -> None: ...

    def finished(self, episode: int) -> None:
        """Record that the episode will request no more tokens."""

    async def respond(self, episode: int, path: TurnPath, request: SamplingRequest) -> Response: ...

    def serve(self, episodes: Future[Any], gather: Gather) -> None:
        """Answer requests until the episodes of all ranks have ended. An error on one rank is raised on all ranks."""


class Rounds:
    """Samples the requests of all waiting episodes together, in rounds."""

    def __init__(self, sampler: Sampler, thread: LoopThread, timeout: float) -> None:
        self._sampler, self._thread, self._timeout = sampler, thread, timeout
        self._num_waiting: dict[int, int] = {}  # waiting requests of each running episode
        self._waiting: dict[tuple[int, TurnPath], tuple[SamplingRequest, asyncio.Future[Response]]] = {}
        self._quiet: int | None = None  # iterations of the event loop without a change; None: not counting
        self._sampling = False  # whether a round is being sampled
        self._rounds: queue.SimpleQueue[Round] = queue.SimpleQueue()

    # In the thread of the event loop

    def started(self, episode: int) -> None:
        self._num_waiting[episode] = 0

    def finished(self, episode: int) -> None:
        if self._num_waiting.pop(episode, None) is not None:
            self._changed()

    async def respond(self, episode: int, path: TurnPath, request: SamplingRequest) -> Response:
        future: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        name = (episode, path)
        assert name not in self._waiting, "each turn is sampled once"
        if episode not in self._num_waiting:
            raise UserError(
                "rollout.environment",
                "an episode requests tokens after its end",
                "await all tasks that the episode creates",
            )
        self._waiting[name] = request, future
        self._num_waiting[episode] += 1
        self._changed()
        try:
            return await future
        finally:
            if self._waiting.pop(name, None) is not None:  # the episode cancelled the request
                self._answered(episode)

    def _answered(self, episode: int) -> None:
        if episode in self._num_waiting:
            self._num_waiting[episode] -= 1

    def _changed(self) -> None:
        if self._quiet is None:
            asyncio.get_running_loop().call_soon(self._start_if_quiet)
        self._quiet = 0

    def _start_if_quiet(self) -> None:
        assert self._quiet is not None
        if self._sampling or not self._waiting or not all(self._num_waiting.values()):
            self._quiet = None
        elif self._quiet < QUIET_ITERATIONS:
            self._quiet += 1
            asyncio.get_running_loop().call_soon(self._start_if_quiet)
        else:
            self._quiet, self._sampling = None, True
            self._rounds.put([(name, self._waiting[name][0]) for name in sorted(self._waiting)])

    def _deliver(self, requests: Round, responses: list[Response]) -> None:
        self._sampling = False
        for (name, _), response in zip(requests, responses, strict=True):
            waiting = self._waiting.pop(name, None)
            if waiting is not None:
                self._answered(name[0])
                if not waiting[1].done():
                    waiting[1].set_result(response)
        self._changed()

    # In the thread that plays a batch

    def serve(self, episodes: Future[Any], gather: Gather) -> None:
        while True:
            requests, error = self._next(episodes)
            by_rank = gather((error, bool(requests)))
            for message, _ in by_rank:
                if message is not None:
                    raise UserError.of(message)
            if not any(has_requests for _, has_requests in by_rank):
                return
            responses = self._sampler.sample([request for _, request in requests])
            if requests:
                self._thread.call(self._deliver, requests, responses)

    def _next(self, episodes: Future[Any]) -> tuple[Round, str | None]:
        """Wait for the next round (requests that are sampled together). Return them, and an error message or None.

        After all episodes have ended, the list of requests is empty.
        """
        while True:
            if episodes.done():
                return [], failure_of(episodes)
            try:
                return self._rounds.get(timeout=POLL), None
            except queue.Empty:
                if (error := blocked(self._thread, self._timeout)) is not None:
                    return [], error


class Streams:
    """Sends each request of an episode to an `AsyncSampler` without waiting for requests of other episodes."""

    def __init__(self, sampler: AsyncSampler, thread: LoopThread, timeout: float) -> None:
        self._sampler, self._thread, self._timeout = sampler, thread, timeout

    def started(self, episode: int) -> None:
        pass

    def finished(self, episode: int) -> None:
        pass

    async def respond(self, episode: int, path: TurnPath, request: SamplingRequest) -> Response:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Response] = loop.create_future()

        def deliver(response: Response) -> None:
            if not future.done():
                future.set_result(response)

        def on_response(_: int, response: Response) -> None:  # in a thread of the sampler
            if response.is_whole(request.max_new_tokens):
                loop.call_soon_threadsafe(deliver, response)

        self._sampler.begin([request], on_response)
        return await future

    def serve(self, episodes: Future[Any], gather: Gather) -> None:
        while True:
            error = self._wait(episodes)
            by_rank = gather((error, not episodes.done()))
            for message, _ in by_rank:
                if message is not None:
                    raise UserError.of(message)
            if not any(unfinished for _, unfinished in by_rank):
                return
            self._sampler.renew()

    def _wait(self, episodes: Future[Any]) -> str | None:
        """Wait until this rank's episodes have ended. Return an error message, or None if there is no error.

        Also stop waiting, and return None, if no reachable server has the current weights. The weights must then be
        sent again.
        """
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
        return "rollout.environment: the episodes were cancelled; check that no episode cancels another"
    error = episodes.exception()
    if error is None or isinstance(error, UserError):
        return None if error is None else str(error)
    raise error


def blocked(thread: LoopThread, timeout: float) -> str | None:
    """Return an error message if an episode has blocked the event loop for more than `timeout` seconds, else None.

    While the event loop is blocked, all episodes and all timeouts stop.
    """
    if thread.seconds_blocked() <= timeout:
        return None
    return (
        f"rollout.environment: an episode has blocked the event loop for more than {timeout:g} s; await long "
        "operations, and call blocking functions with asyncio.to_thread"
    )
