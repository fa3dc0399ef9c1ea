"""The `Sampler` for inference servers.

- `update_weights`: rank 0 sends the weights to every server that answers. The canary (a comparison of
  log-probabilities) then verifies each server.
- `sample`: each rank sends its own requests to the servers. If no server has the weights any more, rank 0 sends them
  again. Only requests without a response are repeated.
- `sleep`: with `rollout.colocated`, the servers release their GPU memory for training.

A server that fails during a weight sync is not used until the next weight sync.

Requests run on one event loop in its own thread. Collectives stay in the main thread.
"""

from __future__ import annotations

import asyncio
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from padfree.choices import OnUpdate
from padfree.distributed import Mesh, gather_objects, raise_together
from padfree.errors import UserError
from padfree.rollout.base import OnFinished, OnProgress, OnResponse, Response, SamplingRequest, Score
from padfree.rollout.engines.servers.canary import NUM_SAMPLED, Canary, ScoredSequences
from padfree.rollout.engines.servers.pool import Pool, RequestQueue, SupersededError
from padfree.rollout.engines.servers.server_api import SamplingSettings, ServerApi, ServerLostError
from padfree.rollout.engines.servers.server_processes import PROBE, Launcher
from padfree.rollout.engines.servers.weight_sync import WeightSync, broadcast_object, for_each
from padfree.rollout.loop_thread import LoopThread
from padfree.rollout.sampling_rng import key_behind
from padfree.rollout.token_ids import vocabulary_of
from padfree.warning import PadfreeWarning

PROBE_EVERY = 5.0
"""Maximum seconds between two probes of a server."""
REFUSALS = 3
"""The run ends if all servers fail to load the weights this many times in a row."""


@dataclass(slots=True)
class _TokenCount:
    """Counts the sampled tokens since the time `since`, to compute the sampling speed."""

    tokens: int = 0
    since: float = field(default_factory=time.perf_counter)


