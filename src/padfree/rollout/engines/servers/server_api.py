"""`ServerApi`: the interface between padfree and an inference server, with one subclass for each engine.

All coroutines run on one event loop. A weight sync calls `pause`, `join` (for a new server), `begin`, `bucket` for each
group of weight tensors, `finish` and `resume`.

There are two kinds of errors:

- `ServerLostError`: the server is gone, hangs, or gives an incomplete answer. The request can be repeated, also on
  another server.
- `UserError`: only the user can fix it. For example, the server has another vocabulary than the run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit

import numpy as np

from padfree.config import ModelConfig
from padfree.errors import UserError
from padfree.kept_sets import KeptSets
from padfree.rollout.base import Response, SamplingRequest
from padfree.rollout.engines.servers.buckets import BucketForm
from padfree.rollout.engines.servers.routed_experts import RoutedLayers
from padfree.rollout.token_ids import checked_ids
from padfree.rollout.truncation import WHOLE, Truncation
from padfree.routes import Routes


class ServerLostError(RuntimeError):
    """A server does not work at the moment. The message names the server."""


class FailedError(ServerLostError):
    """A server returned an error. If `ServerApi.bucket` raises this error, the server cannot load the weights."""


class LateError(ServerLostError):
    """A server did not answer in time."""


class RestartedError(ServerLostError):
    """A server answers, but has restarted and therefore lost the weights that were sent to it."""


class VersionError(UserError):
    """The weights of a server have another policy version than the one that a request needs."""


class IncompleteError(Exception):
    """An answer of a server lacks a required part, or has an invalid one."""


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """The settings with which servers sample the tokens of all requests of a run, such as the temperature."""

    temperature: float
    stops: Sequence[int]
    vocabulary: int
    routed: RoutedLayers | None = None  # set if responses must have routes
    truncation: Truncation = WHOLE


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    """What a run needs from its servers: a model, tokenizer and adapters to serve, and optional features."""

    model: ModelConfig
    lora_rank: int  # 0: no adapters, or adapters that are merged into the weights
    adapted: Sequence[str]  # names of the modules with adapters
    vocabulary: int
    temperature: float
    text: str  # a text to compare tokenizers with
    tokens: Sequence[int]  # token ids of `text` by the tokenizer of the run
    returns_routes: bool = False  # whether the server must return the routes of tokens
    colocated: bool = False  # whether the server must be able to sleep
    memory: float | None = None  # fraction of the GPU's memory for a server that the run starts
    returns_kept: str | None = None  # the setting for which the server must return kept sets, such as rollout.top_p

    @property
    def path(self) -> str:
        """The folder or Hub id of the model that the server must serve."""
        path = Path(self.model.path)
        return str(path.parent) if path.is_file() else self.model.path

    @property
    def random(self) -> bool:
        """Whether `path` has no weights. The server then starts with random ones, and gets weights from the trainer."""
        return self.model.init == "random" or Path(self.model.path).is_file()


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """Tokens that a server sampled. `reason`: why they end: "stop", "length", "cut" (by a pause), or another reason."""

    tokens: list[int]
    logprobs: list[float]
    reason: str
    routes: Routes | None = None  # [n + m, R, k] of the prompt and the tokens, if they were asked for
    kept: KeptSets | None = None  # [m] the ids among which each token was sampled, if the softmax is truncated


class ServerApi(ABC):
    """One inference server at a URL: the interface that each engine implements."""

    # Whether the engine implements `load_adapters`. If not, adapters are merged into the weights.
    takes_adapters: ClassVar[bool] = False
    # Whether `bucket` loads what `Receiver.tensors` yields, also for buckets of differences.
    takes_differences: ClassVar[bool] = False
    # Whether `complete` truncates the softmax by `SamplingSettings.truncation`, and returns kept sets.
    takes_truncation: ClassVar[bool] = False
    # The inputs of the vision towers whose images `complete` takes; (): the engine takes no images.
    image_inputs: ClassVar[tuple[str, ...]] = ()
    # Whether the engine implements `sleep` and `wake`, which `rollout.colocated` needs.
    can_sleep: ClassVar[bool] = False
    fix_stops: ClassVar[str] = "start the server with the stop tokens of the run"
    fix_length: ClassVar[str] = "start the server with a maximum length of {length} tokens or more"
    fix_name: ClassVar[str] = "start all servers with the same name"
    fix_weights: ClassVar[str] = (
        "check that the server can load weights of this model at run time, or raise rollout.canary"
    )
    fix_temperature: ClassVar[str] = "start the server so that it reports log-probabilities at the sampling temperature"

    def __init__(self, url: str, timeout: float) -> None:
        self.url, self.timeout = url.rstrip("/"), timeout
        parts = urlsplit(self.url)
        assert parts.hostname is not None, "RolloutConfig refuses such an address"
        self.host, self.port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    # Implemented by every engine

    @abstractmethod
    async def check(self, served: ServedModel) -> str:
        """Return the name under which the server serves the model. Raise an error if the server does not fit the run.

        If a killed run left a weight sync open on the server, close the weight sync, so that a new one can begin.
        """

    @abstractmethod
    async def version(self, *, timeout: float | None = None) -> str | None:
        """Return the policy version that `finish` set; None if the server still has the weights of its start."""

    @abstractmethod
    async def complete(
        self, request: SamplingRequest, sampling: SamplingSettings, *, model: str, version: int, salt: str
    ) -> Completion:
        """Sample a response with the weights of `version` and the seed `request.key` (`GREEDY`: greedy decoding).

        Raise an error if the server has another version. Reuse cached keys and values only for requests with the same
        `salt` and version. `model`: the model's name on the server.
        """

    @abstractmethod
    async def score(
        self, sequences: Sequence[Sequence[int]], *, num_sampled: int, temperature: float, model: str, salt: str
    ) -> list[tuple[list[int], list[float]]]:
        """Extend each sequence by `num_sampled` tokens.

        Return the tokens of each extended sequence, and the log-probabilities of all its tokens but the first. The
        log-probabilities of given tokens are at temperature 1, those of sampled tokens at `temperature`.
        """

    @abstractmethod
    async def pause(self) -> None:
        """Interrupt all responses in progress. Later requests wait for `resume`."""

    @abstractmethod
    async def resume(self) -> None: ...

    @abstractmethod
    async def workers(self) -> int:
        """Return the number of worker processes that receive weights."""

    @abstractmethod
    async def join(self, transfer_info: Mapping[str, Any]) -> None:
        """Call `Receiver.join(transfer_info, rank)` in each worker, to connect the worker to the trainer.

        The trainer calls this method before it first sends weights to a server, and again if the server has restarted.
        """

    @abstractmethod
    async def begin(self) -> None:
        """Begin a weight sync. If an earlier one is still open on the server, close it first."""

    @abstractmethod
    async def bucket(self, form: BucketForm) -> None:
        """Receive a bucket (a group of weight tensors) with `Receiver.tensors` in each worker, and load the tensors."""

    @abstractmethod
    async def finish(self, version: int) -> None:
        """End a weight sync: set the version of the weights, and drop KV caches made with earlier weights."""

    @classmethod
    @abstractmethod
    def command(cls, arguments: Sequence[str], served: ServedModel, *, name: str, port: int) -> list[str]:
        """Return the command that starts a server: `arguments` and the options that the run needs.

        `arguments`: the value of `rollout.launch.command`. `name`: the name under which the server serves the model.
        """

    @classmethod
    def environment(cls) -> dict[str, str]:
        """Return the environment variables with which a run starts a server of this engine."""
        return {}

    async def load_adapters(self, folder: Path, *, name: str, model: str, version: int) -> None:
        """Serve the adapters in `folder` under the name `name`, and unload older adapters of the base model `model`.

        Only an engine with `takes_adapters` implements this.
        """
        raise AssertionError(f"{type(self).__name__} does not take adapters: they are merged into the weights")

    async def sleep(self, level: int) -> None:
        """Release GPU memory. Requests are not answered until weights and KV cache are both awake again (`wake`).

        `level`: 1 backs the weights up in host memory, 2 discards them. Only an engine with `can_sleep` implements
        this.
        """
        raise AssertionError(f"{type(self).__name__} cannot sleep: rollout.colocated is refused")

    async def wake(self, part: Literal["weights", "kv_cache"]) -> None:
        """Allocate the GPU memory of the weights or of the KV cache again after `sleep`.

        After `wake("weights")`, the trainer can send new weights. Until then, weights that `sleep` discarded have
        arbitrary values. Only an engine with `can_sleep` implements this.
        """
        raise AssertionError(f"{type(self).__name__} cannot sleep: rollout.colocated is refused")

    def complete_name(self, sampling: SamplingSettings) -> str:
        """Return the name of the call that samples a response, for error messages, e.g. the route /v1/completions."""
        return "complete"

    # Helpers for engines, and calls with checks

    def lost(self, what: str) -> ServerLostError:
        return ServerLostError(f"rollout.servers: {self.url} {what}")

    @contextmanager
    def reading(self, what: str) -> Iterator[None]:
        """Context manager for code that parses an answer: an unexpected format becomes a `ServerLostError`.

        `what`: the problem that the message of this error states.
        """
        try:
            yield
        except (IncompleteError, KeyError, IndexError, TypeError, ValueError, OverflowError, AttributeError) as error:
            raise self.lost(f"{what} ({' '.join(str(error).split())})") from None

    def need_version(self, found: str | None, version: int) -> None:
        """Raise an error unless `found`, the version that the server reports, is `version`."""
        if found is None:
            raise RestartedError(f"rollout.servers: {self.url} has restarted and lost the weights of the run")
        if found != str(version):
            raise VersionError(
                "rollout.servers",
                f"{self.url} serves policy version {found!r}, not {version}",
                "make sure that no other run uses the server, and restart the server",
            )

    async def respond(
        self,
        request: SamplingRequest,
        sampling: SamplingSettings,
        *,
        model: str,
        version: int,
        salt: str,
        cut: bool = False,
    ) -> Response:
        """Sample one response and check it. Other arguments: see `complete`.

        `cut`: whether the response may be partial because a pause interrupted it.
        """
        completion = await self.complete(request, sampling, model=model, version=version, salt=salt)
        number = len(completion.tokens)
        ended = bool(completion.tokens) and completion.tokens[-1] in sampling.stops
        if cut and completion.reason == "cut":
            if number > request.max_new_tokens or max(completion.tokens, default=0) >= sampling.vocabulary:
                raise self.lost(f"{self.complete_name(sampling)} returned {number} tokens that were not requested")
        else:
            self._check_whole(completion, request, sampling, ended)
        return Response(
            tokens=np.array(completion.tokens, np.int64),
            logprobs=np.array(completion.logprobs, np.float32),
            ended=ended,
            version=version,
            routes=completion.routes,
            kept=completion.kept,
        )

    async def scored(
        self, sequences: Sequence[Sequence[int]], *, num_sampled: int, vocabulary: int, **settings: Any
    ) -> list[tuple[list[int], list[float]]]:
        """Call `score` on the server, and return the result after checking its format."""
        scored = await self.score(sequences, num_sampled=num_sampled, **settings)
        with self.reading("returned no usable log-probabilities for the canary, which checks each weight sync"):
            for sequence, (tokens, logprobs) in zip(sequences, scored, strict=True):
                if len(tokens) != len(sequence) + num_sampled:
                    raise IncompleteError(f"sampled {len(tokens) - len(sequence)} tokens instead of {num_sampled}")
                checked_tokens(tokens[1:], logprobs, vocabulary=vocabulary)
        return scored

    def _check_whole(
        self, completion: Completion, request: SamplingRequest, sampling: SamplingSettings, ended: bool
    ) -> None:
        number, max_new_tokens = len(completion.tokens), request.max_new_tokens
        if completion.reason not in ("stop", "length"):  # interrupted by a pause, or ended by an error of the engine
            reason = "abort" if completion.reason == "cut" else completion.reason
            raise self.lost(f"{self.complete_name(sampling)} ended a response with reason {reason!r}")
        if not 1 <= number <= max_new_tokens:
            raise self.lost(f"{self.complete_name(sampling)} returned {number} tokens instead of 1 to {max_new_tokens}")
        if max(completion.tokens) >= sampling.vocabulary:
            raise UserError(
                "rollout.servers",
                f"{self.url} sampled token {max(completion.tokens)}, but the vocabulary size is {sampling.vocabulary}",
                "start the server with the model of model.path",
            )
        if not ended and completion.reason == "stop":
            raise UserError(
                "rollout.servers",
                f"{self.url} ends responses at token {completion.tokens[-1]}, which is not a stop token of the run",
                self.fix_stops,
            )
        if not ended and number < max_new_tokens:
            fix = self.fix_length.format(length=len(request.tokens) + max_new_tokens)
            raise UserError(
                "rollout.servers",
                f"{self.url} ended a response after {number} tokens instead of {max_new_tokens}, without a stop token",
                fix,
            )


def checked_tokens(tokens: Any, logprobs: Any, *, vocabulary: int = 1 << 31) -> tuple[list[int], list[float]]:
    """Return the tokens and log-probabilities that a server sent, as lists. Raise `IncompleteError` if invalid."""
    ids = checked_ids(tokens, vocabulary, "token_ids")
    values = [float(value) for value in logprobs]
    if len(values) != len(ids):
        raise IncompleteError(f"{len(ids)} tokens and {len(values)} log-probabilities")
    if not np.isfinite(values).all() or max(values, default=0.0) > 1e-4:
        raise IncompleteError("log-probabilities that are above 0 or not finite")
    return ids, values
