"""Requests and models for the tests of samplers, and a slow reference sampler."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from padfree.rollout import Response, SamplingRequest
from padfree.rollout.engines.in_process.cached_model import CachedModel
from padfree.rollout.engines.in_process.policy_model import PolicyModel
from padfree.rollout.sampling_rng import gumbel_noise, response_keys
from padfree.testing.models import VOCABULARY, build

STOPS = (2, 5, 11, 40)
TEMPERATURE = 0.7


def group_requests(
    lengths: Sequence[int] = (6, 1, 3, 14, 2),
    *,
    group: int = 3,
    max_new_tokens_each: Sequence[int] = (9,),
    seed: int = 0,
) -> list[SamplingRequest]:
    """`group` adjacent requests for each prompt of these lengths; the values of `max_new_tokens` alternate."""
    generator = np.random.default_rng(seed)
    prompts = [generator.integers(0, VOCABULARY, length) for length in lengths for _ in range(1)]
    keys = response_keys(1, 2, np.arange(len(prompts) * group))
    return [
        SamplingRequest(
            tokens=prompts[number // group],
            max_new_tokens=max_new_tokens_each[number % len(max_new_tokens_each)],
            key=int(key),
        )
        for number, key in enumerate(keys)
    ]


@torch.no_grad()
def by_definition(
    model: PreTrainedModel, request: SamplingRequest, *, temperature: float = TEMPERATURE, stops: Sequence[int] = STOPS
) -> tuple[list[int], list[float]]:
    """Sample one token after the other, without a cache and without padding."""
    model.set_attn_implementation("eager")  # some versions of sdpa ignore the soft cap
    tokens, logprobs = [int(token) for token in request.tokens], []
    for position in range(request.max_new_tokens):
        logits = model(input_ids=torch.tensor([tokens])).logits[0, -1].float()
        scores = torch.log_softmax(logits / temperature, 0)
        token = int((scores + gumbel_noise(torch.tensor([request.key]), position, len(scores))[0]).argmax())
        tokens.append(token)
        logprobs.append(float(scores[token]))
        if token in stops:
            break
    return tokens[len(request.tokens) :], logprobs


def cached(
    model: PreTrainedModel, *, device: str = "cpu", dtype: torch.dtype = torch.float32, compiled: bool = False
) -> CachedModel:
    """A `CachedModel` with the weights of `model`."""
    policy = PolicyModel(model, dtype, torch.device(device))
    policy.update(model)
    return CachedModel(policy.model, compiled=compiled)


def assert_responses(found: Sequence[Response], expected: Sequence[tuple[list[int], list[float]]]) -> None:
    for response, (tokens, logprobs) in zip(found, expected, strict=True):
        assert response.tokens.tolist() == tokens
        np.testing.assert_allclose(response.logprobs, logprobs, atol=2e-4)


__all__ = ["STOPS", "TEMPERATURE", "assert_responses", "build", "by_definition", "cached", "group_requests"]
