"""The interface between rollouts and the engines that sample responses: token ids in, responses out.

Requests for the same prompt are adjacent and have the same `prompt_key`, so that the sampler can prefill the prompt
once. Rewards are computed outside of the sampler.

An `AsyncSampler` keeps sampling while the policy is trained. After a weight sync, the new weights continue the
responses in progress. A response therefore stores for each token the policy version (number of optimizer steps) that
sampled it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from padfree.images import Image
from padfree.kept_sets import KeptSets
from padfree.routes import Routes, merged_routes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from padfree.sample import Sample

Score = Callable[["Sequence[Sample]", float], list[NDArray[np.float32]]]
"""Returns the trainer's log-probabilities [n] of each sample, for the given samples and temperature. Collective."""

OnResponse = Callable[[int, "Response"], None]
"""Called with the index of a request and its response. A response that a weight sync interrupted is partial."""

OnProgress = Callable[[int], None]
"""Called from time to time with the number of responses finished so far."""

OnFinished = Callable[["Sequence[tuple[int, Response]]"], None]
"""Called with finished responses, one or several at once, each with the index of its request."""

Gather = Callable[[Any], list[Any]]
"""Gathers an object from every rank, and returns the list of all objects. Collective."""

OnTokens = Callable[[int, "NDArray[np.int64]", "NDArray[np.float32]"], None]
"""Called with the index of a request and its new tokens and log-probabilities since the last call."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SamplingRequest:
    """A request for one response of at most `max_new_tokens` tokens.

    `key` determines the random numbers with which the tokens are sampled.
    """

    tokens: NDArray[np.integer[Any]]  # [n] the prompt
    max_new_tokens: int
    # Random key, from `sampling_rng.response_keys`. Servers use it as the seed. 0 (`sampling_rng.GREEDY`) means greedy
    # decoding.
    key: int
    partial: Response | None = None  # the beginning of the response, sampled by earlier weights
    num_earlier: int = 0  # how many tokens at the end of `tokens` belong to the response, and not to its prompt
    images: tuple[Image, ...] = ()  # the images of the prompt
    sampled: NDArray[np.bool_] | None = None  # [n] the tokens of the prompt that are earlier turns; None: no token
    rotary_positions: NDArray[np.int64] | None = None  # [P, n] if they are not 0, 1, 2, ...: `padfree.model.vision`

    @property
    def prompt(self) -> Sample:
        """The prompt as a sample, with its images."""
        from padfree.sample import Sample

        # A policy may have sampled the id of an image placeholder in an earlier turn.
        logprobs = None if self.sampled is None else np.zeros(len(self.tokens), np.float32)
        return Sample(
            tokens=self.tokens,
            loss_mask=self.sampled,
            logprobs=logprobs,
            images=self.images,
            rotary_positions=self.rotary_positions,
        )

    @property
    def prompt_key(self) -> tuple[int, tuple[str, ...]]:
        """Return a key that two requests share if they have the same array object of tokens and the same images."""
        return id(self.tokens), tuple(image.digest for image in self.images)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Response:
    """A sampled response.

    `ended`: whether the last token is a stop token. A response that has not ended reached its token limit, or a weight
    sync interrupted it.
    """

    tokens: NDArray[np.int64]  # [m]
    logprobs: NDArray[np.float32]  # [m] log-probabilities of the tokens at the sampling temperature
    ended: bool
    version: int  # policy version (number of optimizer steps) of the oldest weights that sampled one of its tokens
    versions: NDArray[np.int64] | None = None  # [m] policy version of each token; None: all have `version`
    routes: Routes | None = None  # [n + m, R, k] of the n prompt tokens and the m tokens; None: not recorded
    kept: KeptSets | None = None  # [m] the ids among which each token was sampled; None: the whole vocabulary

    @property
    def token_versions(self) -> NDArray[np.int64]:
        """Return the version of the weights that sampled each of the m tokens, [m]."""
        return np.full(len(self.tokens), self.version, np.int64) if self.versions is None else self.versions

    @property
    def kept_sets(self) -> KeptSets:
        """Return the kept set of each of the m tokens: the ids from which the token was sampled."""
        return KeptSets.whole(len(self.tokens)) if self.kept is None else self.kept

    def is_whole(self, max_new_tokens: int) -> bool:
        return self.ended or len(self.tokens) >= max_new_tokens

    def followed_by(self, rest: Response) -> Response:
        """Return this partial response followed by its continuation `rest`, as one response."""
        return Response(
            tokens=np.concatenate([self.tokens, rest.tokens]),
            logprobs=np.concatenate([self.logprobs, rest.logprobs]),
            ended=rest.ended,
            version=self.version if len(self.tokens) else rest.version,
            versions=np.concatenate([self.token_versions, rest.token_versions]),
            routes=self._routes_followed_by(rest),
            kept=None if self.kept is None and rest.kept is None else KeptSets.joined([self.kept_sets, rest.kept_sets]),
        )

    def _routes_followed_by(self, rest: Response) -> Routes | None:
        """Return the routes (the experts of each token) of the prompt, this response and its continuation `rest`.

        The request for `rest` has the prompt and this response as its prompt, so `rest.routes` covers their tokens too.
        """
        if self.routes is None:
            return None
        return merged_routes(self.routes, rest.routes, len(self.routes) + len(rest.tokens))


class Sampler(Protocol):
    """Samples responses from a policy. All ranks call the same methods in the same order."""

    def update_weights(self, trained: PreTrainedModel, version: int) -> None:
        """Use the current weights of `trained` for all following responses. Collective.

        `version`: the policy version of these weights, i.e. the number of optimizer steps.
        """

    def sample(
        self,
        requests: Sequence[SamplingRequest],
        *,
        on_progress: OnProgress | None = None,
        on_finished: OnFinished | None = None,
    ) -> list[Response]:
        """Return the responses to this rank's requests, in order.

        `on_progress` receives the number of finished responses from time to time. `on_finished` receives every finished
        response exactly once. A single call of `on_finished` may pass several responses.
        """

    def metrics(self) -> Mapping[str, float]:
        """Return metrics of the last weight sync and of the last call of `sample`, keyed by name."""

    def close(self) -> None:
        """Release all resources. The sampler cannot be used afterwards."""


class SleepingSampler(Sampler, Protocol):
    """A sampler that shares devices with the run (`rollout.colocated`)."""

    def sleep(self) -> None:
        """Release the memory of the devices until the next `update_weights`. Collective."""


class AsyncSampler(Sampler, Protocol):
    """A sampler that keeps sampling during training and across weight syncs (`rollout.staleness` above 0)."""

    @property
    def failure(self) -> Exception | None:
        """The error that stopped the sampling threads; None if they have not stopped."""

    @property
    def stuck(self) -> bool:
        """Whether requests wait because no reachable server has the current weights.

        If so, the caller has to send the weights again with `renew`.
        """

    def begin(self, requests: Sequence[SamplingRequest], on_response: OnResponse) -> None:
        """Queue `requests` and return without waiting.

        `on_response` receives each response. It is called in a thread of the sampler.
        """

    def renew(self) -> None:
        """Send the weights of the last `update_weights` again, e.g. to servers that have restarted. Collective."""
