"""Make the sampler named by `rollout.engine`. The module of the sampler is imported on demand.

in_process           built in: samples in the training process
vllm                 built in: samples on inference servers (`servers`)
module:function      a user's function with the arguments of `make_sampler`, which returns a `Sampler`; `CheckedSampler`
                     checks the responses of this sampler

`padfree.choices.SAMPLING_ENGINES` lists the built-in engines.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from padfree.choices import SAMPLING_ENGINES
from padfree.config import Config
from padfree.config.functions import UserFunction, is_path
from padfree.distributed import Mesh, PeerLostError
from padfree.errors import UserError, shown_error
from padfree.model.route_replay import check_routes
from padfree.model.routers import Router, routers_of
from padfree.rollout.base import (
    OnFinished,
    OnProgress,
    OnResponse,
    Response,
    Sampler,
    SamplingRequest,
    Score,
)
from padfree.rollout.token_ids import checked_response, vocabulary_of
from padfree.rollout.truncation import truncation_of

USER_ENGINE = UserFunction(
    setting="rollout.engine",
    noun="sampler",
    arguments=("config", "mesh", "trained", "tokenizer", "score"),
    result="a Sampler",
)
METHODS = ("update_weights", "sample", "metrics", "close")
SLEEPING_METHODS = (*METHODS, "sleep")
ASYNC_METHODS = (*METHODS, "begin", "renew", "stuck", "failure")


def check_engine_name(name: str) -> None:
    """Raise a `UserError` if `name` is a user's sampling engine whose package cannot be found. Nothing is imported."""
    if is_path(name):
        USER_ENGINE.check(name)


def make_sampler(config: Config, mesh: Mesh, trained: PreTrainedModel, tokenizer: Any, score: Score) -> Sampler:
    """Make the sampler named by `rollout.engine`, an `AsyncSampler` if `rollout.staleness` is above 0. Collective.

    `trained`: the model whose weights the sampler will receive. `score` computes the trainer's log-probabilities. A
    sampler can compare them with its own log-probabilities, to verify that the weights have arrived.
    """
    name, staleness = config.rollout.engine, config.rollout.staleness
    sampler: Any
    if not is_path(name):
        module, function = SAMPLING_ENGINES[name].split(":")
        sampler = getattr(import_module(module), function)(config, mesh, trained, tokenizer, score)
        return cast(Sampler, sampler)
    make = USER_ENGINE.load(name)
    with _user_code(name):
        sampler = make(config, mesh, trained, tokenizer, score)
    kind = "Sampler"
    methods: tuple[str, ...] = METHODS
    if staleness:
        kind, methods = f"AsyncSampler for rollout.staleness {staleness}", ASYNC_METHODS
    elif config.rollout.colocated:
        kind, methods = "SleepingSampler for rollout.colocated", SLEEPING_METHODS
    missing = [method for method in methods if not hasattr(sampler, method)]
    if missing:
        raise UserError(
            "rollout.engine",
            f"returned an object of type {type(sampler).__name__}, which has no {missing[0]}",
            f"return a padfree.rollout.base.{kind}",
            value=name,
        )
    is_async = all(hasattr(sampler, method) for method in ASYNC_METHODS)
    truncation = truncation_of(config.rollout)
    return (CheckedAsyncSampler if is_async else CheckedSampler)(sampler, name, truncated=truncation.is_active)


@contextmanager
def _user_code(name: str) -> Iterator[None]:
    """Context manager that turns an exception of the user's engine `name` into a `UserError` about this engine."""
    try:
        yield
    except (UserError, PeerLostError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise UserError("rollout.engine", f"raised {shown_error(error)}", "correct the engine", name) from error


class CheckedSampler:
    """Wraps a user's sampler and checks its responses before they are used."""

    def __init__(self, sampler: Any, name: str, *, truncated: bool = False) -> None:
        """`name`: the import path of the user's engine.

        `truncated`: whether sampling is truncated (top-k, top-p or min-p). If so, each response must contain the kept
        set of each token, i.e. the ids from which the token was sampled.
        """
        self._truncated = truncated
        self.sampler, self._name, self._what = sampler, name, f"rollout.engine: {name!r}"
        self._vocabulary = 0  # set by the first weight sync
        self._routers: list[Router] = []

    def update_weights(self, trained: PreTrainedModel, version: int) -> None:
        self._vocabulary, self._routers = vocabulary_of(trained), routers_of(trained)
        with _user_code(self._name):
            self.sampler.update_weights(trained, version)

    def sample(
        self,
        requests: Sequence[SamplingRequest],
        *,
        on_progress: OnProgress | None = None,
        on_finished: OnFinished | None = None,
    ) -> list[Response]:
        def check_finished(responses: Sequence[tuple[int, Response]]) -> None:
            assert on_finished is not None
            on_finished([(index, self._checked(one, requests[index])) for index, one in responses])

        callbacks: dict[str, Any] = {"on_progress": on_progress, "on_finished": on_finished and check_finished}
        parameters = inspect.signature(self.sampler.sample).parameters
        with _user_code(self._name):
            result = self.sampler.sample(
                requests, **{name: one for name, one in callbacks.items() if name in parameters}
            )
        if not isinstance(result, Sequence) or len(result) != len(requests):
            number = len(result) if isinstance(result, Sequence) else type(result).__name__
            raise UserError.of(
                f"{self._what} returned {number} for {len(requests)} requests; return a list with one Response per "
                "request, in order"
            )
        responses = [self._checked(one, request) for one, request in zip(result, requests, strict=True)]
        if on_finished is not None and "on_finished" not in parameters:
            on_finished(list(enumerate(responses)))
        return responses

    def _checked(self, response: Any, request: SamplingRequest, *, whole: bool = True) -> Response:
        checked = checked_response(
            response, request, self._vocabulary, self._what, whole=whole, truncated=self._truncated
        )
        check_routes([checked.routes], self._routers)
        return checked

    def sleep(self) -> None:
        with _user_code(self._name):
            self.sampler.sleep()

    def metrics(self) -> Mapping[str, float]:
        metrics: Mapping[str, float] = self.sampler.metrics()
        return metrics

    def close(self) -> None:
        self.sampler.close()


class CheckedAsyncSampler(CheckedSampler):
    """Wraps a user's `AsyncSampler` and checks its responses. An invalid response stores an error in `failure`."""

    _wrong: Exception | None = None

    @property
    def failure(self) -> Exception | None:
        failure: Exception | None = self._wrong or self.sampler.failure
        return failure

    @property
    def stuck(self) -> bool:
        return bool(self.sampler.stuck)

    def begin(self, requests: Sequence[SamplingRequest], on_response: OnResponse) -> None:
        def checked(index: int, response: Response) -> None:
            try:
                self._checked(response, requests[index], whole=False)
            except UserError as error:
                # A thread of the engine runs this function, so the error is stored. The main thread reads `failure`.
                self._wrong = self._wrong or error
                return
            on_response(index, response)

        self.sampler.begin(requests, checked)

    def renew(self) -> None:
        self.sampler.renew()
