"""What the rest of padfree asks of a server, whichever engine it runs: `ServerApi`.

    check                            is it a server for this run? The name that it gives to the model
    version                          the policy version of its weights; None: weights that it has loaded itself
    complete, score                  tokens to a response; log-probabilities of given tokens
    pause, resume                    a pause ends every response under way with the tokens that it has ("cut")
    join, begin, bucket, finish      a weight sync (`buckets` has the form of a bucket)
    command, environment             the command line of a server that a run starts

An engine is one subclass and says how its servers are spoken to. All coroutines run on one event loop. Everything else
(which server is asked next, retries, the canary, starting and watching servers, staleness) is generic.

There are two kinds of failure. `ServerLostError`: the server is gone, hangs, or answers with an error of its own or
with less than was asked for; another server can be asked, or the same one later. `UserError`: it would answer the same
again (no such route, another vocabulary, weights of another version), and only the user can cure that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

import numpy as np

from padfree.config import ModelConfig
from padfree.errors import UserError
from padfree.rollout.base import Response, SamplingRequest
from padfree.rollout.engines.servers.buckets import BucketForm
from padfree.rollout.token_ids import checked_ids


class ServerLostError(RuntimeError):
    """A server that cannot be relied on now. Its line names the server."""


class FailedError(ServerLostError):
    """A server that answers with an error of its own. One that `bucket` raises means that it cannot load weights."""


class LateError(ServerLostError):
    """A server that has not answered in time."""


class RestartedError(ServerLostError):
    """A server that answers and has lost the weights it was given."""


class VersionError(UserError):
    """A server whose weights are of another version than a request is for."""


class IncompleteError(Exception):
    """An answer without what was asked for."""


@dataclass(frozen=True, slots=True)
class Drawing:
    """How tokens are drawn: the same for all requests of a run."""

    temperature: float
    stops: Sequence[int]
    vocabulary: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    """What a server must serve for a run."""

    model: ModelConfig
    lora_rank: int  # 0: no adapters
    adapted: Sequence[str]  # names of the modules that have adapters
    vocabulary: int
    temperature: float
    text: str  # and its token ids by the run's tokenizer
    tokens: Sequence[int]

    @property
    def path(self) -> str:
        """A folder or a Hub id."""
        path = Path(self.model.path)
        return str(path.parent) if path.is_file() else self.model.path

    @property
    def random(self) -> bool:
        """Whether there are no weights at `path`: all come from the trainer."""
        return self.model.init == "random" or Path(self.model.path).is_file()


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """What a server has drawn. `reason`: "stop", "length", "cut" by a pause, or the server's own word."""

    tokens: list[int]
    logprobs: list[float]
    reason: str


