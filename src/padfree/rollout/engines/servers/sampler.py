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
import hashlib
import secrets
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from padfree.config import Config
from padfree.distributed import Mesh, raise_together
from padfree.model.lora import adapted_modules
from padfree.rollout.base import OnFinished, OnProgress, OnResponse, Response, SamplingRequest, Score
from padfree.rollout.engines.in_process.hf_cache import stop_tokens
from padfree.rollout.engines.servers.api import Drawing, LateError, ServedModel, ServerApi, ServerLostError
from padfree.rollout.engines.servers.canary import DRAWN, LIMITS, TEXT, Canary, Rows, canary_sequences
from padfree.rollout.engines.servers.launch import PROBE, Launcher, make_launcher
from padfree.rollout.engines.servers.pool import Pool, SupersededError, WorkInPool
from padfree.rollout.engines.servers.weight_sync import FilesWay, GroupWay, WeightStream, WeightSync, each
from padfree.rollout.loop_thread import LoopThread
from padfree.rollout.noise import key_behind
from padfree.rollout.token_ids import vocabulary_of

PROBE_EVERY = 5.0
"""Seconds."""
REFUSALS = 3
"""So many times all servers may answer that they cannot load weights: they will not be able to later."""


def make_server_sampler(
    api: type[ServerApi], config: Config, mesh: Mesh, trained: PreTrainedModel, tokenizer: Any, score: Score
) -> ServerSampler:
    """A sampler on servers that run already (`rollout.servers`), or that are started now (`rollout.launch`)."""
    rollout, first = config.rollout, mesh.loss.rank == 0
    if rollout.launch.command and not _same_machine(mesh):
        raise ValueError(
            "rollout.launch.command: starts servers on one machine, the run is on several; start them yourself and "
            "give rollout.servers"
        )
    served = served_model(config, trained, tokenizer)
    loop, launcher = LoopThread("servers"), None
    try:
        found: tuple[list[str], str] | str | None = None
        if first:
            try:
                servers = [api(url, rollout.timeout) for url in rollout.servers]
                if rollout.launch.command:
                    folder = Path(config.run.folder) / "servers"
                    launcher = make_launcher(api, rollout.launch, served, folder, rollout.timeout)
                    servers = launcher.servers
                    loop.run(launcher.start(rollout.timeout))
                found = [server.url for server in servers], loop.run(check_servers(servers, served))
            except ValueError as error:
                found = str(error)
        found = _agreed(found, mesh)
        if isinstance(found, str):
            raise ValueError(found)
        assert found is not None
        urls, name = found
        servers = [api(url, rollout.timeout) for url in urls]
        folder = transfer_folder(config)
        sync = WeightSync(
            servers,
            loop,
            first=first,
            stream=WeightStream(trained, getattr(torch, config.model.dtype)),
            way=GroupWay(mesh.device, rollout.timeout) if rollout.transfer == "group" else FilesWay(folder),
            folder=folder,
            base=config.model.path,
            model=name,
            adapters=bool(config.lora.rank) and api.takes_adapters,
            launcher=launcher,
        )
        return ServerSampler(
            servers,
            loop,
            mesh,
            trained,
            sync=sync,
            launcher=launcher,
            drawing=Drawing(
                temperature=config.loss.temperature,
                stops=stop_tokens(tokenizer, trained),
                vocabulary=int(trained.config.vocab_size),
            ),
            canary=Canary(rollout.canary or LIMITS[config.model.dtype], api),
            sequences=canary_sequences(
                tokenizer, vocabulary=served.vocabulary, longest=min(config.batch.max_tokens, _positions(trained))
            ),
            score=score,
            salt=_agreed(secrets.token_hex(8), mesh),
            concurrency=rollout.batch,
            timeout=rollout.timeout,
        )
    except BaseException:  # an interrupt while servers start, too: nobody would end them
        _end(loop, launcher)
        raise


def served_model(config: Config, trained: PreTrainedModel, tokenizer: Any) -> ServedModel:
    model = Path(config.model.path)
    return ServedModel(
        path=str(model.parent) if model.is_file() else config.model.path,
        tokenizer=config.model.tokenizer,
        dtype=config.model.dtype,
        random=config.model.init == "random" or model.is_file(),
        trust_remote_code=config.model.trust_remote_code,
        lora_rank=config.lora.rank,
        adapted=adapted_modules(trained),
        vocabulary=int(trained.config.vocab_size),
        temperature=config.loss.temperature,
        text=TEXT,
        tokens=[int(token) for token in tokenizer(TEXT, add_special_tokens=False)["input_ids"]],
    )


