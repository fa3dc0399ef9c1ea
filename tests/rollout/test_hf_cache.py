"""Sampling from HF models: tokens follow the softmax of the model, independent of the rest of the batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

from padfree import attach
from padfree.rollout import Response, SamplingRequest, stop_tokens, write_responses
from padfree.rollout.engines.in_process.hf_cache import cache_use
from padfree.rollout.engines.in_process.policy_model import PolicyModel
from padfree.rollout.engines.in_process.sampler import InProcessSampler
from padfree.rollout.sampling_rng import gumbel_noise, response_keys
from padfree.testing.models import VOCABULARY, build
from tests.refused import refused
from tests.rollout.rollout_cases import letters_tokenizer
from tests.rollout.sampling_cases import assert_responses

MAX_NEW_TOKENS = 9
STOPS = (2, 5, 11, 40)
LENGTHS = (6, 1, 3, 6, 14, 2)


def requests_of(lengths: tuple[int, ...] = LENGTHS, *, max_new_tokens: int = MAX_NEW_TOKENS) -> list[SamplingRequest]:
    generator = np.random.default_rng(0)
    keys = response_keys(1, 2, np.arange(len(lengths)))
    return [
        SamplingRequest(tokens=generator.integers(0, VOCABULARY, length), max_new_tokens=max_new_tokens, key=int(key))
        for length, key in zip(lengths, keys, strict=True)
    ]


def write(model: PreTrainedModel, requests: list[SamplingRequest], **changes: Any) -> list[Response]:
    settings: dict[str, Any] = {"temperature": 0.7, "stops": STOPS, "batch_size": 4, **changes}
    return write_responses(model.eval(), requests, **settings)


@torch.no_grad()
def by_definition(
    model: PreTrainedModel, request: SamplingRequest, temperature: float
) -> tuple[list[int], list[float]]:
    """Sample one token after the other, without a cache and without padding."""
    tokens, logprobs = [int(token) for token in request.tokens], []
    for position in range(request.max_new_tokens):
        logits = model(input_ids=torch.tensor([tokens])).logits[0, -1].float()
        scores = torch.log_softmax(logits / temperature, 0)
        token = int((scores + gumbel_noise(torch.tensor([request.key]), position, len(scores))[0]).argmax())
        tokens.append(token)
        logprobs.append(float(scores[token]))
        if token in STOPS:
            break
    return tokens[len(request.tokens) :], logprobs


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "gpt2", "opt"])
def test_responses_are_those_of_the_definition(name: str) -> None:
    """Windows of 5 in gemma3, learned positions in gpt2 and opt; prompts of one or more tokens in one batch."""
    model = build(name).eval()
    requests = requests_of()
    expected = [by_definition(model, request, 0.7) for request in requests]
    for batch_size in (1, 4, 64):
        written = write(model, requests, batch_size=batch_size)
        for (tokens, logprobs), response in zip(expected, written, strict=True):
            assert response.tokens.tolist() == tokens
            np.testing.assert_allclose(response.logprobs, logprobs, atol=2e-4)
            assert response.ended == (tokens[-1] in STOPS)
            assert response.ended or len(tokens) == MAX_NEW_TOKENS


def test_each_request_has_its_own_max_new_tokens() -> None:
    model = build("qwen3")
    max_new_tokens_each = (1, 4, MAX_NEW_TOKENS)
    requests = [
        SamplingRequest(tokens=request.tokens, max_new_tokens=max_new_tokens, key=request.key)
        for request, max_new_tokens in zip(requests_of((5, 5, 5)), max_new_tokens_each, strict=True)
    ]
    whole = write(model, requests_of((5, 5, 5)), stops=(VOCABULARY,))
    for max_new_tokens, cut, long in zip(
        max_new_tokens_each, write(model, requests, stops=(VOCABULARY,)), whole, strict=True
    ):
        assert cut.tokens.tolist() == long.tokens[:max_new_tokens].tolist()
        assert len(cut.tokens) == len(cut.logprobs) == max_new_tokens
        assert not cut.ended


def test_one_token_that_ends() -> None:
    model = build("qwen3")
    (response,) = write(model, requests_of((3,), max_new_tokens=1), stops=range(VOCABULARY))
    assert len(response.tokens) == 1
    assert response.ended


def test_nothing_to_write() -> None:
    assert write(build("qwen3"), []) == []


def test_bfloat16_reports_float32_logprobs() -> None:
    responses = write(build("qwen3").to(torch.bfloat16), requests_of())
    assert all(response.logprobs.dtype == np.float32 for response in responses)
    assert all((response.logprobs < 0).all() for response in responses)


def test_what_ends_a_response() -> None:
    model, tokenizer = build("qwen3"), letters_tokenizer()
    assert model.generation_config.eos_token_id == 2
    assert stop_tokens(tokenizer, model) == (0,), "2 is a letter of this tokenizer"
    model.generation_config = GenerationConfig(eos_token_id=[1, 7])
    assert stop_tokens(tokenizer, model) == (0, 1), "<unk> is a special token, 7 is not"
    model.generation_config = GenerationConfig()
    assert stop_tokens(tokenizer, model) == (0,)
    with refused("model.tokenizer"):
        stop_tokens(letters_tokenizer(eos=None), model)


@pytest.mark.filterwarnings("ignore:.*sampled very slowly")
@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("qwen3", "padded"),
        ("qwen3_next", "padded"),
        ("llama4", "equal lengths"),
        ("minimax", "equal lengths"),
        ("nemotron_h", "none"),
        ("mamba", "none"),
    ],
)
def test_layers_with_a_state_sample_what_the_definition_samples(name: str, use: str) -> None:
    """If padding affects the state, or a cached step differs from a pass over the whole sequence, it is not used."""
    model = attach(build(name)).eval()
    sampler = InProcessSampler(
        PolicyModel(model, torch.float32, torch.device("cpu")), stops=STOPS, temperature=0.7, batch_size=4
    )
    assert cache_use(model) == use
    sampler.update_weights(model, 0)
    requests = requests_of((6, 1, 6, 14))
    stock = build(name).eval()
    expected = [by_definition(stock, request, 0.7) for request in requests]
    assert_responses(sampler.sample(requests), expected)


def test_sampling_without_a_cache_warns() -> None:
    policy = PolicyModel(build("mamba"), torch.float32, torch.device("cpu"))
    with pytest.warns(UserWarning, match="MambaForCausalLM is sampled very slowly, without a KV cache"):
        InProcessSampler(policy, stops=STOPS, temperature=1.0, batch_size=2)


@pytest.mark.parametrize(("name", "reason"), [("lfm2", "has a recurrent state"), ("llama4", "counts positions")])
def test_models_with_another_state_are_not_decoded_with_a_kv_cache(name: str, reason: str) -> None:
    policy = PolicyModel(attach(build(name)), torch.float32, torch.device("cpu"))
    assert reason in (policy.state_obstacle or "")
