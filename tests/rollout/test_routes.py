"""Both samplers record the route of each token: prompt and response, whatever shares the batch."""

from __future__ import annotations

from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from padfree.model.route_replay import RouteRecorder
from padfree.rollout import Response, SamplingRequest
from padfree.rollout.engines.in_process.cached_model import CachedModel
from padfree.rollout.engines.in_process.decode import Decoder
from padfree.rollout.engines.in_process.hf_cache import USES, write_responses
from padfree.routes import is_unknown, route_dtype
from padfree.testing.models import build
from tests.rollout.sampling_cases import STOPS, TEMPERATURE, cached, group_requests

FAMILIES = ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "glm4_moe"]


def routes_of(model: PreTrainedModel, recorder: RouteRecorder, tokens: np.ndarray) -> np.ndarray:
    """The routes of a plain forward pass over the whole sequence."""
    recorder.clear()
    with torch.no_grad():
        model(input_ids=torch.from_numpy(tokens.astype(np.int64))[None])
    return recorder.take().numpy()


def assert_routes(model: PreTrainedModel, requests: list[SamplingRequest], responses: list[Response]) -> None:
    model.set_attn_implementation("eager")
    recorder = RouteRecorder(model)
    for request, response in zip(requests, responses, strict=True):
        tokens = np.concatenate([request.tokens, response.tokens])
        assert response.routes is not None
        assert response.routes.shape[0] == len(tokens)
        assert response.routes.dtype == route_dtype(4)
        assert is_unknown(response.routes).tolist() == [False] * (len(tokens) - 1) + [True]
        expected = routes_of(model, recorder, tokens)
        assert (np.sort(response.routes[:-1]) == np.sort(expected[:-1])).all()


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", FAMILIES)
def test_the_cache_of_transformers(name: str, use: str) -> None:
    model = build(name).eval()
    recorder = RouteRecorder(model)
    requests = group_requests()
    options = {"temperature": TEMPERATURE, "stops": STOPS, "batch_size": 4, "use": use}
    responses = write_responses(model, requests, **options, recorder=recorder)
    plain = write_responses(model, requests, **options)
    assert [one.tokens.tolist() for one in responses] == [one.tokens.tolist() for one in plain]
    assert all(one.routes is None for one in plain)
    assert_routes(build(name).eval(), requests, responses)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_decoder(name: str) -> None:
    sizes = {"v_head_dim": 16} if name == "deepseek_v3" else {}
    model = build(name, **sizes).eval()
    policy = cached(model).model
    decoder = Decoder(
        CachedModel(policy, recorder=RouteRecorder(policy)), num_slots=4, temperature=TEMPERATURE, stops=STOPS
    )
    requests = group_requests(max_new_tokens_each=(9, 1, 4))
    for _ in range(2):
        assert_routes(build(name, **sizes).eval(), requests, decoder.sample(requests))


def test_compiled_layers_record_routes() -> None:
    policy = cached(build("qwen3_moe", num_hidden_layers=1).eval()).model
    with mock.patch("torch.compile", partial(torch.compile, backend="aot_eager")):
        model = CachedModel(policy, compiled=True, recorder=RouteRecorder(policy))
    decoder = Decoder(model, num_slots=2, temperature=TEMPERATURE, stops=STOPS)
    requests = group_requests((6, 3))
    for _ in range(2):
        assert_routes(build("qwen3_moe", num_hidden_layers=1).eval(), requests, decoder.sample(requests))
