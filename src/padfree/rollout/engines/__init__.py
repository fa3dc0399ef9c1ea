"""Which code samples for a `rollout.engine`, imported when it is asked for.

in_process, vllm     padfree's own (`config.choices.SAMPLING_ENGINES`); all but the first are servers (`servers`)
module:function      the user's: the function takes what `make_sampler` takes, and returns a `Sampler`, whose responses
                     are checked (`CheckedSampler`)
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from transformers import PreTrainedModel

from padfree.config import Config
from padfree.config.choices import SAMPLING_ENGINES
from padfree.config.functions import UserFunction, is_path
from padfree.distributed import Mesh, PeerLostError
from padfree.errors import UserError, shown_error
from padfree.rollout.base import (
    AsyncSampler,
    OnFinished,
    OnProgress,
    OnResponse,
    Response,
    Sampler,
    SamplingRequest,
    Score,
)
from padfree.rollout.token_ids import checked_response, vocabulary_of

USER_ENGINE = UserFunction(
    setting="rollout.engine",
    noun="sampler",
    arguments=("config", "mesh", "trained", "tokenizer", "score"),
    result="a Sampler",
)
METHODS = ("update_weights", "sample", "metrics", "close")
ASYNC_METHODS = (*METHODS, "begin", "renew", "stuck", "failure")


def check_engine_name(name: str) -> None:
    """Refuse a user's engine that cannot be found. Nothing is imported."""
    if is_path(name):
        USER_ENGINE.check(name)


def make_sampler(config: Config, mesh: Mesh, trained: PreTrainedModel, tokenizer: Any, score: Score) -> Sampler:
    """The sampler that the settings name. Every rank calls it; `trained` is the model whose weights it will get.

    With `score` it can see that they have arrived.
    """
    found: Sampler = _made(METHODS, "Sampler", config, mesh, trained, tokenizer, score)
    return found


def make_async_sampler(
    config: Config, mesh: Mesh, trained: PreTrainedModel, tokenizer: Any, score: Score
) -> AsyncSampler:
    """The same, for `rollout.staleness` above 0."""
    found: AsyncSampler = _made(ASYNC_METHODS, "AsyncSampler", config, mesh, trained, tokenizer, score)
    return found


def _made(methods: Sequence[str], kind: str, config: Config, *rest: Any) -> Any:
    name = config.rollout.engine
    if not is_path(name):
        module, function = SAMPLING_ENGINES[name].split(":")
        return getattr(import_module(module), function)(config, *rest)
    made = USER_ENGINE.load(name)
    with _user_code(name):
        sampler = made(config, *rest)
    missing = [method for method in methods if not hasattr(sampler, method)]
    if missing:
        needed = f" for rollout.staleness {config.rollout.staleness}" if config.rollout.staleness else ""
        raise UserError(
            "rollout.engine",
            f"returned {type(sampler).__name__}, which has no {missing[0]}",
            f"return a padfree.rollout.base.{kind}{needed}",
            value=name,
        )
    ahead = all(hasattr(sampler, method) for method in ASYNC_METHODS)
    return (CheckedAsyncSampler if ahead else CheckedSampler)(sampler, name)


@contextmanager
def _user_code(name: str) -> Iterator[None]:
    """A block that calls a user's engine: its exceptions are not bugs of padfree."""
    try:
        yield
    except (UserError, PeerLostError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise UserError("rollout.engine", f"raised {shown_error(error)}", "correct the engine", name) from error


class CheckedSampler:
    """A user's sampler. Its responses are checked before anything else sees them."""

    def __init__(self, sampler: Any, name: str) -> None:
        self.sampler, self._name, self._what = sampler, name, f"rollout.engine: {name!r}"
        self._vocabulary = 0  # known with the first weights

    def update_weights(self, trained: PreTrainedModel, version: int) -> None:
        self._vocabulary = vocabulary_of(trained)
        with _user_code(self._name):
            self.sampler.update_weights(trained, version)

    def sample(
        self,
        requests: Sequence[SamplingRequest],
        *,
        on_progress: OnProgress | None = None,
        on_finished: OnFinished | None = None,
    ) -> list[Response]:
        def finished(responses: Sequence[tuple[int, Response]]) -> None:
            assert on_finished is not None
            on_finished([(index, self._checked(one, requests[index])) for index, one in responses])

        wanted: dict[str, Any] = {"on_progress": on_progress, "on_finished": on_finished and finished}
        taken = inspect.signature(self.sampler.sample).parameters
        with _user_code(self._name):
            found = self.sampler.sample(requests, **{name: one for name, one in wanted.items() if name in taken})
        if not isinstance(found, Sequence) or len(found) != len(requests):
            number = len(found) if isinstance(found, Sequence) else type(found).__name__
            raise UserError.of(
                f"{self._what} returned {number} for {len(requests)} requests; return a list with one Response for "
                "each, in their order"
            )
        responses = [self._checked(one, request) for one, request in zip(found, requests, strict=True)]
        if on_finished is not None and "on_finished" not in taken:
            on_finished(list(enumerate(responses)))
        return responses

    def _checked(self, response: Any, request: SamplingRequest, *, whole: bool = True) -> Response:
        return checked_response(response, request, self._vocabulary, self._what, whole=whole)

    def metrics(self) -> Mapping[str, float]:
        found: Mapping[str, float] = self.sampler.metrics()
        return found

    def close(self) -> None:
        self.sampler.close()


class CheckedAsyncSampler(CheckedSampler):
    """The same for one that samples ahead. A wrong response is its `failure`."""

    _wrong: Exception | None = None

    @property
    def failure(self) -> Exception | None:
        found: Exception | None = self._wrong or self.sampler.failure
        return found

    @property
    def stuck(self) -> bool:
        return bool(self.sampler.stuck)

    def begin(self, requests: Sequence[SamplingRequest], on_response: OnResponse) -> None:
        def checked(index: int, response: Response) -> None:
            try:
                self._checked(response, requests[index], whole=False)
            except UserError as error:  # in a thread of the engine: the run asks for `failure`
                self._wrong = self._wrong or error
                return
            on_response(index, response)

        self.sampler.begin(requests, checked)

    def renew(self) -> None:
        self.sampler.renew()
