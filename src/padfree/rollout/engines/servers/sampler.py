"""Rollouts from servers as a `Sampler`.

    update_weights    all ranks gather; rank 0 gives the weights to every server it reaches, then the canary
    sample            each rank asks the servers for its own requests; all ranks agree that nothing is missing
    missing           every server with the weights is gone: rank 0 waits for one to come back, all ranks gather once
                      more, and the requests without a response are asked for again

A server that fails in a weight sync, or is down at that time, is left out until the next one. What was sampled already
stays: every request gets exactly one response, from the weights of the last `update_weights`.

With `rollout.staleness` above 0 requests are answered while other threads train, and weights are exchanged meanwhile:

    main thread     close the gate | pause | buckets | finish | resume | canary | open the gate
    request         7 8 | 5 6      cut: what is there is kept       7 8 5 6 | 1 0      goes on from its last token
    versions              3 3                                             3 3   4 4

All requests run on one event loop, in a thread of their own. Collectives stay in the main thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch.distributed as dist
from transformers import PreTrainedModel

from padfree.distributed import Mesh, raise_together
from padfree.errors import UserError
from padfree.rollout.base import OnFinished, OnProgress, OnResponse, Response, SamplingRequest, Score
from padfree.rollout.engines.servers.canary import DRAWN, Canary, Rows
from padfree.rollout.engines.servers.pool import Pool, SupersededError, WorkInPool
from padfree.rollout.engines.servers.server_api import Drawing, ServerApi, ServerLostError
from padfree.rollout.engines.servers.server_processes import PROBE, Launcher
from padfree.rollout.engines.servers.weight_sync import WeightSync, each
from padfree.rollout.loop_thread import LoopThread
from padfree.rollout.sampling_rng import key_behind
from padfree.rollout.token_ids import vocabulary_of

PROBE_EVERY = 5.0
"""Seconds."""
REFUSALS = 3
"""So many times all servers may answer that they cannot load weights: they will not be able to later."""


@dataclass(slots=True)
class _Count:
    """What was sampled since then, by the tasks of the event loop."""

    tokens: int = 0
    since: float = field(default_factory=time.perf_counter)


@dataclass(kw_only=True, eq=False)
class ServerSampler:
    """Asks servers for responses, and gives them the weights. Every rank makes one; `make_server_sampler` does."""

    servers: Sequence[ServerApi]
    loop: LoopThread
    mesh: Mesh
    trained: PreTrainedModel
    sync: WeightSync
    launcher: Launcher | None  # on rank 0, of servers that the run has started
    drawing: Drawing
    canary: Canary
    sequences: Sequence[Sequence[int]]  # of the canary
    score: Score
    salt: str  # of the servers' caches, the run's own
    concurrency: int  # requests at a time for each server
    timeout: float

    def __post_init__(self) -> None:
        self._first, self._version = self.mesh.loss.rank == 0, -1
        self._metrics: dict[str, float] = {}
        self._sync_metrics: dict[str, float] = {}
        self._standing: WorkInPool | None = None  # what is sampled ahead
        self._count = _Count()
        every = min(PROBE_EVERY, self.timeout / 4)
        self._pool = Pool(
            self.servers, concurrency=self.concurrency, timeout=self.timeout, probe_every=every, probe=self._probe
        )

    # Weights

    def update_weights(self, trained: PreTrainedModel, version: int) -> None:
        assert version >= self._version, "versions are numbers of optimizer steps"
        self._metrics, self._sync_metrics = self._standing_metrics(), {}
        with self._gate_closed():
            self.trained, self._version = trained, version
            self._hand_over()

    def renew(self) -> None:
        with self._gate_closed():
            self._hand_over()

    @contextmanager
    def _gate_closed(self) -> Iterator[None]:
        gate = self._pool.gate

        async def close() -> None:
            gate.close()

        self.loop.run(close())
        try:
            yield
        finally:
            self.loop.call(gate.open)

    def _hand_over(self) -> None:
        """Give the present weights to every server that can take them, and see that they have; at least one must."""
        group = self.mesh.loss.group
        deadline = time.monotonic() + self.timeout
        ready: list[ServerApi] = []
        refusals = 0
        while not ready:
            raise_together(self.loop.run(self._awaited(deadline)) if self._first else None, group)
            begin = time.perf_counter()
            outcome = self.sync.hand_over(self.trained, self._version)
            raise_together(outcome.error, group)
            self._add("exchange_seconds", time.perf_counter() - begin)
            self._add("exchange_bytes", outcome.num_bytes)
            outcome = broadcast_object(outcome, self.mesh)
            failed = outcome.failed
            refusals = refusals + 1 if len(outcome.refused) == len(self.servers) else 0
            raise_together(self._refused(failed) if refusals == REFUSALS else None, group)
            lost: dict[str, str] = {}
            ready = self._checked([server for server in self.servers if server.url not in failed], lost)
            late = self._first and not ready and time.monotonic() > deadline
            raise_together(self._nobody({**failed, **lost}) if late else None, group)
        self._sync_metrics["servers"] = float(len(ready))
        self.loop.call(self._pool.reset, ready)

    def _add(self, name: str, value: float) -> None:
        self._sync_metrics[name] = self._sync_metrics.get(name, 0.0) + value

    async def _awaited(self, deadline: float) -> str | None:
        """Wait until a server answers; a line if none does. On rank 0."""

        async def answers(server: ServerApi) -> None:
            await server.version(timeout=PROBE)

        while True:
            if self.launcher is not None and self.launcher.hopeless is not None:
                return self.launcher.hopeless
            lost = await each(self.servers, answers)
            if len(lost) < len(self.servers):
                return None
            if time.monotonic() > deadline:
                return self._nobody({server.url: str(error) for server, error in lost.items()})
            await asyncio.sleep(1.0)

    def _checked(self, servers: Sequence[ServerApi], lost: dict[str, str]) -> list[ServerApi]:
        """The canary: those of the servers whose log-probabilities are the trainer's.

        One that is lost meanwhile is none of them, and rank 0 notes why; one that has other weights ends the run.
        """
        rows: dict[str, Rows] = {}
        error = None

        async def score(server: ServerApi) -> None:
            rows[server.url] = await server.scored(
                self.sequences,
                drawn=DRAWN,
                vocabulary=vocabulary_of(self.trained),
                temperature=self.drawing.temperature,
                model=self.sync.name(self._version),
                salt=f"{self.salt} canary {self._version}",
            )

        if self._first:
            try:
                found = self.loop.run(each(servers, score))
                lost |= {server.url: str(gone) for server, gone in found.items()}
            except UserError as wrong:
                error = str(wrong)
        raise_together(error, self.mesh.loss.group)
        rows = broadcast_object(rows, self.mesh)
        try:
            numbers = self.canary.compare(rows, self.score, self.drawing.temperature, self._version)
            self._sync_metrics |= numbers
        except UserError as wrong:
            error = str(wrong)
        raise_together(error, self.mesh.loss.group)
        return [server for server in servers if server.url in rows]

    def _refused(self, lines: Mapping[str, str]) -> str:
        return f"{next(iter(lines.values()))}, {REFUSALS} times; start it with the model of model.path"

    def _nobody(self, lines: Mapping[str, str]) -> str:
        return (
            f"{next(iter(lines.values()))}, and no server took the weights for {self.timeout:g} s; see "
            "that one runs, or raise rollout.timeout"
        )

    # Responses

    def sample(
        self,
        requests: Sequence[SamplingRequest],
        *,
        on_progress: OnProgress | None = None,
        on_finished: OnFinished | None = None,
    ) -> list[Response]:
        assert self._version >= 0, "weights come first"
        begin = time.perf_counter()
        found: dict[int, Response] = {}
        retried = 0
        while True:
            missing = [number for number in range(len(requests)) if number not in found]

            def keep(place: int, response: Response, missing: Sequence[int] = missing) -> None:
                assert missing[place] not in found, "a request is asked for again only when it has no response"
                found[missing[place]] = response
                if on_finished is not None:
                    on_finished([(missing[place], response)])
                if on_progress is not None:
                    on_progress(len(found))

            error = None
            try:
                retried += self.loop.run(self._pool.ask_all([requests[n] for n in missing], self._ask, keep))
            except UserError as wrong:
                error = str(wrong)
            everybody: list[Any] = [None] * self.mesh.loss.size
            dist.all_gather_object(everybody, (error, len(found) < len(requests)), group=self.mesh.loss.group)
            for line, _ in everybody:
                if line is not None:
                    raise UserError.of(line)
            if not any(lacks for _, lacks in everybody):
                break
            self.renew()
        tokens = sum(len(response.tokens) for response in found.values())
        self._metrics = self._sampling_metrics(tokens, time.perf_counter() - begin, retried)
        return [found[number] for number in range(len(requests))]

    def begin(self, requests: Sequence[SamplingRequest], on_response: OnResponse) -> None:
        assert self._version >= 0, "weights come first"
        if self._standing is None:

            async def stand() -> WorkInPool:
                self._count = _Count()
                return self._pool.stand(self._ask)

            self._standing = self.loop.run(stand())
        self.loop.call(self._standing.add, requests, on_response)

    @property
    def stuck(self) -> bool:
        return self._standing is not None and self._standing.stuck

    @property
    def failure(self) -> Exception | None:
        return None if self._standing is None else self._standing.error

    def _standing_metrics(self) -> dict[str, float]:
        """Of what was sampled ahead since they were asked for last."""
        standing = self._standing
        if standing is None:
            return {}

        async def take() -> tuple[_Count, int]:
            count, self._count = self._count, _Count()
            return count, standing.take_retried()

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

    async def _ask(self, server: ServerApi, request: SamplingRequest) -> Response:
        passed = await self._pool.gate.passed()
        partial = request.partial
        try:
            response = await server.respond(
                request if partial is None else rest_of(request, partial),
                self.drawing,
                model=self.sync.name(self._version),
                version=self._version,
                salt=self.salt,
                cut=self._standing is not None,
            )
        except (ServerLostError, UserError):
            if self._pool.gate.closed_since(passed):
                raise SupersededError from None
            raise
        if self._pool.gate.closed_since(passed, times=2):
            # The request may have come during the first pause, and the second one has cut what newer weights wrote.
            raise SupersededError
        self._count.tokens += len(response.tokens)
        return response if partial is None else partial.followed_by(response)

    async def _probe(self, server: ServerApi) -> None:
        if self.launcher is not None and self.launcher.hopeless is not None:
            raise UserError.of(self.launcher.hopeless)
        passed = await self._pool.gate.passed()
        try:
            server.need_version(await server.version(timeout=min(PROBE, self.timeout / 4)), self._version)
        except (ServerLostError, UserError):  # one that loads weights answers late
            if self._pool.gate.closed_since(passed):
                raise SupersededError from None
            raise

    # The rest

    def metrics(self) -> Mapping[str, float]:
        return {**self._sync_metrics, **self._metrics}

    def close(self) -> None:
        if self._standing is not None and self._standing.task is not None:
            self.loop.call(self._standing.task.cancel)
        end_servers(self.loop, self.launcher)
        self.sync.close()


def end_servers(loop: LoopThread, launcher: Launcher | None) -> None:
    """The servers that the run has started, and everything on the loop."""
    if launcher is not None:
        loop.run(launcher.close())
    loop.close()


def rest_of(request: SamplingRequest, partial: Response) -> SamplingRequest:
    """What is still to be written behind the tokens that are there, with noise of its own."""
    done = len(partial.tokens)
    return SamplingRequest(
        tokens=np.concatenate([request.tokens, partial.tokens]),
        max_new_tokens=request.max_new_tokens - done,
        key=key_behind(request.key, done),
    )


def broadcast_object(value: Any, mesh: Mesh) -> Any:
    """What rank 0 has, on every rank."""
    box = [value]
    dist.broadcast_object_list(box, src=dist.get_global_rank(mesh.loss.group, 0), group=mesh.loss.group)
    return box[0]
