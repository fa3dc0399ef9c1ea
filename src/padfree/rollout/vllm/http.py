"""One vLLM server over HTTP: its routes, and a line for everything that can be wrong with an answer.

    Server.call("GET", "/weight_info")        -> {"weight_version": "40"}
    Server.complete(request, ...)             -> Response      version asked, completion, version asked again

Two kinds of failure. `ServerLostError`: the server is gone, hangs, or answers with an error of its own or with less
than was asked for; somebody else can be asked, or it can be asked again. `ValueError`: it would answer the same again
(no such route, another vocabulary, weights of another version), and only the user can cure that.

A response belongs to the version that the server reports on the same connection before and after it. Versions never
come back, and a connection does not outlive its server, so the weights were those from the first token to the last.
"""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from padfree.errors import UserError
from padfree.rollout.base import Response, SamplingRequest
from padfree.rollout.noise import GREEDY
from padfree.rollout.token_ids import checked_ids

START = 'start it with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config \'{"backend": "padfree"}\''
NO_WEIGHTS = "default"
"""What vLLM calls the weights that it has loaded itself."""

_SEEDS = (1 << 63) - 1  # vLLM takes -1 for no seed
_ANY_ID = 1 << 31


class ServerLostError(RuntimeError):
    """A server that cannot be relied on now. Its line names the server."""


class LateError(ServerLostError):
    """A server that has not answered in time."""


class _IncompleteError(Exception):
    """An answer without what was asked for."""


_UNUSABLE = (_IncompleteError, KeyError, IndexError, TypeError, ValueError, OverflowError)
"""What reading an answer of another form than the one that was asked for may raise."""


class VersionError(UserError):
    """A server whose weights are of another version than a request is for."""


