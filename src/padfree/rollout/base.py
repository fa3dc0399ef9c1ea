"""The seam between rollouts and whoever samples them: token ids in, responses out.

    SamplingRequest   tokens 7 8      room 3      key 912…      a prompt, once for each response to it
    Response          tokens 5 6 0    logprobs -.1 -2.3 -.4     ended True      version 40      versions 40 40 41

A sampler gets the weights of the policy, then requests. Rewards, groups, advantages, metrics and resuming are written
on top of this protocol and do not know which engine answers (`rollout.engine`).

Requests of one prompt stand side by side and hold the same array object, so that `first.tokens is second.tokens` says
that a prompt can be prefilled once for both.

A sampler that can go on while the policy is trained (`AsyncSampler`) is given requests ahead. An exchange of weights
cuts the responses that are under way; what they have stays, and the new weights write the rest, so that every token and
its log-probability are those of one version.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from padfree.batch import Sample

Score = Callable[["Sequence[Sample]", float], list[NDArray[np.float32]]]
"""Samples and a temperature -> the trainer's own log-probability of every token [n]. A collective of all ranks."""

OnResponse = Callable[[int, "Response"], None]
"""Called with the number of a request and its response, whole or as far as it was written when weights came."""

OnProgress = Callable[[int], None]
"""Called now and then with the number of responses that are finished so far."""

OnFinished = Callable[["Sequence[tuple[int, Response]]"], None]
"""Called with responses that are finished, each with the number of its request: as they come, or together."""

OnTokens = Callable[[int, "NDArray[np.int64]", "NDArray[np.float32]"], None]
"""Called with the index of a request and what was written to it since the last call: tokens and log-probabilities."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SamplingRequest:
    """One response to sample: after `tokens`, at most `max_new_tokens` of them, drawn with the noise of `key`."""

    tokens: NDArray[np.integer[Any]]  # [n] of the prompt
    max_new_tokens: int
    key: int  # of `noise.response_keys`; the seed where a server draws. 0 (`noise.GREEDY`): the likeliest tokens
    begun: Response | None = None  # what was written already, by weights that were exchanged meanwhile


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Response:
    """What was drawn. `ended`: the last token is one that ends a response; else there was no more room."""

    tokens: NDArray[np.int64]  # [m]
    logprobs: NDArray[np.float32]  # [m] of the drawn tokens, at the sampling temperature
    ended: bool
    version: int  # optimizer steps that were made when the weights that wrote it were handed over; the oldest of them
    versions: NDArray[np.int64] | None = None  # [m] of each token; None: all are of `version`

    @property
    def token_versions(self) -> NDArray[np.int64]:
        """[m]"""
        return np.full(len(self.tokens), self.version, np.int64) if self.versions is None else self.versions

    def is_whole(self, max_new_tokens: int) -> bool:
        return self.ended or len(self.tokens) >= max_new_tokens

    def followed_by(self, rest: Response) -> Response:
        """Both as one response."""
        return Response(
            tokens=np.concatenate([self.tokens, rest.tokens]),
            logprobs=np.concatenate([self.logprobs, rest.logprobs]),
            ended=rest.ended,
            version=self.version if len(self.tokens) else rest.version,
            versions=np.concatenate([self.token_versions, rest.token_versions]),
        )


class Sampler(Protocol):
    """Samples responses from a policy. Every rank calls the same methods in the same order."""

    def update_weights(self, trained: PreTrainedModel, version: int) -> None:
        """Sample from the present weights of `trained` from now on. A collective of all ranks."""

    def sample(
        self,
        requests: Sequence[SamplingRequest],
        *,
        on_progress: OnProgress | None = None,
        on_finished: OnFinished | None = None,
    ) -> list[Response]:
        """The responses to this rank's requests, in their order; `on_finished` is told each of them once."""

    def metrics(self) -> Mapping[str, float]:
        """Of the last exchange of weights and the last sampling."""

    def close(self) -> None:
        """Give back what the sampler holds; it is not used again."""


class AsyncSampler(Sampler, Protocol):
    """A sampler that goes on while the policy is trained, and while weights are exchanged: `rollout.staleness`."""

    @property
    def failure(self) -> Exception | None:
        """What has ended the sampling in its threads."""

    @property
    def stuck(self) -> bool:
        """Whether requests wait for weights that every sampler in reach has lost: see `renew`."""

    def begin(self, requests: Sequence[SamplingRequest], on_response: OnResponse) -> None:
        """Ask for these after all that were asked for before, and return. `on_response` is called by threads."""

    def renew(self) -> None:
        """Hand the weights of the last `update_weights` over again. A collective of all ranks."""
