"""Routes from servers: read as vLLM writes them, and refused in any other form."""

from __future__ import annotations

import asyncio
import base64
import io
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from padfree.rollout.engines.servers.routed_experts import RoutedLayers, read_routed_experts, routed_layers
from padfree.rollout.engines.servers.server_api import ServerLostError
from padfree.rollout.engines.vllm import VllmServer
from padfree.routes import is_unknown
from padfree.testing.models import build
from tests.refused import refused
from tests.rollout.vllm.test_http import REQUEST, SAMPLING, given, served_of
from tests.rollout.vllm.vllm_cases import FakeVllm, serving

LAYERS = RoutedLayers(numbers=(1, 2), num_layers=3, num_experts=256)


def encoded(array: np.ndarray) -> str:
    """As vLLM 0.24 encodes the experts of a completion."""
    buffer = io.BytesIO()
    np.save(buffer, array)
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def experts_of(num_tokens: int, *, dtype: type = np.uint8, top: int = 4, experts: int = 256) -> np.ndarray:
    """Layer 0 is dense: vLLM leaves its entries 0."""
    found = np.random.default_rng(num_tokens).random((num_tokens - 1, 3, experts)).argsort(-1)[..., :top]
    found[:, 0] = 0
    return found.astype(dtype)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_the_layers_with_experts(dtype: type) -> None:
    array = experts_of(9, dtype=dtype)
    array[4, 0] = 255
    array[2] = 0  # the server did not compute it
    routes = read_routed_experts(encoded(array), 9, LAYERS)
    assert routes.shape == (9, 2, 4)
    assert is_unknown(routes).tolist() == [False, False, True, *[False] * 5, True]
    known = ~is_unknown(routes)
    assert np.array_equal(routes[known], array[known[:-1], 1:].astype(np.int16))
    assert routes.max() > 200, "expert 255 is not taken for an unknown one"


@pytest.mark.parametrize(
    ("array", "about"),
    [
        (experts_of(8), "but must be"),
        (experts_of(9)[:, :2], "but must be"),
        (experts_of(9).astype(np.int32), "but must be"),
        (experts_of(9)[:, 0], "but must be"),
        (experts_of(9)[..., :1], "one expert per token"),
        (experts_of(9, dtype=np.uint16) + 256, "the model has only 256 experts"),
    ],
)
def test_other_formats(array: np.ndarray, about: str) -> None:
    with pytest.raises(ValueError, match=about):
        read_routed_experts(encoded(array), 9, LAYERS)


def test_layers_of_a_model() -> None:
    assert routed_layers(build("qwen3_moe")) == RoutedLayers((0, 1), 2, 4)
    assert routed_layers(build("deepseek_v3", first_k_dense_replace=1)) == RoutedLayers((1,), 2, 4)


def respond(fake: FakeVllm, **changes: Any) -> Any:
    sampling = replace(SAMPLING, **changes)
    with serving(fake) as (url,):
        server = VllmServer(url, 5.0)
        return asyncio.run(server.respond(REQUEST, sampling, model="policy", version=4, salt="run"))


def test_responses() -> None:
    fake = given(routed_experts=lambda number: encoded(experts_of(number)))
    response = respond(fake, routed=LAYERS)
    total = len(REQUEST.tokens) + len(response.tokens)
    assert np.array_equal(response.routes[:-1], experts_of(total)[:, 1:])
    assert respond(fake).routes is None, "nobody asked for them"
    for wrong in (None, "!", encoded(experts_of(3))):
        fake = given(routed_experts=lambda number, wrong=wrong: wrong)
        with pytest.raises(ServerLostError, match="did not return the experts of each token"):
            respond(fake, routed=LAYERS)


def test_servers_that_return_none_are_refused_before_a_run() -> None:
    served = served_of(returns_routes=True, vocabulary=50)
    with serving(FakeVllm()) as (url,), refused("rollout.routing", "--enable-return-routed-experts"):
        asyncio.run(VllmServer(url, 5.0).check(served))
    with serving(given(routed_experts=lambda number: "")) as (url,):
        assert asyncio.run(VllmServer(url, 5.0).check(served)) == "policy"
    command = VllmServer.command(["vllm", "serve"], served, name="policy", port=1)
    assert "--enable-return-routed-experts" in command
    assert "--enable-return-routed-experts" not in VllmServer.command(["vllm"], served_of(), name="policy", port=1)