class RestartedError(ServerLostError):
    """A server that answers and has lost the weights it was given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawing:
    """How tokens are drawn: the same for all requests of a run."""

    temperature: float
    stops: Sequence[int]
    vocabulary: int


class Server:
    """A server by its address. Every call opens a connection of its own; calls may come from many threads."""

    def __init__(self, url: str, timeout: float) -> None:
        self.url, self.timeout = url.rstrip("/"), timeout
        parts = urlsplit(self.url)
        assert parts.hostname is not None, "RolloutConfig refuses such an address"
        self.host, self.port, self._path = (
            parts.hostname,
            parts.port or (443 if parts.scheme == "https" else 80),
            parts.path,
        )
        self._kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._lock = threading.Lock()
        self._connections: set[http.client.HTTPConnection] = set()

    def __repr__(self) -> str:
        return f"Server({self.url!r})"

    def call(
        self, method: str, path: str, body: Any = None, *, timeout: float | None = None, cure: str = START
    ) -> dict[str, Any]:
        """The JSON object that a route answers with; `cure` is for a server that has no such route."""
        with self._connected(timeout) as connection:
            return self._call(connection, method, path, body, cure)

    def tell(self, path: str, body: Any, *, cure: str) -> None:
        """Post to a route that answers with a sentence."""
        with self._connected() as connection:
            self._answer(connection, "POST", path, body, cure)

    def number(self, path: str, name: str) -> int:
        """One that a route answers with."""
        answer = self.call("GET", path)
        if not isinstance(answer.get(name), int):
            raise self._lost(f"{path} answered {answer} without {name}")
        return int(answer[name])

    def models(self, *, cure: str = START) -> list[str]:
        """What the server calls its models: the one that it has loaded first, then adapters."""
        entries = self.call("GET", "/v1/models", cure=cure).get("data")
        if not isinstance(entries, list) or not all(isinstance(entry, dict) and "id" in entry for entry in entries):
            entries = []
        if not entries:
            raise self._lost("/v1/models names no model")
        return [str(entry["id"]) for entry in entries]

    def version(self, *, timeout: float | None = None) -> str:
        """Which weights the server says it has."""
        with self._connected(timeout) as connection:
            return self._version(connection)

    def need_version(self, version: int, *, timeout: float) -> None:
        """Nothing, where the server answers in time and has these weights."""
        with self._connected(timeout) as connection:
            self._need_version(connection, version)

    def complete(
        self, request: SamplingRequest, drawing: Drawing, *, model: str, version: int, salt: str, cut: bool = False
    ) -> Response:
        """One response, by the weights of this version and no others.

        With `cut` it may be one that a pause has ended: all its tokens are from before the pause.
        """
        body = {
            "model": model,
            "prompt": request.tokens.tolist(),
            "max_tokens": request.room,
            "seed": request.key & _SEEDS,
            "stop_token_ids": list(drawing.stops),
            "cache_salt": f"{salt} {version}",
            "logprobs": 0,
            **_plain_sampling(0.0 if request.key == GREEDY else drawing.temperature),
        }
        with self._connected() as connection:
            self._need_version(connection, version)
            answer = self._call(connection, "POST", "/v1/completions", body)
            (choice,) = self._choices(answer, 1, model)
            if cut and choice.get("finish_reason") == "abort":
                return self._cut_response(choice, request, drawing, version)
            self._need_version(connection, version)
        return self._response(choice, request, drawing, version)

    def score(
        self,
        sequences: Sequence[Sequence[int]],
        *,
        drawn: int,
        temperature: float,
        model: str,
        salt: str,
        vocabulary: int = _ANY_ID,
    ) -> list[tuple[list[int], list[float]]]:
        """For each sequence its tokens and `drawn` more, and the log-probabilities of all but the first.

        Those of the given tokens are at temperature 1, those of the drawn ones at `temperature`.
        """
        body = {
            "model": model,
            "prompt": [list(sequence) for sequence in sequences],
            "max_tokens": drawn,
            "seed": 0,
            "cache_salt": salt,
            "logprobs": 0,
            "prompt_logprobs": 0,
            **_plain_sampling(temperature),
        }
        answer = self.call("POST", "/v1/completions", body)
        found = []
        for sequence, choice in zip(sequences, self._choices(answer, len(sequences), model), strict=True):
            try:
                given = [
                    float(entry[str(token)]["logprob"])
                    for token, entry in zip(sequence[1:], choice["prompt_logprobs"][1:], strict=True)
                ]
                tokens, logprobs = _drawn_of(choice)
                if len(tokens) != drawn:
                    raise _IncompleteError(f"{len(tokens)} tokens instead of {drawn}")
                checked_ids(tokens, vocabulary, "token_ids")
            except _UNUSABLE as error:
                raise self._lost(f"answered without the log-probabilities of the canary ({_line(error)})") from None
            found.append(([*sequence, *tokens], [*given, *logprobs]))
        return found

    def hang_up(self) -> None:
        """End all calls that are under way: whoever waits for an answer gets a `ServerLostError` now."""
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            sock = connection.sock
            if sock is not None:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    # One connection

    @contextmanager
    def _connected(self, timeout: float | None = None) -> Iterator[http.client.HTTPConnection]:
        connection = self._kind(self.host, self.port, timeout=timeout or self.timeout)
        with self._lock:
            self._connections.add(connection)
        try:
            yield connection
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def _call(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: Any = None, cure: str = START
    ) -> dict[str, Any]:
        content = self._answer(connection, method, path, body, cure)
        try:
            answer = json.loads(content) if content else {}
        except (ValueError, RecursionError):
            raise self._lost(f"{path} answered what is no JSON ({content[:80]!r})") from None
        if not isinstance(answer, dict):
            raise self._lost(f"{path} answered {type(answer).__name__} in place of a JSON object")
        return answer

    def _answer(self, connection: http.client.HTTPConnection, method: str, path: str, body: Any, cure: str) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} if data is not None else {}
        try:
            connection.request(method, self._path + path, data, headers)
            reply = connection.getresponse()
            content = reply.read()
        except TimeoutError:
            raise LateError(
                f"rollout.servers: {self.url} {path} did not answer within {connection.timeout:g} s"
            ) from None
        except ConnectionRefusedError:
            raise self._lost("refused the connection") from None
        except (OSError, http.client.HTTPException) as error:
            raise self._lost(f"{path} broke off ({type(error).__name__}: {_line(error)})") from None
        if reply.status == 404 and path != "/v1/completions":  # which is there, but may not know a model
            raise UserError("rollout.servers", f"{self.url} has no route {path}", cure)
        if reply.status >= 500 or reply.status in (408, 429):
            raise self._lost(f"{path} answered {reply.status} ({_message(content)})")
        if reply.status >= 400:
            raise UserError(
                "rollout.servers",
                f"{self.url} refused {path} ({reply.status}: {_message(content)})",
                "start it for the model and the lengths of this run",
            )
        return content

    def _version(self, connection: http.client.HTTPConnection) -> str:
        answer = self._call(connection, "GET", "/weight_info")
        if not isinstance(answer.get("weight_version"), str):
            raise self._lost(f"/weight_info answered {answer} without weight_version")
        return str(answer["weight_version"])

    def _need_version(self, connection: http.client.HTTPConnection, version: int) -> None:
        found = self._version(connection)
        if found == NO_WEIGHTS:
            raise RestartedError(f"rollout.servers: {self.url} has restarted, it has none of the run's weights")
        if found != str(version):
            raise VersionError(
                "rollout.servers",
                f"{self.url} serves policy version {found!r}, not {version}",
                "let no other run use it, and start it again",
            )

    # Answers

    def _choices(self, answer: Mapping[str, Any], number: int, model: str) -> list[dict[str, Any]]:
        """As many as were asked for, in the order of the prompts."""
        choices = answer.get("choices")
        if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
            raise self._lost("/v1/completions answered without choices")
        if sorted(str(choice.get("index")) for choice in choices) != sorted(map(str, range(number))):
            raise self._lost(f"/v1/completions answered {len(choices)} of {number} responses")
        if answer.get("model") != model:
            raise self._lost(f"/v1/completions answered for the model {answer.get('model')!r}, not {model!r}")
        return sorted(choices, key=lambda choice: int(choice["index"]))

    def _cut_response(
        self, choice: Mapping[str, Any], request: SamplingRequest, drawing: Drawing, version: int
    ) -> Response:
        """What there was at the pause; it may be whole, and it may be nothing."""
        tokens, logprobs = self._drawn(choice) if choice.get("token_ids") else ([], [])
        if len(tokens) > request.room or max(tokens, default=0) >= drawing.vocabulary:
            raise self._lost(f"/v1/completions answered {len(tokens)} tokens that were not asked for")
        ended = bool(tokens) and tokens[-1] in drawing.stops
        return Response(
            tokens=np.array(tokens, np.int64), logprobs=np.array(logprobs, np.float32), ended=ended, version=version
        )

    def _drawn(self, choice: Mapping[str, Any]) -> tuple[list[int], list[float]]:
        try:
            return _drawn_of(choice)
        except _UNUSABLE as error:
            raise self._lost(
                f"/v1/completions answered without token ids and log-probabilities ({_line(error)})"
            ) from None

    def _response(
        self, choice: Mapping[str, Any], request: SamplingRequest, drawing: Drawing, version: int
    ) -> Response:
        tokens, logprobs = self._drawn(choice)
        reason = choice.get("finish_reason")
        if reason not in ("stop", "length"):  # aborted, by a pause or an error of the engine
            raise self._lost(f"/v1/completions ended a response by {reason!r}")
        if not tokens or len(tokens) > request.room:
            raise self._lost(f"/v1/completions answered {len(tokens)} tokens where 1 to {request.room} were asked for")
        if choice.get("prompt_token_ids") != request.tokens.tolist():
            raise UserError(
                "rollout.servers",
                f"{self.url} changed the token ids of a prompt",
                "start it with the run's model, and with nothing between",
            )
        if max(tokens) >= drawing.vocabulary:
            raise UserError(
                "rollout.servers",
                f"{self.url} drew token {max(tokens)} of a vocabulary of {drawing.vocabulary}",
                "start it with the model of model.path",
            )
        ended = tokens[-1] in drawing.stops
        if not ended and reason == "stop":
            raise UserError(
                "rollout.servers",
                f"{self.url} ends responses at token {tokens[-1]}, which does not end one here",
                "start it with --generation-config vllm",
            )
        if not ended and len(tokens) < request.room:
            raise UserError(
                "rollout.servers",
                f"{self.url} ended a response after {len(tokens)} of {request.room} tokens",
                f"start it with --max-model-len {len(request.tokens) + request.room} or more",
            )
        return Response(
            tokens=np.array(tokens, np.int64), logprobs=np.array(logprobs, np.float32), ended=ended, version=version
        )

    def _lost(self, what: str) -> ServerLostError:
        return ServerLostError(f"rollout.servers: {self.url} {what}")


def _plain_sampling(temperature: float) -> dict[str, Any]:
    """Draws from the softmax and nothing else, whatever the server's defaults are; and ids in place of text."""
    return {
        "n": 1,
        "temperature": temperature,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "ignore_eos": True,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }


def _drawn_of(choice: Mapping[str, Any]) -> tuple[list[int], list[float]]:
    tokens = checked_ids(choice["token_ids"], _ANY_ID, "token_ids")  # each caller knows the size of the vocabulary
    values = [float(value) for value in choice["logprobs"]["token_logprobs"]]
    if len(values) != len(tokens):
        raise _IncompleteError(f"{len(tokens)} tokens and {len(values)} log-probabilities")
    if not np.isfinite(values).all() or max(values, default=0.0) > 1e-4:
        raise _IncompleteError("log-probabilities above 0, or no numbers")
    return tokens, values


def _message(content: bytes) -> str:
    """What an error answer says, short enough for a line."""
    text = content.decode(errors="replace")
    with suppress(ValueError, RecursionError):
        answer = json.loads(text)
        if isinstance(answer, dict):
            error = answer.get("error", answer.get("detail", text))
            text = str(error.get("message", error) if isinstance(error, dict) else error)
    return " ".join(text.split())[:300]


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
