"""Rollouts from vLLM servers as a `Sampler`.

    update_weights    all ranks gather; rank 0 gives the weights to every server it reaches, then the canary
    sample            each rank asks the servers for its own requests; all ranks agree that nothing is missing
    missing           every server with the weights is gone: rank 0 waits for one to come back, all ranks gather once
                      more, and the requests without a response are asked for again

A server that fails in an exchange, or is down at that time, is left out until the next one. What was sampled already
stays: every request gets exactly one response, from the weights of the last `update_weights`.

With `rollout.staleness` above 0 requests are answered by threads that stay, and weights are exchanged meanwhile:

    main thread     close the gate | pause | buckets | finish | resume | canary | open the gate
    request         7 8 | 5 6      cut: what is there is kept       7 8 5 6 | 1 0      goes on from its last token
    versions              3 3                                             3 3   4 4

vLLM could also freeze requests over a pause and go on with them (`keep`). Then nobody would know which token is of
which version, and later tokens could be drawn from keys and values of old weights, so that their log-probabilities
would be those of no policy. What is asked for anew is prefilled by the new weights.
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch.distributed as dist
from transformers import PreTrainedModel

from padfree.config import Config
from padfree.distributed import Mesh, raise_together
from padfree.errors import UserError
from padfree.model.lora import adapted_modules
from padfree.rollout.base import OnFinished, OnProgress, OnResponse, Response, SamplingRequest, Score
from padfree.rollout.noise import key_behind
from padfree.rollout.vllm.canary import canary_sequences
from padfree.rollout.vllm.checks import check_servers
from padfree.rollout.vllm.exchange import WeightExchange, agreed
from padfree.rollout.vllm.http import Drawing, Server, ServerLostError
from padfree.rollout.vllm.launch import PROBE, Launcher
from padfree.rollout.vllm.pool import Pool, StandingWork, SupersededError
from padfree.rollout.vllm.transfer import each

PROBE_EVERY = 5.0
"""Seconds."""
REFUSALS = 3
"""So often all servers may answer that they cannot take weights: they will not be able to later."""


class VllmSampler:
    """Servers that run already (`rollout.servers`), or that the run has started (`rollout.launch`)."""

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        trained: PreTrainedModel,
        tokenizer: Any,
        *,
        stops: Sequence[int],
        score: Score,
    ) -> None:
        self.config, self.mesh = config, mesh
        self._first = mesh.loss.rank == 0
        self._trained, self._version = trained, -1
        vocabulary = int(trained.config.vocab_size)
        self._drawing = Drawing(temperature=config.loss.temperature, stops=tuple(stops), vocabulary=vocabulary)
        self._launcher: Launcher | None = None
        self._metrics: dict[str, float] = {}
        self._exchanges: dict[str, float] = {}
        self._standing: StandingWork | None = None  # what is sampled ahead
        self._counting = threading.Lock()
        self._counted, self._counted_since = 0, time.perf_counter()  # tokens
        if config.rollout.launch.command and not same_machine(mesh):
            raise UserError(
                "rollout.launch.command",
                "starts servers on one machine, the run is on several",
                "start them yourself and give rollout.servers",
            )
        try:
            opened = agreed(self._open(tokenizer) if self._first else None, mesh)
            if isinstance(opened, str):
                raise UserError.of(opened)
            urls, model = opened
            self.servers = [Server(url, config.rollout.timeout) for url in urls]
            self._salt = agreed(secrets.token_hex(8), mesh)
            self._weights = WeightExchange(
                config,
                mesh,
                trained,
                self.servers,
                model=model,
                launcher=self._launcher,
                score=score,
                sequences=canary_sequences(
                    tokenizer, vocabulary=vocabulary, longest=min(config.batch.max_tokens, _positions(trained))
                ),
                salt=self._salt,
            )
        except BaseException:  # an interrupt while servers start, too: nobody would end them
            self._end_servers()
            raise
        self._pool = Pool(
            self.servers,
            concurrency=config.rollout.batch,
            timeout=config.rollout.timeout,
            probe_every=min(PROBE_EVERY, config.rollout.timeout / 4),
            probe=self._probe,
        )

    # Weights

    def update_weights(self, trained: PreTrainedModel, version: int) -> None:
        assert version >= self._version, "versions are numbers of optimizer steps"
        self._metrics, self._exchanges = {} if self._standing is None else self._standing_metrics(), {}
        with self._pool.gate.closed():
            self._trained, self._version = trained, version
            self._exchange()

    def renew(self) -> None:
        with self._pool.gate.closed():
            self._exchange()

    def _exchange(self) -> None:
        """Give the present weights to every server that can take them, and see that they have; at least one must."""
        deadline = time.monotonic() + self.config.rollout.timeout
        ready: list[Server] = []
        refusals = 0
        while not ready:
            raise_together(self._awaited(deadline) if self._first else None, self.mesh.loss.group)
            begin = time.perf_counter()
            failed, sent = self._weights.hand_over(self._trained, self._version)
            seconds = time.perf_counter() - begin
            self._exchanges = {
                "exchange_seconds": self._exchanges.get("exchange_seconds", 0.0) + seconds,
                "exchange_bytes": self._exchanges.get("exchange_bytes", 0.0) + sent,
            }
            refusals += 1 if len(failed) == len(self.servers) and all(map(is_refusal, failed.values())) else -refusals
            raise_together(self._refused(failed) if refusals == REFUSALS else None, self.mesh.loss.group)
            lost: dict[str, str] = {}
            taken = [server for server in self.servers if server.url not in failed]
            ready = self._weights.check(taken, self._version, lost=lost, numbers=self._exchanges)
            late = self._first and not ready and time.monotonic() > deadline
            raise_together(self._nobody({**failed, **lost}) if late else None, self.mesh.loss.group)
        self._exchanges["servers"] = float(len(ready))
        self._pool.reset(ready)

    def _awaited(self, deadline: float) -> str | None:
        """Wait until a server answers; a line if none does. On rank 0."""
        while True:
            if self._launcher is not None and self._launcher.hopeless is not None:
                return self._launcher.hopeless
            lines = each(self.servers, lambda server: server.version(timeout=PROBE))
            if len(lines) < len(self.servers):
                return None
            if time.monotonic() > deadline:
                return self._nobody({server.url: line for server, line in lines.items()})
            time.sleep(1.0)

    def _refused(self, lines: Mapping[str, str]) -> str:
        return f"{next(iter(lines.values()))}, {REFUSALS} times; start it with the model of model.path"

    def _nobody(self, lines: Mapping[str, str]) -> str:
        return (
            f"{next(iter(lines.values()))}, and no server took the weights for {self.config.rollout.timeout:g} s; see "
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
        retried = tokens = done = 0

        def count(number: int, response: Response) -> None:
            nonlocal tokens, done
            tokens, done = tokens + len(response.tokens), done + 1
            if on_finished is not None:
                on_finished([(number, response)])
            if on_progress is not None:
                on_progress(done)

        while True:
            missing = [number for number in range(len(requests)) if number not in found]
            error = None
            try:
                part = self._pool.ask_all(requests, missing, self._ask, count)
                found |= part.found
                retried += part.retried
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
        seconds = time.perf_counter() - begin
        self._metrics = self._sampling_metrics(tokens, seconds, retried)
        return [found[number] for number in range(len(requests))]

    def begin(self, requests: Sequence[SamplingRequest], on_response: OnResponse) -> None:
        assert self._version >= 0, "weights come first"
        if self._standing is None:
            self._counted, self._counted_since = 0, time.perf_counter()  # no thread is there yet
            self._standing = self._pool.stand(self._ask)
        self._standing.add(requests, on_response)

    @property
    def stuck(self) -> bool:
        return self._standing is not None and self._standing.stuck

    @property
    def failure(self) -> Exception | None:
        return None if self._standing is None else self._standing.error

    def _standing_metrics(self) -> dict[str, float]:
        """Of what was sampled since they were asked for last."""
        assert self._standing is not None
        with self._counting:
            now = time.perf_counter()
            tokens, seconds = self._counted, now - self._counted_since
            self._counted, self._counted_since = 0, now
        return self._sampling_metrics(tokens, seconds, self._standing.take_retried())

    def _sampling_metrics(self, tokens: int, seconds: float, retried: int) -> dict[str, float]:
        return {
            "seconds": seconds,
            "tokens": float(tokens),
            "tokens_per_second": tokens / max(seconds, 1e-9),
            "retried": float(retried),
            "restarts": float(self._launcher.restarts if self._launcher else 0),
        }

    def _ask(self, server: Server, request: SamplingRequest) -> Response:
        passed = self._pool.gate.passed()
        version, begun = self._version, request.begun
        try:
            response = server.complete(
                request if begun is None else rest_of(request, begun),
                self._drawing,
                model=self._weights.name(version),
                version=version,
                salt=self._salt,
                cut=self._standing is not None,
            )
        except (ServerLostError, UserError):
            if self._pool.gate.closed_since(passed):
                raise SupersededError from None
            raise
        with self._counting:
            self._counted += len(response.tokens)
        return response if begun is None else begun.followed_by(response)

    def _probe(self, server: Server) -> None:
        if self._launcher is not None and self._launcher.hopeless is not None:
            raise UserError.of(self._launcher.hopeless)
        passed = self._pool.gate.passed()
        try:
            server.need_version(self._version, timeout=min(PROBE, self.config.rollout.timeout / 4))
        except (ServerLostError, UserError):  # one that loads weights answers late
            if self._pool.gate.closed_since(passed):
                raise SupersededError from None
            raise

    # The rest

    def metrics(self) -> Mapping[str, float]:
        return {**self._exchanges, **self._metrics}

    def close(self) -> None:
        if self._standing is not None:
            self._standing.close()
        self._end_servers()
        self._weights.close()

    def _end_servers(self) -> None:
        """Those that the run has started."""
        if self._launcher is not None:
            self._launcher.close()

    def _open(self, tokenizer: Any) -> tuple[list[str], str] | str:
        """Addresses of all servers and what they call the model, or a line; rank 0 only."""
        config = self.config
        try:
            if config.rollout.servers:
                servers = [Server(url, config.rollout.timeout) for url in config.rollout.servers]
            else:
                self._launcher = Launcher(config, adapted_modules(self._trained))
                servers = self._launcher.servers
                self._launcher.start()
                self._launcher.await_ready(config.rollout.timeout)
            name = check_servers(servers, config, tokenizer, self._drawing.vocabulary)
        except UserError as error:
            return str(error)
        return [server.url for server in servers], name


def is_refusal(line: str) -> bool:
    """Whether a server is there, and failed at loading the weights that it was sent."""
    return "/update_weights answered 500" in line


def rest_of(request: SamplingRequest, begun: Response) -> SamplingRequest:
    """What is still to be written behind the tokens that are there, with noise of its own."""
    done = len(begun.tokens)
    return SamplingRequest(
        tokens=np.concatenate([request.tokens, begun.tokens]),
        room=request.room - done,
        key=key_behind(request.key, done),
    )


def _positions(model: PreTrainedModel) -> int:
    return int(getattr(model.config, "max_position_embeddings", None) or 1 << 30)


def same_machine(mesh: Mesh) -> bool:
    """Whether all ranks run on one. Every rank calls it."""
    names: list[Any] = [None] * mesh.loss.size
    dist.all_gather_object(names, socket.gethostname(), group=mesh.loss.group)
    return len(set(names)) == 1
