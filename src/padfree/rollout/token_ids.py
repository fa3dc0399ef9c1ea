"""Token ids and responses from outside, checked where they come in.

    an agent's call        prompt: [1, 2, 999999]          400, and the episode goes on       (environment.gateway)
    an environment         policy.add([999999])            the episode fails                  (environment.policy)
    text of either         a tokenizer may know more tokens than the model has embeddings     (environment.policy)
    a user's engine        Response(tokens=[-1], ...)      the run ends with one line         (engines)
    a server               "token_ids": [true]             the server is asked again          (engines.servers)

An id that is not an index of the embedding matrix ends a GPU process without a usable message, so no such id may get
into a batch. Indices that no token of the tokenizer has (rows that pad the matrix) are allowed: the policy can sample
them, and a program may send back what was sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from padfree.data.records import shown
from padfree.errors import UserError
from padfree.rollout.base import Response, SamplingRequest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROUNDING = 1e-3
"""How far above 0 a log-probability may be: samplers compute them in low precision."""


def vocabulary_of(model: PreTrainedModel) -> int:
    """Rows of the embedding matrix."""
    embeddings = model.get_input_embeddings()
    return int(getattr(embeddings, "num_embeddings", None) or model.config.get_text_config().vocab_size)


def tokenizer_size(tokenizer: Any) -> int:
    """One more than the largest token id that a tokenizer can write."""
    return 1 + max(tokenizer.get_vocab().values(), default=-1)


def checked_ids(ids: Any, vocabulary: int, what: str) -> list[int]:
    """The ids as Python integers. Anything but a flat sequence of integers from 0 to `vocabulary - 1` is refused."""
    if isinstance(ids, np.ndarray) or type(ids).__module__ == "torch":
        ids = ids.tolist()
    if not isinstance(ids, Sequence) or isinstance(ids, (str, bytes, bytearray, memoryview)):
        raise UserError(f"{what}", f"{shown(ids)}", "give a list of token ids")
    found = list(ids)
    for index, token in enumerate(found):
        if type(token) is not int:
            if not isinstance(token, np.integer):
                raise UserError(f"{what}", f"{shown(token)} at index {index}", "give token ids, which are integers")
            token = found[index] = int(token)
        if not 0 <= token < vocabulary:
            raise UserError(
                f"{what}",
                f"token id {shown(token)} at index {index}",
                f"give ids from 0 to {vocabulary - 1}, which the model has embeddings for",
            )
    return found


def checked_response(response: Any, request: SamplingRequest, vocabulary: int, what: str, *, whole: bool) -> Response:
    """The response of an engine that is not padfree's own. `whole`: it has ended, or has filled its room."""

    def need(right: bool, fact: str, cure: str) -> None:
        if not right:
            raise UserError.of(f"{what} returned {fact}; {cure}")

    need(isinstance(response, Response), f"{type(response).__name__} as a response", "return a Response")
    tokens, logprobs = response.tokens, response.logprobs
    _need_array(what, "tokens", tokens, "iu", None)
    _need_array(what, "logprobs", logprobs, "f", len(tokens))
    checked_ids(tokens, vocabulary, f"{what} returned")
    wrong = ~(np.isfinite(logprobs) & (logprobs < ROUNDING))
    if wrong.any():
        need(False, f"{logprobs[wrong][0]} as a log-probability", "return finite numbers of 0 or less")
    if response.versions is not None:
        _need_array(what, "versions", response.versions, "iu", len(tokens))
    need(isinstance(response.ended, (bool, np.bool_)), f"ended={shown(response.ended)}", "return true or false")
    cure = f"return 1 to {request.max_new_tokens} tokens"
    need(
        len(tokens) <= request.max_new_tokens,
        f"{len(tokens)} tokens where {request.max_new_tokens} were asked for",
        cure,
    )
    if whole:
        unfinished = f"a response of {len(tokens)} tokens that has not ended"
        need(
            len(tokens) > 0 and response.is_whole(request.max_new_tokens),
            unfinished,
            f"{cure}, the last one a stop token",
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