class ServerApi(ABC):
    """One server, by its address."""

    takes_adapters: ClassVar[bool] = False  # by `load_adapters`; without it adapters are merged into the weights
    completing: ClassVar[str] = "complete"  # the call of `complete`, as messages name it
    cure_stops: ClassVar[str] = "start it with the stop tokens of the run"
    cure_length: ClassVar[str] = "start it for {length} tokens or more"
    cure_name: ClassVar[str] = "start all with the same name for it"
    cure_weights: ClassVar[str] = "see that it can load weights of this model while it runs, or raise rollout.canary"
    cure_temperature: ClassVar[str] = "start it so that it reports log-probabilities at the temperature"

    def __init__(self, url: str, timeout: float) -> None:
        self.url, self.timeout = url.rstrip("/"), timeout
        parts = urlsplit(self.url)
        assert parts.hostname is not None, "RolloutConfig refuses such an address"
        self.host, self.port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    # Every engine has these

    @abstractmethod
    async def check(self, served: ServedModel) -> str:
        """What the server calls its model; a UserError if it is not a server for this run.

        A weight sync that a killed run has left unfinished is ended.
        """

    @abstractmethod
    async def version(self, *, timeout: float | None = None) -> str | None:
        """The version that `finish` gave to the weights; None: they are those that the server loaded itself."""

    @abstractmethod
    async def complete(
        self, request: SamplingRequest, drawing: Drawing, *, model: str, version: int, salt: str
    ) -> Completion:
        """Draw tokens from the whole softmax, with the seed `request.key`; `noise.GREEDY` means the likeliest tokens.

        The weights are those of `version` from the first token to the last: see `need_version`. Keys and values are
        cached for requests of the same `salt` and version alone.
        """

    @abstractmethod
    async def score(
        self, sequences: Sequence[Sequence[int]], *, drawn: int, temperature: float, model: str, salt: str
    ) -> list[tuple[list[int], list[float]]]:
        """For each sequence its tokens and `drawn` more, and the log-probabilities of all but the first.

        Those of the given tokens are at temperature 1, those of the drawn ones at `temperature`.
        """

    @abstractmethod
    async def pause(self) -> None:
        """Cut all responses under way. Those asked for later wait."""

    @abstractmethod
    async def resume(self) -> None: ...

    @abstractmethod
    async def workers(self) -> int:
        """Processes that take part in a group."""

    @abstractmethod
    async def join(self, transfer_info: Mapping[str, Any]) -> None:
        """Before the first bucket, for `Receiver.join` in each worker."""

    @abstractmethod
    async def begin(self) -> None:
        """Begin a weight sync; one that is under way is ended first."""

    @abstractmethod
    async def bucket(self, form: BucketForm) -> None:
        """Receive and load one bucket, by `Receiver.tensors` in each worker."""

    @abstractmethod
    async def finish(self, version: int) -> None:
        """All buckets have arrived: the weights are of this version. Nothing cached for others is used again."""

    @classmethod
    @abstractmethod
    def command(cls, words: Sequence[str], served: ServedModel, *, name: str, port: int) -> list[str]:
        """`rollout.launch.command`, and what the run needs behind it."""

    @classmethod
    def environment(cls) -> dict[str, str]:
        """Variables of a server that a run starts."""
        return {}

    async def load_adapters(self, folder: Path, *, name: str, model: str, version: int) -> None:
        """Serve the adapters in the folder as `name`, and no others of `model`. Only if `takes_adapters`."""
        raise AssertionError(f"{type(self).__name__} does not take adapters: they are merged into the weights")

    # For those who write and ask one

    def lost(self, what: str) -> ServerLostError:
        return ServerLostError(f"rollout.servers: {self.url} {what}")

    @contextmanager
    def reading(self, what: str) -> Iterator[None]:
        """A block that takes an answer apart: whatever another form of it raises is a ServerLostError."""
        try:
            yield
        except (IncompleteError, KeyError, IndexError, TypeError, ValueError, OverflowError, AttributeError) as error:
            raise self.lost(f"{what} ({' '.join(str(error).split())})") from None

    def need_version(self, found: str | None, version: int) -> None:
        """Refuse weights of another version."""
        if found is None:
            raise RestartedError(f"rollout.servers: {self.url} has restarted, it has none of the run's weights")
        if found != str(version):
            raise VersionError(
                "rollout.servers",
                f"{self.url} serves policy version {found!r}, not {version}",
                "let no other run use it, and start it again",
            )

    async def respond(
        self, request: SamplingRequest, drawing: Drawing, *, model: str, version: int, salt: str, cut: bool = False
    ) -> Response:
        """One response. With `cut` it may be one that a pause has ended."""
        found = await self.complete(request, drawing, model=model, version=version, salt=salt)
        number, ended = len(found.tokens), bool(found.tokens) and found.tokens[-1] in drawing.stops
        if cut and found.reason == "cut":
            if number > request.max_new_tokens or max(found.tokens, default=0) >= drawing.vocabulary:
                raise self.lost(f"{self.completing} answered {number} tokens that were not asked for")
        else:
            self._check_whole(found, request, drawing, ended)
        return Response(
            tokens=np.array(found.tokens, np.int64),
            logprobs=np.array(found.logprobs, np.float32),
            ended=ended,
            version=version,
        )

    async def scored(
        self, sequences: Sequence[Sequence[int]], *, drawn: int, vocabulary: int, **settings: Any
    ) -> list[tuple[list[int], list[float]]]:
        """What `score` gives, checked."""
        found = await self.score(sequences, drawn=drawn, **settings)
        with self.reading("answered without the log-probabilities of the canary"):
            for sequence, (tokens, logprobs) in zip(sequences, found, strict=True):
                if len(tokens) != len(sequence) + drawn:
                    raise IncompleteError(f"{len(tokens) - len(sequence)} tokens instead of {drawn}")
                checked_tokens(tokens[1:], logprobs, vocabulary=vocabulary)
        return found

    def _check_whole(self, found: Completion, request: SamplingRequest, drawing: Drawing, ended: bool) -> None:
        number, max_new_tokens = len(found.tokens), request.max_new_tokens
        if found.reason not in ("stop", "length"):  # cut by a pause, or ended by an error of the engine
            reason = "abort" if found.reason == "cut" else found.reason
            raise self.lost(f"{self.completing} ended a response by {reason!r}")
        if not 1 <= number <= max_new_tokens:
            raise self.lost(f"{self.completing} answered {number} tokens where 1 to {max_new_tokens} were asked for")
        if max(found.tokens) >= drawing.vocabulary:
            raise UserError(
                "rollout.servers",
                f"{self.url} drew token {max(found.tokens)} of a vocabulary of {drawing.vocabulary}",
                "start it with the model of model.path",
            )
        if not ended and found.reason == "stop":
            raise UserError(
                "rollout.servers",
                f"{self.url} ends responses at token {found.tokens[-1]}, which does not end one here",
                self.cure_stops,
            )
        if not ended and number < max_new_tokens:
            cure = self.cure_length.format(length=len(request.tokens) + max_new_tokens)
            raise UserError(
                "rollout.servers", f"{self.url} ended a response after {number} of {max_new_tokens} tokens", cure
            )


def checked_tokens(tokens: Any, logprobs: Any, *, vocabulary: int = 1 << 31) -> tuple[list[int], list[float]]:
    """Drawn tokens and their log-probabilities as a server has sent them."""
    found = checked_ids(tokens, vocabulary, "token_ids")
    values = [float(value) for value in logprobs]
    if len(values) != len(found):
        raise IncompleteError(f"{len(found)} tokens and {len(values)} log-probabilities")
    if not np.isfinite(values).all() or max(values, default=0.0) > 1e-4:
        raise IncompleteError("log-probabilities above 0, or no numbers")
    return found, values
