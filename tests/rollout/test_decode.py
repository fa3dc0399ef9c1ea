"""Decoding in slots samples the same tokens as the definition, with refilled slots, shared prompts and eviction."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from padfree.rollout import SamplingRequest, write_responses
from padfree.rollout.engines.in_process.cached_model import CachedModel, can_be_captured, unsupported_reason
from padfree.rollout.engines.in_process.decode import Decoder
from padfree.rollout.engines.in_process.decode_steps import slot_counts
from padfree.rollout.engines.in_process.kept_buffers import BURST
from padfree.testing.models import VOCABULARY
from tests.refused import refused
from tests.rollout.sampling_cases import (
    STOPS,
    TEMPERATURE,
    assert_responses,
    build,
    by_definition,
    cached,
    group_requests,
)


def make_decoder(model: CachedModel, **changes: Any) -> Decoder:
    settings: dict[str, Any] = {"num_slots": 4, "temperature": TEMPERATURE, "stops": STOPS, **changes}
    return Decoder(model, **settings)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gemma3", "gpt2", "opt", "gpt_oss", "deepseek_v3"])
def test_responses_are_those_of_the_definition(name: str) -> None:
    """Windows and soft caps in gemma2, sinks and experts in gpt_oss, values of a different size in deepseek."""
    model = build(name).eval()
    requests = group_requests(max_new_tokens_each=(9, 4, 1))
    expected = [by_definition(model, request) for request in requests]
    decoder = make_decoder(cached(model))
    assert_responses(decoder.sample(requests, version=7), expected)
    for response, request in zip(decoder.sample(requests, version=7), requests, strict=True):
        assert response.ended == (int(response.tokens[-1]) in STOPS)
        assert response.ended or len(response.tokens) == request.max_new_tokens
        assert response.version == 7
        assert response.logprobs.dtype == np.float32
        assert response.tokens.dtype == np.int64


def test_the_same_as_with_the_cache_of_transformers() -> None:
    model = build("qwen3").eval()
    requests = group_requests((6, 1, 3, 14, 2, 9), group=4, max_new_tokens_each=(12, 5, 20))
    expected = write_responses(model, requests, temperature=TEMPERATURE, stops=STOPS, batch_size=7)
    for num_slots in (1, 5, 64):
        found = make_decoder(cached(model), num_slots=num_slots).sample(requests)
        assert_responses(found, [(one.tokens.tolist(), one.logprobs.tolist()) for one in expected])
        assert [one.ended for one in found] == [one.ended for one in expected]


def test_a_prompt_is_prefilled_once() -> None:
    requests = group_requests((6, 1, 14), group=5)
    decoder = make_decoder(cached(build("qwen3")), num_slots=2)
    decoder.sample(requests)
    assert decoder.statistics.prefilled == 5 + 0 + 13


def test_occupied_slots_are_compacted() -> None:
    """One long response among short ones takes few slots once the short ones have ended."""
    requests = group_requests((3,) * 8, group=1, max_new_tokens_each=(40, 2, 2, 2))
    decoder = make_decoder(cached(build("qwen3")), num_slots=8, stops=(VOCABULARY,))
    lengths = [len(response.tokens) for response in decoder.sample(requests)]
    assert lengths == [40, 2, 2, 2] * 2
    assert decoder.statistics.steps == 40
    first = BURST
    assert decoder.statistics.slot_steps == 8 * first + 2 * (40 - first)


@pytest.mark.parametrize("capacity", [23, 30, 47, 200])
def test_a_small_cache_takes_more_steps_and_samples_the_same(capacity: int) -> None:
    """23 entries are what the longest prompt with its response needs."""
    model = build("llama")
    requests = group_requests((6, 1, 3, 14, 2, 9, 11, 13), group=3, max_new_tokens_each=(9, 10, 4))
    expected = make_decoder(cached(model), num_slots=16).sample(requests)
    cached_model = cached(model)
    token_bytes = sum(shape.token_bytes for shape in cached_model.layer_shapes())
    decoder = make_decoder(cached_model, num_slots=16, cache_bytes=capacity * token_bytes)
    assert_responses(decoder.sample(requests), [(one.tokens.tolist(), one.logprobs.tolist()) for one in expected])
    assert decoder._buffers is not None
    assert decoder._buffers.cache.capacity <= capacity
    with refused("rollout.kv_cache_memory"):
        make_decoder(cached_model, cache_bytes=22 * token_bytes).sample(requests)


def test_buffers_are_kept_and_grow() -> None:
    model = build("qwen3").eval()
    decoder = make_decoder(cached(model))
    few, many = group_requests((3, 4), group=2), group_requests((30, 8), group=2, max_new_tokens_each=(15,))
    expected = [[by_definition(model, request) for request in requests] for requests in (few, many)]
    kept = []
    for which in (0, 0, 1, 0, 1):
        assert_responses(decoder.sample((few, many)[which]), expected[which])
        kept.append(decoder._buffers)
    assert kept[0] is kept[1]
    assert kept[1] is not kept[2]
    assert kept[2] is kept[3] is kept[4]


def test_weights_that_change_in_place_are_seen() -> None:
    model = build("qwen3").eval()
    decoder = make_decoder(cached(model))
    requests = group_requests()
    before = decoder.sample(requests)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    after = decoder.sample(requests)
    assert_responses(after, [by_definition(model, request) for request in requests])
    assert [one.tokens.tolist() for one in before] != [one.tokens.tolist() for one in after]


def test_compiled_layers_sample_the_same() -> None:
    model = build("qwen3", num_hidden_layers=1).eval()
    requests = group_requests()
    decoder = make_decoder(cached(model, compiled=True), num_slots=2)
    assert_responses(decoder.sample(requests), [by_definition(model, request) for request in requests])


def test_progress_ends_with_all_responses() -> None:
    seen: list[int] = []
    responses = make_decoder(cached(build("qwen3"))).sample(group_requests(), on_progress=seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == len(responses)


def test_nothing_to_sample_and_one_token_that_ends() -> None:
    decoder = make_decoder(cached(build("qwen3")), stops=range(VOCABULARY))
    assert decoder.sample([]) == []
    (response,) = decoder.sample([SamplingRequest(tokens=np.array([3]), max_new_tokens=1, key=5)])
    assert len(response.tokens) == 1
    assert response.ended


def test_what_cannot_be_decoded_or_captured() -> None:
    assert unsupported_reason(build("qwen3")) is None
    assert can_be_captured(build("qwen3"))
    assert can_be_captured(build("qwen3_moe")), "its experts are stacked weights"
    unstacked = build("qwen3")
    unstacked.config.num_experts = 4
    assert not can_be_captured(unstacked), "its experts are not stacked weights"
    dynamic = build("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    assert unsupported_reason(dynamic) == "the model's rotary frequencies depend on the longest response in the batch"


def test_slot_counts() -> None:
    assert slot_counts(256) == [256, 128, 64, 32, 16]
    assert slot_counts(40) == [40, 20]
    assert slot_counts(3) == [3]
