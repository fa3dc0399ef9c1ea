"""Decoding on a GPU: CUDA graphs sample the same tokens as the definition on the CPU, and never synchronise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from padfree.model.route_replay import RouteRecorder
from padfree.packing.collate import collate
from padfree.rollout import Response, SamplingRequest
from padfree.rollout.engines.in_process.cached_model import CachedModel
from padfree.rollout.engines.in_process.decode import Decoder
from padfree.rollout.engines.in_process.policy_model import PolicyModel
from padfree.rollout.engines.in_process.sampler import InProcessSampler
from padfree.sample import Sample
from padfree.testing.models import VOCABULARY, build
from tests.rollout.sampling_cases import STOPS, TEMPERATURE, assert_responses, by_definition, cached, group_requests
from tests.rollout.test_routes import assert_routes

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)


def make_decoder(model: PreTrainedModel, *, compiled: bool = False, **changes: Any) -> Decoder:
    settings: dict[str, Any] = {"num_slots": 20, "temperature": TEMPERATURE, "stops": STOPS, **changes}
    dtype = next(model.parameters()).dtype
    return Decoder(cached(model, device="cuda:0", dtype=dtype, compiled=compiled), **settings)


def on_gpu(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    return build(name, **changes).eval().to(CUDA, dtype)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gemma3", "gpt2", "opt"])
def test_graphs_sample_what_the_definition_samples(name: str, compiled: bool) -> None:
    requests = group_requests((6, 1, 3, 14, 2, 9, 40), group=5, max_new_tokens_each=(30, 12, 1, 20))
    definition = build(name).eval()
    expected = [by_definition(definition, request) for request in requests]
    decoder = make_decoder(on_gpu(name), compiled=compiled)
    assert_responses(decoder.sample(requests), expected)
    assert decoder.statistics.captures > 0
    assert_responses(decoder.sample(requests), expected)
    assert decoder.statistics.captures == 0, "the second call reuses all graphs"


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    ("name", "sizes"),
    [("gpt_oss", {}), ("qwen3_moe", {}), ("deepseek_v3", {"v_head_dim": 16}), ("mixtral", {}), ("glm4_moe", {})],
    ids=str,
)
def test_graphs_decode_experts(name: str, sizes: dict[str, int], compiled: bool) -> None:
    requests = group_requests((6, 1, 3, 14, 2, 9), group=5, max_new_tokens_each=(30, 12, 1, 20))
    definition = build(name, **sizes).eval()
    expected = [by_definition(definition, request) for request in requests]
    decoder = make_decoder(on_gpu(name, **sizes), compiled=compiled)
    assert decoder.captured
    assert_responses(decoder.sample(requests), expected)
    assert decoder.statistics.captures > 0


def test_steps_with_experts_do_not_wait_for_the_host() -> None:
    requests = group_requests((6, 3), group=10, max_new_tokens_each=(200,))
    decoder = make_decoder(on_gpu("qwen3_moe"), stops=(VOCABULARY,), captured=False)
    decoder.prepare(requests)
    decoder.sample(requests[:1])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        decoder.run_steps(5, 20)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_weights_that_change_in_place_are_seen_by_the_graphs() -> None:
    model = on_gpu("qwen3")
    decoder = make_decoder(model)
    requests = group_requests()
    before = decoder.sample(requests)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    after = decoder.sample(requests)
    assert decoder.statistics.captures == 0
    plain = build("qwen3").eval()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(1.1)
    assert_responses(after, [by_definition(plain, request) for request in requests])
    assert [one.tokens.tolist() for one in before] != [one.tokens.tolist() for one in after]


def test_steps_do_not_wait_for_the_host() -> None:
    requests = group_requests((6, 3), group=10, max_new_tokens_each=(200,))
    decoder = make_decoder(on_gpu("qwen3"), stops=(VOCABULARY,))
    decoder.prepare(requests)
    decoder.sample(requests[:1])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        decoder.run_steps(50, 20)
        status = decoder.copy_status()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert status.read().shape == (2, 21)


def test_weights_that_move_are_captured_again() -> None:
    model = on_gpu("qwen3")
    policy = PolicyModel(model, torch.float32, CUDA)
    sampler = InProcessSampler(policy, stops=STOPS, temperature=TEMPERATURE, batch_size=16)
    requests = group_requests()
    sampler.update_weights(model, 0)
    first = sampler.sample(requests)
    held = in_the_pool(sampler)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.data.clone() * 1.1
    sampler.update_weights(model, 1)
    second = sampler.sample(requests)
    assert [one.version for one in second] == [1] * len(requests)
    fresh = make_decoder(model, num_slots=16).sample(requests)
    assert [one.tokens.tolist() for one in second] == [one.tokens.tolist() for one in fresh]
    assert [one.tokens.tolist() for one in second] != [one.tokens.tolist() for one in first]
    assert held.tolist() == [0.0] * 8


def in_the_pool(sampler: InProcessSampler) -> torch.Tensor:
    """Memory of the graph pool that outlives the graphs, like the workspace of cuBLAS."""
    assert sampler._decoder is not None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=sampler._decoder._pool):
        held = torch.zeros(8, device=CUDA)
    graph.replay()
    return held


def trainer_logprobs(model: PreTrainedModel, request: SamplingRequest, response: Response) -> np.ndarray[Any, Any]:
    """Log-probabilities of one response by a forward pass of the stock model in its dtype, with the head in float32."""
    model.set_attn_implementation("eager")  # as in `by_definition`
    tokens = np.concatenate([request.tokens, response.tokens])
    row = torch.from_numpy(tokens).to(CUDA)[None]
    with torch.no_grad():
        logits = model(input_ids=row).logits[0].float() / TEMPERATURE
    batch = collate([Sample(tokens=tokens)])
    scores = torch.log_softmax(logits, -1).cpu()
    own = scores[:-1].gather(1, batch.labels[:-1, None])[:, 0]
    return own[len(request.tokens) - 1 :].numpy()


@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
def test_bfloat16_logprobs_are_near_those_of_a_forward_pass(name: str) -> None:
    """Layers are wider than in other tests, so that bfloat16 matters; the mean difference is within its rounding."""
    model = on_gpu(name, torch.bfloat16, hidden_size=256, intermediate_size=256)
    requests = group_requests((6, 1, 3, 14), group=8, max_new_tokens_each=(60,))
    responses = make_decoder(model, stops=(VOCABULARY,)).sample(requests)
    differences = np.concatenate(
        [
            np.abs(response.logprobs - trainer_logprobs(model, request, response))
            for request, response in zip(requests, responses, strict=True)
        ]
    )
    assert differences.mean() < 0.03
    assert differences.max() < 0.5


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "mixtral"])
def test_graphs_record_routes(name: str, compiled: bool) -> None:
    """In float32, each token of prompts and responses has the route of a plain forward pass on the CPU."""
    requests = group_requests((6, 1, 3, 14, 2, 9), group=5, max_new_tokens_each=(30, 12, 1, 20))
    policy = cached(on_gpu(name), device="cuda:0").model
    model = CachedModel(policy, compiled=compiled, recorder=RouteRecorder(policy))
    decoder = Decoder(model, num_slots=20, temperature=TEMPERATURE, stops=STOPS)
    assert decoder.captured
    for _ in range(2):
        assert_routes(build(name).eval(), requests, decoder.sample(requests))
