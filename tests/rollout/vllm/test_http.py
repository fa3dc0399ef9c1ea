"""Every wrong answer of a server is a one-line error; some can be retried on another server."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from padfree.config import ModelConfig
from padfree.rollout.base import Response, SamplingRequest
from padfree.rollout.engines.servers.canary import TEXT
from padfree.rollout.engines.servers.server_api import RestartedError, SamplingSettings, ServedModel, ServerLostError
from padfree.rollout.engines.servers.start import check_servers
from padfree.rollout.engines.vllm import VllmServer
from tests.rollout.rollout_cases import letters_tokenizer
from tests.rollout.vllm.vllm_cases import FakeVllm, serving, unused_url

SAMPLING = SamplingSettings(temperature=0.7, stops=(0,), vocabulary=50)
REQUEST = SamplingRequest(tokens=np.array([3, 4, 5]), max_new_tokens=6, key=-77)


def complete(url: str, *, timeout: float = 5.0, request: SamplingRequest = REQUEST) -> Response:
    server = VllmServer(url, timeout)
    return asyncio.run(server.respond(request, SAMPLING, model="policy", version=4, salt="run"))


def given(version: str = "4", **changes: Any) -> FakeVllm:
    fake = FakeVllm()
    fake.version = version
    for name, value in changes.items():
        setattr(fake, name, value)
    return fake


def test_a_response_and_what_is_asked_for() -> None:
    fake = given()
    with serving(fake) as (url,):
        first, again = complete(url), complete(url)
        other = complete(url, request=SamplingRequest(tokens=REQUEST.tokens, max_new_tokens=6, key=5))
    assert first.tokens.tolist() == again.tokens.tolist() != other.tokens.tolist(), "the key is the seed"
    assert first.version == 4
    assert first.tokens.dtype == np.int64
    assert first.logprobs.dtype == np.float32
    np.testing.assert_allclose(first.logprobs, -np.log(50), rtol=1e-6)
    assert first.ended == (first.tokens[-1] == 0)
    assert first.ended or len(first.tokens) == 6
    (body, *_) = fake.completed
    assert body["prompt"] == [3, 4, 5]
    assert 0 <= body["seed"] < 1 << 63
    expected = {"max_tokens": 6, "temperature": 0.7, "top_p": 1.0, "min_p": 0.0, "stop_token_ids": [0]}
    expected |= {"cache_salt": "run 4", "return_token_ids": True, "ignore_eos": True, "logprobs": 0}
    expected["top_k"] = (1 << 31) - 1  # every id
    assert body.items() >= expected.items()
    assert fake.calls[:3] == ["/weight_info", "/v1/completions", "/weight_info"]


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        ("500", r"/v1/completions answered 500 \(EngineCore encountered an issue\)"),
        ("half", "/v1/completions returned 0 of 1 responses"),
        ("malformed", "/v1/completions did not answer with JSON"),
        ("list", "/v1/completions returned list instead of a JSON object"),
        ("cut", "/v1/completions broke the connection"),
        ("abort", "/v1/completions ended a response with reason 'abort'"),
        ("short", r"did not return token ids and log-probabilities \(5 tokens and 6 log-probabilities\)"),
        ("logprobs", r"did not return token ids and log-probabilities \(log-probabilities that are above 0"),
        ("other model", "answered for the model 'another', not 'policy'"),
    ],
)
def test_errors_that_another_server_can_answer(fault: str, line: str) -> None:
    request = SamplingRequest(tokens=REQUEST.tokens, max_new_tokens=6, key=5)
    with serving(given(fault=fault)) as (url,), pytest.raises(ServerLostError, match=line) as caught:
        assert not complete(url, request=request).ended
    assert str(caught.value).startswith(f"rollout.servers: {url} ")
    assert "\n" not in str(caught.value)


def test_a_server_that_hangs_refuses_or_has_restarted() -> None:
    with serving(given(fault="hang")) as (url,), pytest.raises(ServerLostError, match=r"did not answer within 0.3 s"):
        complete(url, timeout=0.3)
    with pytest.raises(ServerLostError, match="refused the connection"):
        complete(unused_url())
    with serving(given("default")) as (url,), pytest.raises(RestartedError, match="has restarted"):
        complete(url)


class Answers(FakeVllm):
    """A server that gives the same answer to every request."""

    def __init__(self, status: int, answer: Any) -> None:
        super().__init__(vocabulary=46)
        self.everything = status, answer

    def answer(self, path: str, body: dict[str, Any], query: str = "") -> tuple[int, Any]:
        return self.everything


@pytest.mark.parametrize(
    ("status", "answer", "line"),
    [
        (500, ["a", "list"], r'/weight_info answered 500 \(\["a", "list"\]\)'),
        (500, None, r"/weight_info answered 500 \(null\)"),
        (502, b"<html>\nbad gateway</html>", r"/weight_info answered 502 \(<html> bad gateway</html>\)"),
        (500, {"error": {"code": 3}}, r"/weight_info answered 500 \(\{'code': 3\}\)"),
        (200, b"<html>\nwelcome; to</html>", r"/weight_info did not answer with JSON"),
        (200, {}, r"/weight_info returned \{\}, which has no weight_version"),
    ],
)
def test_answers_of_a_server_that_is_not_vllm(status: int, answer: Any, line: str) -> None:
    with serving(Answers(status, answer)) as (url,):
        with pytest.raises(ServerLostError, match=line) as caught:
            asyncio.run(VllmServer(url, 5.0).version())
        assert "\n" not in str(caught.value)
        with pytest.raises(ValueError, match=rf"{line}.*; start the server, or correct rollout.servers$") as caught:
            asyncio.run(check_servers([VllmServer(url, 5.0)], served_of()))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("answer", [{}, {"data": 3}, {"data": []}, {"data": [{"name": "policy"}]}])
def test_incomplete_answers(answer: Any) -> None:
    with serving(Answers(200, answer)) as (url,):
        with pytest.raises(ServerLostError, match="/v1/models names no model"):
            asyncio.run(VllmServer(url, 5.0).models())
        with pytest.raises(ServerLostError, match=r"/get_world_size returned .*, which has no world_size"):
            asyncio.run(VllmServer(url, 5.0).workers())


def test_choices_without_an_index() -> None:
    choices = [{"index": None}, {"index": 0}]
    fake = Answers(200, {"model": "policy", "choices": choices})
    with serving(fake) as (url,), pytest.raises(ServerLostError, match="returned 2 of 2 responses"):
        asyncio.run(
            VllmServer(url, 5.0).score([[1, 2], [3, 4]], num_sampled=1, temperature=1.0, model="policy", salt="run")
        )


def test_a_route_that_does_not_answer_with_json() -> None:
    """The routes for adapters do so."""
    with serving(FakeVllm()) as (url,):
        asyncio.run(VllmServer(url, 5.0).tell("/v1/unload_lora_adapter", {"lora_name": "policy"}, fix="enable it"))
        with pytest.raises(ValueError, match="has no route /v1/load_lora_adapter; enable it"):
            asyncio.run(VllmServer(url, 5.0).tell("/v1/load_lora_adapter", {}, fix="enable it"))


def test_errors_that_only_the_user_can_fix() -> None:
    with (
        serving(given("3")) as (url,),
        pytest.raises(ValueError, match="serves policy version '3', not 4; make sure that no other"),
    ):
        complete(url)
    sampling = SamplingSettings(temperature=1.0, stops=(), vocabulary=1)
    with (
        serving(given()) as (url,),
        pytest.raises(ValueError, match=r"sampled token \d+, but the vocabulary size is 1; start the server"),
    ):
        asyncio.run(VllmServer(url, 5.0).respond(REQUEST, sampling, model="policy", version=4, salt="run"))
    line = r"ends responses at token \d+, .*; start the server with --generation-config vllm"
    with serving(given(stops=tuple(range(1, 50)))) as (url,), pytest.raises(ValueError, match=line):
        complete(url, request=SamplingRequest(tokens=REQUEST.tokens, max_new_tokens=6, key=5))
    with serving(given(max_model_len=8)) as (url,), pytest.raises(ValueError, match=r"rejected /v1/completions \(400"):
        complete(url)


# Before a run


def served_of(*, path: str = "model", **changes: Any) -> ServedModel:
    given = ServedModel(
        model=ModelConfig(path=path),
        lora_rank=0,
        adapted=(),
        vocabulary=46,
        temperature=1.0,
        text=TEXT,
        tokens=letters_tokenizer()(TEXT, add_special_tokens=False)["input_ids"],
    )
    return replace(given, **changes)


def check(fake: FakeVllm, *, temperature: float = 1.0) -> str:
    with serving(fake) as (url,):
        return asyncio.run(VllmServer(url, 5.0).check(served_of(temperature=temperature)))


def test_a_server_for_this_run() -> None:
    assert check(FakeVllm(vocabulary=46, tokenizer=letters_tokenizer(), name="some name")) == "some name"
    assert check(FakeVllm(vocabulary=46)) == "policy", "a server without a tokenizer passes the check"


class OtherTokenizer:
    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": letters_tokenizer()(text)["input_ids"][::-1]}


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"vocabulary": 45}, "rejects token 45, but the model of this run has 46 tokens; start the server with"),
        ({"vocabulary": 47}, "accepts token 46, but the model of this run has 46 tokens; start the server with"),
        (
            {"tokenizer": OtherTokenizer()},
            "has a different tokenizer than this run; start the server with the model of model.path",
        ),
        ({"backend": "nccl"}, "has the weight transfer backend 'nccl'; start the server with VLLM_SERVER_DEV"),
        ({"missing": {"/weight_info"}}, "has no route /weight_info; start the server with VLLM_SERVER_DEV_MODE=1"),
        ({"missing": {"/v1/models"}}, "has no route /v1/models; set the URL of a vLLM server"),
    ],
)
def test_a_server_of_something_else(changes: dict[str, Any], line: str) -> None:
    fake = FakeVllm(vocabulary=46)
    for name, value in changes.items():
        setattr(fake, name, value)
    with pytest.raises(ValueError, match=line) as caught:
        check(fake)
    assert "\n" not in str(caught.value)


def test_servers_with_different_names_for_the_model() -> None:
    with serving(*(FakeVllm(vocabulary=46, name=name) for name in ("this", "that"))) as urls:
        line = "different names for the model: that, this; start all servers with the same --served-model-name"
        with pytest.raises(ValueError, match=line):
            asyncio.run(check_servers([VllmServer(url, 5.0) for url in urls], served_of()))


def test_logprobs_that_ignore_the_temperature() -> None:
    fake = FakeVllm(vocabulary=46)
    fake.logprobs_mode = "raw_logprobs"
    assert check(fake) == "policy", "at temperature 1 both modes are equal"
    with pytest.raises(
        ValueError, match=r"has logprobs_mode=raw_logprobs, which ignores loss.temperature \(0.5\); start"
    ):
        check(fake, temperature=0.5)
