"""Truncated sampling on vLLM servers: the options of a request, the kept sets of the answer, and whole runs."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from padfree.kept_sets import KeptSets
from padfree.rollout.base import Response, SamplingRequest
from padfree.rollout.engines.servers.read_kept_sets import read_kept_sets
from padfree.rollout.engines.servers.sampler import rest_of
from padfree.rollout.engines.servers.server_api import SamplingSettings, ServerLostError
from padfree.rollout.engines.vllm import COMPLETIONS, GENERATE, VllmServer
from padfree.rollout.sampling_rng import GREEDY
from padfree.rollout.truncation import Truncation
from padfree.train.run import train
from tests.refused import refused
from tests.rollout.vllm.test_ahead import Holding, taken
from tests.rollout.vllm.test_http import served_of
from tests.rollout.vllm.test_run import SAMPLES, fake_of, lines, make_config, model_folder
from tests.rollout.vllm.vllm_cases import FakeVllm, kept_ids, serving

__all__ = ["model_folder", "taken"]  # fixtures
VOCABULARY, TEMPERATURE, STOPS = 50, 0.7, (0, 3)
REQUEST = SamplingRequest(tokens=np.array([3, 4, 5]), max_new_tokens=12, key=7)
RULES = {
    "top-k": Truncation(top_k=4),
    "top-p": Truncation(top_p=0.6),
    "min-p": Truncation(min_p=0.3),
    "all": Truncation(top_k=9, top_p=0.9, min_p=0.05, min_new_tokens=4),
    "nearly all": Truncation(top_p=0.999, min_new_tokens=4),
}


class Table(FakeVllm):
    """Logits that depend on the token before and on its index."""

    def _logits(self, tokens: list[int]) -> torch.Tensor:
        rows = [torch.Generator().manual_seed(100 * index + token) for index, token in enumerate(tokens)]
        return torch.stack([torch.randn(self.vocabulary, generator=row) for row in rows])


def table(**changes: Any) -> Table:
    fake = Table(vocabulary=VOCABULARY)
    fake.version, fake.returns_kept = "4", True
    for name, value in changes.items():
        setattr(fake, name, value)
    return fake


def respond(fake: FakeVllm, rule: Truncation, request: SamplingRequest = REQUEST, *, cut: bool = False) -> Response:
    sampling = SamplingSettings(TEMPERATURE, STOPS, VOCABULARY, truncation=rule)
    with serving(fake) as (url,):
        server = VllmServer(url, 20.0)
        return asyncio.run(server.respond(request, sampling, model="policy", version=4, salt="run", cut=cut))


def ids_of(sets: KeptSets) -> list[set[int]]:
    every = set(range(VOCABULARY))
    return [every - {-1 - one for one in ids} if not ids or ids[0] < 0 else set(ids) for ids in sets.lists()]


@pytest.mark.parametrize("rule", RULES)
def test_tokens_their_sets_and_log_probabilities(rule: str) -> None:
    """The sets are those of the rule, and log-probabilities are those of the softmax over the set."""
    fake, truncation = table(), RULES[rule]
    response = respond(fake, truncation)
    assert response.kept is not None
    assert len(response.tokens) > 3
    tokens = REQUEST.tokens.tolist()
    options = {"top_k": truncation.top_k or 0, "top_p": truncation.top_p, "min_p": truncation.min_p}
    for index, (token, kept) in enumerate(zip(response.tokens.tolist(), ids_of(response.kept), strict=True)):
        logits = fake._logits(tokens)[-1] / TEMPERATURE
        mask = kept_ids(logits, options, set(STOPS) if index < truncation.min_new_tokens else set())
        assert kept == set(mask.nonzero()[:, 0].tolist())
        expected = torch.log_softmax(logits.masked_fill(~mask, -torch.inf), -1)[token].item()
        assert response.logprobs[index] == pytest.approx(expected, abs=1e-6)
        tokens.append(token)
    assert (response.kept.are_excluded().any()) == (rule == "nearly all"), "large sets are stored as excluded ids"
    assert GENERATE in fake.calls
    assert COMPLETIONS not in fake.calls


def test_a_minimum_length_alone_needs_no_sets_from_the_server() -> None:
    fake = table(returns_kept=None)
    response = respond(fake, Truncation(min_new_tokens=5))
    assert response.kept is not None
    assert not set(response.tokens[:5].tolist()) & set(STOPS)
    assert response.kept.lists() == [[-1, -4]] * 5 + [[]] * (len(response.tokens) - 5)
    assert GENERATE not in fake.calls
    assert fake.completed[0]["min_tokens"] == 5


def test_a_minimum_length_counts_the_tokens_of_earlier_weights() -> None:
    fake = table(returns_kept=None)
    partial = Response(
        tokens=np.array([8, 9, 6]), logprobs=np.zeros(3, np.float32), ended=False, version=3, kept=KeptSets.whole(3)
    )
    rest = respond(fake, Truncation(min_new_tokens=5), rest_of(REQUEST, partial))
    assert fake.completed[0]["min_tokens"] == 2
    assert rest.kept is not None
    assert rest.kept.lists() == [[-1, -4]] * 2 + [[]] * (len(rest.tokens) - 2)
    joined = partial.followed_by(rest)
    assert len(joined.kept_sets) == len(joined.tokens)
    rest = respond(fake, Truncation(min_new_tokens=3), rest_of(REQUEST, partial))
    assert "min_tokens" not in fake.completed[1]
    assert rest.kept is not None
    assert not len(rest.kept.ids)


@pytest.mark.parametrize("rule", ["top-p", "all"])
def test_greedy_responses(rule: str) -> None:
    """A server that returns kept sets refuses temperature 0, so a greedy response has sets of one id."""
    fake = table()
    response = respond(fake, RULES[rule], replace(REQUEST, key=GREEDY))
    tokens = REQUEST.tokens.tolist()
    for index, token in enumerate(response.tokens.tolist()):
        logits = fake._logits(tokens)[-1]
        if index < RULES[rule].min_new_tokens:
            logits[list(STOPS)] = -torch.inf
        assert token == int(logits.argmax())
        tokens.append(token)
    assert response.kept is not None
    assert response.kept.lists() == [[token] for token in response.tokens.tolist()]
    np.testing.assert_array_equal(response.logprobs, 0.0)


class Wrong(Table):
    """Returns other sets than those of its tokens."""

    sets: Any = None  # function of the right sets

    def _generate(self, body: dict[str, Any]) -> tuple[int, Any]:
        status, answer = super()._generate(body)
        for choice in answer["choices"]:
            choice["sampling_mask"] = self.sets(choice["sampling_mask"])
        return status, answer


@pytest.mark.parametrize(
    ("sets", "line"),
    [
        (lambda _: None, r"object of type 'NoneType' has no len"),
        (lambda right: right[:-1], r"\(\d+ kept sets for \d+ tokens\)"),
        (lambda right: [[50], *right[1:]], r"the kept set of token 0 has an id outside of 0 to 49"),
        (lambda right: [[-1], *right[1:]], r"the kept set of token 0 has an id outside of 0 to 49"),
        (lambda right: [[], *right[1:]], r"the kept set of token 0 is not a list of token ids"),
        (lambda right: [3, *right[1:]], r"the kept set of token 0 is not a list of token ids"),
        (lambda right: [[0.5], *right[1:]], r"the kept set of token 0 is not a list of token ids"),
        (lambda right: [[True], *right[1:]], r"the kept set of token 0 is not a list of token ids"),
        (lambda right: [[0], *right[1:]], r"token \d+ is not in its kept set"),
    ],
)
def test_wrong_sets_are_requested_again(sets: Any, line: str) -> None:
    fake = Wrong(vocabulary=VOCABULARY)
    fake.version, fake.returns_kept, fake.sets = "4", True, sets
    with pytest.raises(
        ServerLostError, match=f"{GENERATE} did not return the kept set of each token.*{line}"
    ) as caught:
        respond(fake, RULES["all"])
    assert "\n" not in str(caught.value)


def test_lists_of_a_server_in_both_forms() -> None:
    sampling = SamplingSettings(temperature=1.0, stops=(), truncation=Truncation(top_p=0.9), vocabulary=6)
    lists = [[4, 2, 2], [5, 4, 3, 2, 1], [0, 1, 2, 3, 4, 5], [0, 1, 2]]
    sets = read_kept_sets(lists, [4, 3, 0, 2], REQUEST, sampling)
    assert sets.lists() == [[2, 4], [-1], [], [0, 1, 2]], "duplicates count once, and no list means every id"


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"returns_kept": None, "release": "0.27.1"},
            r"runs vLLM 0.27.1, which does not return kept sets \(.*\); use vLLM 0.3",
        ),
        ({"returns_kept": False}, r"does not return kept sets \(.*\); start the server with --return-sampling-mask"),
        (
            {"logprobs_mode": "raw_logprobs"},
            r"does not return kept sets \(.*\); start the server with --return-sampling-mask",
        ),
        ({"scales_out": False}, r"\(403: Scale-out endpoints are disabled.\), so the server .*--enable-scale-out"),
        (
            {"missing": {GENERATE}},
            rf"has no route {GENERATE}, so the server does not return kept sets \(.*\); start the",
        ),
    ],
)
def test_servers_that_return_no_sets(changes: dict[str, Any], line: str) -> None:
    served = served_of(returns_kept="rollout.top_p", vocabulary=VOCABULARY)
    with serving(table()) as (url,):
        assert asyncio.run(VllmServer(url, 5.0).check(served)) == "policy"
    with serving(table(**changes)) as (url,), refused("rollout.top_p", line):
        asyncio.run(VllmServer(url, 5.0).check(served))


def test_the_options_of_servers_that_a_run_starts() -> None:
    options = {"--return-sampling-mask", "--enable-scale-out"}
    for served in (served_of(), served_of(returns_kept="rollout.top_k")):
        command = VllmServer.command(["vllm", "serve"], served, name="policy", port=8000)
        assert options & set(command) == (options if served.returns_kept else set())


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_run_trains_the_truncated_distribution(
    staleness: int, model_folder: Path, tmp_path: Path, taken: Any
) -> None:
    """Also if weight syncs interrupt responses: every token keeps its set, and the trainer agrees with the server."""
    plain = fake_of(model_folder)
    fake = Holding(vocabulary=plain.vocabulary, model=plain.model, tokenizer=plain.tokenizer)
    fake.returns_kept = True
    rules: dict[str, Any] = {"top_k": 12, "top_p": 0.8, "min_new_tokens": 3}
    with serving(fake) as (url,):
        train(make_config(tmp_path / "run", model_folder, servers=[url], staleness=staleness, steps=4, **rules))
    found = lines(tmp_path / "run")
    assert [line["samples"] for line in found] == [SAMPLES] * 4
    assert all(1 <= line["kept_ids"] <= 12 for line in found)
    assert found[0]["loss/sampler_difference"] < 1e-5, "the same weights and the same sets in float32"
    if not staleness:
        assert all(line["loss/sampler_difference"] < 1e-5 for line in found)
        return
    mixed = 0
    for samples, played in taken.values():
        for sample, one in zip(samples, played, strict=True):
            sampled = sample.tokens[-len(one.versions) :]
            assert sample.kept is not None
            kept = sample.kept[len(sample.tokens) - len(sampled) :]
            assert (kept.counts > 0).all(), "every sampled token has a set"
            assert kept.contain(sampled).all()
            mixed += len(set(one.versions.tolist())) > 1
    assert mixed > 0, "a weight sync interrupted a response"
