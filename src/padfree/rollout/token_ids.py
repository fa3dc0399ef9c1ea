"""Check token ids and responses when they arrive from agents, environments, user engines and servers.

    source             invalid input                 consequence
    an agent's call    prompt: [1, 2, 999999]        the call gets status 400, and the episode continues
    an environment     policy.add([999999])          the episode fails
    a user's engine    Response(tokens=[-1], ...)    the run ends with a UserError
    a server           "token_ids": [true]           the request is retried

A token id without an embedding crashes a GPU process without a useful message, so no such id may enter a batch. Token
ids that exist only because the embedding matrix is padded are allowed: the policy can sample them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from padfree.data.records import shown
from padfree.errors import UserError
from padfree.kept_sets import KeptSets
from padfree.rollout.base import Response, SamplingRequest
from padfree.rollout.sampling_rng import GREEDY
from padfree.routes import checked_routes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROUNDING = 1e-3
"""A log-probability from a sampler may exceed 0 by this much, because samplers compute in low precision."""


def vocabulary_of(model: PreTrainedModel) -> int:
    """Return the number of token ids for which the model has an embedding."""
    embeddings = model.get_input_embeddings()
    return int(getattr(embeddings, "num_embeddings", None) or model.config.get_text_config().vocab_size)


def tokenizer_size(tokenizer: Any) -> int:
    """Return the largest token id of the tokenizer plus one."""
    return 1 + max(tokenizer.get_vocab().values(), default=-1)


def checked_ids(ids: Any, vocabulary: int, what: str) -> list[int]:
    """Return token ids as Python integers.

    Raise a `UserError` unless `ids` is a flat list of integers from 0 to `vocabulary - 1`. `what`: how the message
    names the ids.
    """
    if isinstance(ids, np.ndarray) or type(ids).__module__ == "torch":
        ids = ids.tolist()
    if not isinstance(ids, Sequence) or isinstance(ids, (str, bytes, bytearray, memoryview)):
        raise UserError(f"{what}", f"{shown(ids)} is not a list of token ids", "give a list of integers")
    found = list(ids)
    for index, token in enumerate(found):
        if type(token) is not int:
            if not isinstance(token, np.integer):
                raise UserError(
                    f"{what}", f"{shown(token)} at index {index} is not an integer", "give token ids as integers"
                )
            token = found[index] = int(token)
        if not 0 <= token < vocabulary:
            raise UserError(
                f"{what}",
                f"the token id {shown(token)} at index {index} is out of range",
                f"give ids from 0 to {vocabulary - 1}, for which the model has embeddings",
            )
    return found


def checked_response(
    response: Any, request: SamplingRequest, vocabulary: int, what: str, *, whole: bool, truncated: bool = False
) -> Response:
    """Return the response of a user's engine. Raise a `UserError` if the response is invalid.

    `whole`: refuse an unfinished response. `truncated`: require kept sets (the ids from which each token was sampled).
    `what`: the engine's name in messages.
    """

    def need(right: bool, problem: str, fix: str) -> None:
        if not right:
            raise UserError.of(f"{what} returned {problem}; {fix}")

    need(isinstance(response, Response), f"{type(response).__name__} as a response", "return a Response")
    tokens, logprobs = response.tokens, response.logprobs
    _need_array(what, "tokens", tokens, "iu", None)
    _need_array(what, "logprobs", logprobs, "f", len(tokens))
    checked_ids(tokens, vocabulary, f"{what} returned")
    wrong = ~(np.isfinite(logprobs) & (logprobs < ROUNDING))
    if wrong.any():
        need(False, f"{logprobs[wrong][0]} as a log-probability", "return finite log-probabilities of 0 or less")
    if response.versions is not None:
        _need_array(what, "versions", response.versions, "iu", len(tokens))
    if response.routes is not None:
        routes = checked_routes(response.routes, len(request.tokens) + len(tokens), f"a response that {what} returned")
        response = replace(response, routes=routes)
    if truncated and len(tokens) and request.key != GREEDY:
        need(
            response.kept is not None,
            "no kept sets (the ids from which each token was sampled)",
            "set Response.kept, because rollout.top_p, top_k or min_p is set",
        )
    if response.kept is not None:
        right = isinstance(response.kept, KeptSets) and len(response.kept) == len(tokens)
        need(
            right,
            "kept sets (the ids from which each token was sampled) of a wrong type or length",
            f"return padfree.kept_sets.KeptSets of {len(tokens)} tokens",
        )
        ids = response.kept.ids
        largest = int(np.where(ids < 0, -1 - ids, ids).max(initial=0))
        need(largest < vocabulary, f"the kept id {largest}", f"return ids from 0 to {vocabulary - 1}")
        right = bool(response.kept.contain(tokens).all())
        need(
            right,
            "a token that is not in its kept set (the ids left by top-k, top-p and min-p)",
            "return for each token the set of ids from which it was sampled",
        )
    need(isinstance(response.ended, (bool, np.bool_)), f"ended={shown(response.ended)}", "return true or false")
    fix = f"return 1 to {request.max_new_tokens} tokens"
    need(
        len(tokens) <= request.max_new_tokens,
        f"{len(tokens)} tokens, more than the {request.max_new_tokens} that were requested",
        fix,
    )
    if whole:
        unfinished = f"a response of {len(tokens)} tokens that has not ended"
        need(
            len(tokens) > 0 and response.is_whole(request.max_new_tokens),
            unfinished,
            f"{fix}, with a stop token at the end unless the response has the maximum length",
        )
    assert isinstance(response, Response)
    return response


def _need_array(what: str, name: str, array: Any, kinds: str, length: int | None) -> None:
    right = isinstance(array, np.ndarray) and array.ndim == 1 and array.dtype.kind in kinds
    if not right or (length is not None and len(array) != length):
        kind = f"{array.dtype}{list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
        number = "" if length is None else f" of {length}"
        expected = "integers" if kinds == "iu" else "floating-point numbers"
        raise UserError.of(f"{what} returned {name} as {kind}; return a flat numpy array{number} {expected}")