@dataclass(kw_only=True, eq=False)
class ServerSampler:
    """The sampler for inference servers: sends them requests and weights. `make_server_sampler` makes one per rank."""

    servers: Sequence[ServerApi]
    loop: LoopThread
    mesh: Mesh
    trained: PreTrainedModel
    sync: WeightSync
    launcher: Launcher | None  # on rank 0, if the run starts the servers
    sampling: SamplingSettings
    canary: Canary
    sequences: Sequence[Sequence[int]]  # token ids of the canary
    score: Score
    salt: str  # separates the entries of this run in the servers' prefix caches
    concurrency: int  # requests in flight for each server
    on_update: OnUpdate
    timeout: float
    colocated: bool = False  # whether the servers share GPUs with the run, and sleep while it trains

    def __post_init__(self) -> None:
        self._first, self._version = self.mesh.loss.rank == 0, -1
        self._metrics: dict[str, float] = {}
        self._sync_metrics: dict[str, float] = {}
        self._queue: RequestQueue | None = None  # requests of `begin`
        self._count = _TokenCount()
        self._asleep = False
        every = min(PROBE_EVERY, self.timeout / 4)
        self._pool = Pool(
            self.servers,
            concurrency=self.concurrency,
            timeout=self.timeout,
            probe_every=every,
            probe=self._probe,
            continues=self.on_update == "continue",
        )

    # Weights

    def update_weights(self, trained: PreTrainedModel, version: int) -> None:
        assert version >= self._version, "policy versions never decrease"
        self._metrics, self._sync_metrics = self._queue_metrics(), {}
        if self.colocated:
            self._make_room()
        with self._gate_closed():
            self.trained, self._version = trained, version
            self._send_weights()

    def renew(self) -> None:
        with self._gate_closed():
            self._send_weights()

    def sleep(self) -> None:
        """Make the servers release their GPU memory until the next `update_weights`. Collective.

        If a server that this run started fails, wait up to `timeout` seconds for its restart. Give a warning for each
        server that did not confirm the release.
        """
        assert self.colocated, "rollout.colocated is false"
        begin = time.perf_counter()
        lost: dict[ServerApi, ServerLostError] = {}
        error = None
        if self._first:
            try:
                lost = self.loop.run(self._put_to_sleep())
                # Servers are not restarted until `update_weights`, because a starting server allocates GPU memory.
                if self.launcher is not None:
                    self.loop.run(self.launcher.probe_lock.acquire())
                self._asleep = True
            except UserError as wrong:
                error = str(wrong)
        raise_together(error, self.mesh.loss.group)  # no rank trains before the servers have released their memory
        for problem in lost.values():
            warnings.warn(
                f"{problem}; if this server is running, it keeps its GPU memory, and training may run out of memory",
                PadfreeWarning,
                stacklevel=2,
            )
        self._sync_metrics["sleep_seconds"] = time.perf_counter() - begin

    async def _put_to_sleep(self) -> dict[ServerApi, ServerLostError]:
        """Put every server to sleep, and return the servers that failed. Rank 0 only."""
        # Only a weight sync that sends all weights replaces weights that a server has discarded.
        level = 2 if self.sync.sends_all else 1

        async def put_to_sleep(server: ServerApi) -> None:
            await server.sleep(level)

        awake, deadline = list(self.servers), time.monotonic() + self.timeout
        while True:
            lost = await for_each(awake, put_to_sleep)
            if not lost or self.launcher is None or time.monotonic() > deadline:
                return lost
            if self.launcher.fatal_error is not None:
                raise UserError.of(self.launcher.fatal_error)
            awake = list(lost)
            await asyncio.sleep(1.0)

    def _make_room(self) -> None:
        """Release memory that this process no longer uses, so that the servers can wake. Collective."""
        if self.mesh.device.type == "cuda":
            torch.cuda.empty_cache()
        gather_objects(None, self.mesh.loss.group, "the release of GPU memory for the servers")
        if self._asleep and self.launcher is not None:
            self.loop.call(self.launcher.probe_lock.release)
        self._asleep = False

    @contextmanager
    def _gate_closed(self) -> Iterator[None]:
        """Context manager inside which no request starts.

        With `rollout.on_update=finish`, it first waits for the requests in progress.
        """
        gate = self._pool.gate
        if self.on_update == "finish":
            self.loop.run(self._pool.drain())
            # A pause interrupts the responses of all ranks, so wait for the other ranks.
            gather_objects(None, self.mesh.loss.group, "the end of all responses before a weight sync")

        async def close() -> None:
            gate.close()

        self.loop.run(close())
        try:
            yield
        finally:
            self.loop.call(self._pool.resume)

    def _send_weights(self) -> None:
        """Send the current weights to every server that can load them, and verify the result. Collective.

        Raise an error unless at least one server has received the weights and passed the check.
        """
        deadline = time.monotonic() + self.timeout
        ready: list[ServerApi] = []
        lost: dict[str, str] = {}
        refusals = 0
        while not ready:
            error = self.loop.run(self._wait_for_server(deadline, lost)) if self._first else None
            if (error := broadcast_object(error, self.mesh)) is not None:
                raise UserError.of(error)
            begin = time.perf_counter()
            outcome = broadcast_object(self.sync.send(self.trained, self._version), self.mesh)
            if outcome.error is not None:
                raise UserError.of(outcome.error)
            self._add("weight_sync_seconds", time.perf_counter() - begin)
            self._add("weight_sync_bytes", outcome.num_bytes)
            lost = outcome.failed
            refusals = refusals + 1 if len(outcome.refused) == len(self.servers) else 0
            if refusals == REFUSALS:
                raise UserError.of(self._refused(lost))
            ready = self._verified([server for server in self.servers if server.url not in lost], lost)
        self._sync_metrics["servers"] = float(len(ready))
        self.loop.call(self._pool.reset, ready)

    def _add(self, name: str, value: float) -> None:
        self._sync_metrics[name] = self._sync_metrics.get(name, 0.0) + value

    async def _wait_for_server(self, deadline: float, lost: Mapping[str, str]) -> str | None:
        """Wait until a server answers, and return None. Return an error message if none answers in time. Rank 0 only.

        `deadline`: the end of the wait on the clock `time.monotonic`. `lost`: why the last attempt to send the weights
        failed, by URL of the server.
        """
        if lost and time.monotonic() > deadline:
            return self._timed_out(lost)

        async def answers(server: ServerApi) -> None:
            await server.version(timeout=PROBE)

        while True:
            if self.launcher is not None and self.launcher.fatal_error is not None:
                return self.launcher.fatal_error
            silent = await for_each(self.servers, answers)
            if len(silent) < len(self.servers):
                return None
            if time.monotonic() > deadline:
                return self._timed_out({server.url: str(error) for server, error in silent.items()})
            await asyncio.sleep(1.0)

    def _verified(self, servers: Sequence[ServerApi], lost: dict[str, str]) -> list[ServerApi]:
        """Return the servers whose log-probabilities show that they have the trainer's weights. Collective.

        Raise a `UserError` if a server has other weights. On rank 0, add to `lost` the error message of each server
        that failed, by URL.
        """
        scored: dict[str, ScoredSequences] = {}
        error = None

        async def score(server: ServerApi) -> None:
            scored[server.url] = await server.scored(
                self.sequences,
                num_sampled=NUM_SAMPLED,
                vocabulary=vocabulary_of(self.trained),
                temperature=self.sampling.temperature,
                model=self.sync.name(self._version),
                salt=f"{self.salt} canary {self._version}",
            )

        if self._first:
            try:
                failures = self.loop.run(for_each(servers, score))
                lost |= {server.url: str(failure) for server, failure in failures.items()}
            except UserError as wrong:
                error = str(wrong)
        raise_together(error, self.mesh.loss.group)
        scored = broadcast_object(scored, self.mesh)
        try:
            metrics = self.canary.compare(scored, self.score, self.sampling.temperature, self._version)
            self._sync_metrics |= metrics
        except UserError as wrong:
            error = str(wrong)
        raise_together(error, self.mesh.loss.group)
        return [server for server in servers if server.url in scored]

    def _refused(self, messages: Mapping[str, str]) -> str:
        return (
            f"{next(iter(messages.values()))}, in {REFUSALS} weight syncs in a row; start the server with the model of "
            "model.path"
        )

    def _timed_out(self, messages: Mapping[str, str]) -> str:
        return (
            f"{next(iter(messages.values()))}, and no server accepted the weights for {self.timeout:g} s; check "
            "that a server is running, or raise rollout.timeout"
        )

    # Responses

    def sample(
        self,
        requests: Sequence[SamplingRequest],
        *,
        on_progress: OnProgress | None = None,
        on_finished: OnFinished | None = None,
    ) -> list[Response]:
        assert self._version >= 0, "call update_weights first"
        begin = time.perf_counter()
        responses: dict[int, Response] = {}
        retried = 0
        while True:
            missing = [index for index in range(len(requests)) if index not in responses]

            def keep(position: int, response: Response, missing: Sequence[int] = missing) -> None:
                assert missing[position] not in responses, "a request has two responses"
                responses[missing[position]] = response
                if on_finished is not None:
                    on_finished([(missing[position], response)])
                if on_progress is not None:
                    on_progress(len(responses))

            error = None
            try:
                retried += self.loop.run(self._pool.run_all([requests[n] for n in missing], self._respond, keep))
            except UserError as wrong:
                error = str(wrong)
            by_rank: list[Any] = [None] * self.mesh.loss.size
            dist.all_gather_object(by_rank, (error, len(responses) < len(requests)), group=self.mesh.loss.group)
            for message, _ in by_rank:
                if message is not None:
                    raise UserError.of(message)
            if not any(is_incomplete for _, is_incomplete in by_rank):
                break
            self.renew()
        tokens = sum(len(response.tokens) for response in responses.values())
        self._metrics = self._sampling_metrics(tokens, time.perf_counter() - begin, retried)
        return [responses[index] for index in range(len(requests))]

    def begin(self, requests: Sequence[SamplingRequest], on_response: OnResponse) -> None:
        assert self._version >= 0, "call update_weights first"
        if self._queue is None:

            async def start() -> RequestQueue:
                self._count = _TokenCount()
                return self._pool.start_queue(self._respond)

            self._queue = self.loop.run(start())
        self.loop.call(self._queue.add, requests, on_response)

    @property
    def stuck(self) -> bool:
        return self._queue is not None and self._queue.stuck

    @property
    def failure(self) -> Exception | None:
        return None if self._queue is None else self._queue.error

    def _queue_metrics(self) -> dict[str, float]:
        """Return metrics of the request queue since the previous call of this method."""
        queue = self._queue
        if queue is None:
            return {}

        async def take() -> tuple[_TokenCount, int]:
            count, self._count = self._count, _TokenCount()
            return count, queue.take_retried()

        count, retried = self.loop.run(take())
        return self._sampling_metrics(count.tokens, time.perf_counter() - count.since, retried)

    def _sampling_metrics(self, tokens: int, seconds: float, retried: int) -> dict[str, float]:
        return {
            "seconds": seconds,
            "tokens": float(tokens),
            "tokens_per_second": tokens / max(seconds, 1e-9),
            "retried": float(retried),
            "restarts": float(self.launcher.restarts if self.launcher else 0),
        }

    async def _respond(self, server: ServerApi, request: SamplingRequest) -> Response:
        ticket = await self._pool.gate.wait_open()
        partial = request.partial
        try:
            response = await server.respond(
                request if partial is None else rest_of(request, partial),
                self.sampling,
                model=self.sync.name(self._version),
                version=self._version,
                salt=self.salt,
                cut=self._queue is not None,
            )
        except (ServerLostError, UserError):
            if self._pool.gate.closed_since(ticket):
                raise SupersededError from None
            raise
        if self._pool.gate.closed_since(ticket, times=2):
            # Two weight syncs have begun since the request was sent. The request may have reached the server during the
            # first of them. Then weights newer than `version` sampled its tokens, until the second weight sync
            # interrupted it.
            raise SupersededError
        self._count.tokens += len(response.tokens)
        return response if partial is None else partial.followed_by(response)

    async def _probe(self, server: ServerApi) -> None:
        if self.launcher is not None and self.launcher.fatal_error is not None:
            raise UserError.of(self.launcher.fatal_error)
        ticket = await self._pool.gate.wait_open()
        try:
            server.need_version(await server.version(timeout=min(PROBE, self.timeout / 4)), self._version)
        except (ServerLostError, UserError):
            # A server that loads weights answers late. If a weight sync has begun since the probe, the failure does not
            # count.
            if self._pool.gate.closed_since(ticket):
                raise SupersededError from None
            raise

    # Metrics and shutdown

    def metrics(self) -> Mapping[str, float]:
        return {**self._sync_metrics, **self._metrics}

    def close(self) -> None:
        if self._queue is not None and self._queue.task is not None:
            self.loop.call(self._queue.task.cancel)
        end_servers(self.loop, self.launcher)
        self.sync.close()


def end_servers(loop: LoopThread, launcher: Launcher | None) -> None:
    """Stop the servers that the run started, and the event loop."""
    if launcher is not None:
        loop.run(launcher.close())
    loop.close()


def rest_of(request: SamplingRequest, partial: Response) -> SamplingRequest:
    """Return the request for the tokens that follow a partial response.

    Its random key differs from `request.key`: a server uses the key as a seed, and the same seed would repeat the
    random numbers of the partial response.
    """
    done = len(partial.tokens)
    return SamplingRequest(
        tokens=np.concatenate([request.tokens, partial.tokens]),
        max_new_tokens=request.max_new_tokens - done,
        key=key_behind(request.key, done),
        num_earlier=done,
    )