async def check_servers(servers: Sequence[ServerApi], served: ServedModel) -> str:
    """What they call their model; a line if one is not there, or is a server of something else."""
    try:
        names = {await server.check(served) for server in servers}
    except LateError as error:
        raise ValueError(f"{error}; see that it is well, or raise rollout.timeout") from None
    except ServerLostError as error:
        raise ValueError(f"{error}; start it, or correct rollout.servers") from None
    if len(names) > 1:
        raise ValueError(f"rollout.servers: they call the model {' and '.join(sorted(names))}; {servers[0].cure_name}")
    return names.pop()


@dataclass(slots=True)
class _Count:
    """What was sampled since then, by the tasks of the event loop."""

    tokens: int = 0
    since: float = field(default_factory=time.perf_counter)


class ServerSampler:
    """Asks servers for responses, and gives them the weights. Every rank makes one; `make_server_sampler` does."""

    def __init__(
        self,
        servers: Sequence[ServerApi],
        loop: LoopThread,
        mesh: Mesh,
        trained: PreTrainedModel,
        *,
        sync: WeightSync,
        launcher: Launcher | None,
        drawing: Drawing,
        canary: Canary,
        sequences: Sequence[Sequence[int]],
        score: Score,
        salt: str,
        concurrency: int,
        timeout: float,
    ) -> None:
        self.servers, self._loop, self._mesh, self._first = servers, loop, mesh, mesh.loss.rank == 0
        self._trained, self._version = trained, -1
        self._sync, self._launcher, self._drawing = sync, launcher, drawing
        self._canary, self._sequences, self._score, self._salt = canary, sequences, score, salt
        self._timeout = timeout
        self._metrics: dict[str, float] = {}
        self._sync_metrics: dict[str, float] = {}
        self._standing: WorkInPool | None = None  # what is sampled ahead
        self._count = _Count()
        self._pool = Pool(
            servers,
            concurrency=concurrency,
            timeout=timeout,
            probe_every=min(PROBE_EVERY, timeout / 4),
            probe=self._probe,
        )

    # Weights

    def update_weights(self, trained: PreTrainedModel, version: int) -> None:
        assert version >= self._version, "versions are numbers of optimizer steps"
        self._metrics, self._sync_metrics = self._standing_metrics(), {}
        with self._gate_closed():
            self._trained, self._version = trained, version
            self._hand_over()

    def renew(self) -> None:
        with self._gate_closed():
            self._hand_over()

    @contextmanager
    def _gate_closed(self) -> Iterator[None]:
        gate = self._pool.gate

        async def close() -> None:
            gate.close()

        self._loop.run(close())
        try:
            yield
        finally:
            self._loop.call(gate.open)

    def _hand_over(self) -> None:
        """Give the present weights to every server that can take them, and see that they have; at least one must."""
        group = self._mesh.loss.group
        deadline = time.monotonic() + self._timeout
        ready: list[ServerApi] = []
        refusals = 0
        while not ready:
            raise_together(self._loop.run(self._awaited(deadline)) if self._first else None, group)
            begin = time.perf_counter()
            outcome = self._sync.hand_over(self._trained, self._version)
            raise_together(outcome.error, group)
            self._add("exchange_seconds", time.perf_counter() - begin)
            self._add("exchange_bytes", outcome.num_bytes)
            outcome = _agreed(outcome, self._mesh)
            failed = outcome.failed
            refusals = refusals + 1 if len(outcome.refused) == len(self.servers) else 0
            raise_together(self._refused(failed) if refusals == REFUSALS else None, group)
            lost: dict[str, str] = {}
            ready = self._checked([server for server in self.servers if server.url not in failed], lost)
            late = self._first and not ready and time.monotonic() > deadline
            raise_together(self._nobody({**failed, **lost}) if late else None, group)
        self._sync_metrics["servers"] = float(len(ready))
        self._loop.call(self._pool.reset, ready)

    def _add(self, name: str, value: float) -> None:
        self._sync_metrics[name] = self._sync_metrics.get(name, 0.0) + value

    async def _awaited(self, deadline: float) -> str | None:
        """Wait until a server answers; a line if none does. On rank 0."""

        async def answers(server: ServerApi) -> None:
            await server.version(timeout=PROBE)

        while True:
            if self._launcher is not None and self._launcher.hopeless is not None:
                return self._launcher.hopeless
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
                self._sequences,
                drawn=DRAWN,
                vocabulary=vocabulary_of(self._trained),
                temperature=self._drawing.temperature,
                model=self._sync.name(self._version),
                salt=f"{self._salt} canary {self._version}",
            )

        if self._first:
            try:
                found = self._loop.run(each(servers, score))
                lost |= {server.url: str(gone) for server, gone in found.items()}
            except ValueError as wrong:
                error = str(wrong)
        raise_together(error, self._mesh.loss.group)
        rows = _agreed(rows, self._mesh)
        try:
            numbers = self._canary.compare(rows, self._score, self._drawing.temperature, self._version)
            self._sync_metrics |= numbers
        except ValueError as wrong:
            error = str(wrong)
        raise_together(error, self._mesh.loss.group)
        return [server for server in servers if server.url in rows]

    def _refused(self, lines: Mapping[str, str]) -> str:
        return f"{next(iter(lines.values()))}, {REFUSALS} times; start it with the model of model.path"

    def _nobody(self, lines: Mapping[str, str]) -> str:
        return (
            f"{next(iter(lines.values()))}, and no server took the weights for {self._timeout:g} s; see "
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
                retried += self._loop.run(self._pool.ask_all([requests[n] for n in missing], self._ask, keep))
            except ValueError as wrong:
                error = str(wrong)
            everybody: list[Any] = [None] * self._mesh.loss.size
            dist.all_gather_object(everybody, (error, len(found) < len(requests)), group=self._mesh.loss.group)
            for line, _ in everybody:
                if line is not None:
                    raise ValueError(line)
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

            self._standing = self._loop.run(stand())
        self._loop.call(self._standing.add, requests, on_response)

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
            retried, standing.retried = standing.retried, 0
            return count, retried

        count, retried = self._loop.run(take())
        return self._sampling_metrics(count.tokens, time.perf_counter() - count.since, retried)

    def _sampling_metrics(self, tokens: int, seconds: float, retried: int) -> dict[str, float]:
        return {
            "seconds": seconds,
            "tokens": float(tokens),
            "tokens_per_second": tokens / max(seconds, 1e-9),
            "retried": float(retried),
            "restarts": float(self._launcher.restarts if self._launcher else 0),
        }

    async def _ask(self, server: ServerApi, request: SamplingRequest) -> Response:
        passed = await self._pool.gate.passed()
        begun = request.begun
        try:
            response = await server.respond(
                request if begun is None else rest_of(request, begun),
                self._drawing,
                model=self._sync.name(self._version),
                version=self._version,
                salt=self._salt,
                cut=self._standing is not None,
            )
        except (ServerLostError, ValueError):
            if self._pool.gate.closed_since(passed):
                raise SupersededError from None
            raise
        self._count.tokens += len(response.tokens)
        return response if begun is None else begun.followed_by(response)

    async def _probe(self, server: ServerApi) -> None:
        if self._launcher is not None and self._launcher.hopeless is not None:
            raise ValueError(self._launcher.hopeless)
        passed = await self._pool.gate.passed()
        try:
            server.need_version(await server.version(timeout=min(PROBE, self._timeout / 4)), self._version)
        except (ServerLostError, ValueError):  # one that loads weights answers late
            if self._pool.gate.closed_since(passed):
                raise SupersededError from None
            raise

    # The rest

    def metrics(self) -> Mapping[str, float]:
        return {**self._sync_metrics, **self._metrics}

    def close(self) -> None:
        if self._standing is not None and self._standing.task is not None:
            self._loop.call(self._standing.task.cancel)
        _end(self._loop, self._launcher)
        self._sync.close()


def _end(loop: LoopThread, launcher: Launcher | None) -> None:
    """The servers that the run has started, and everything on the loop."""
    if launcher is not None:
        loop.run(launcher.close())
    loop.close()


def rest_of(request: SamplingRequest, begun: Response) -> SamplingRequest:
    """What is still to be written behind the tokens that are there, with noise of its own."""
    done = len(begun.tokens)
    return SamplingRequest(
        tokens=np.concatenate([request.tokens, begun.tokens]),
        room=request.room - done,
        key=key_behind(request.key, done),
    )


def transfer_folder(config: Config) -> Path:
    """A folder of the run's own for weights: where it is said, or in memory for servers of this machine."""
    mark = hashlib.sha256(str(Path(config.run.folder).resolve()).encode()).hexdigest()[:12]
    memory = Path("/dev/shm")
    if config.rollout.transfer_folder is not None:
        parent = Path(config.rollout.transfer_folder).resolve()
    elif config.rollout.launch.command and memory.is_dir():
        parent = memory
    else:
        parent = Path(config.run.folder).resolve()
    return parent / f"padfree-weights-{mark}"


def _positions(model: PreTrainedModel) -> int:
    return int(getattr(model.config, "max_position_embeddings", None) or 1 << 30)


def _agreed(value: Any, mesh: Mesh) -> Any:
    """What rank 0 has, on every rank."""
    box = [value]
    dist.broadcast_object_list(box, src=dist.get_global_rank(mesh.loss.group, 0), group=mesh.loss.group)
    return box[0]


def _same_machine(mesh: Mesh) -> bool:
    """Whether all ranks run on one. Every rank calls it."""
    names: list[Any] = [None] * mesh.loss.size
    dist.all_gather_object(names, socket.gethostname(), group=mesh.loss.group)
    return len(set(names)) == 1
