"""Replayed routes: bit-identical for a model's own routes, and equal to a loop over experts for any others."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from padfree.batch import LocalBatch
from padfree.cp import shard
from padfree.errors import UserError
from padfree.model import attach, hidden_states
from padfree.model.route_replay import RouteRecorder, RouteReplay, check_routes, need_replay, replay_obstacle
from padfree.model.routers import RouterRecorder, routers_of
from padfree.model.stacked_experts import stacked_experts
from padfree.packing.collate import collate
from padfree.routes import as_int16, unknown_routes
from padfree.sample import Sample
from padfree.testing.models import build
from padfree.tools.check.exact import float64_throughout

REPLAYED = [
    "qwen3_moe",
    "mixtral",
    "deepseek_v3",
    "gpt_oss",
    "glm4_moe",
    "qwen3_5_moe",
    "qwen2_moe",
    "olmoe",
    "ernie4_5_moe",
    "minimax_m2",
    "granitemoe",
]
LOOPED = ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "glm4_moe"]
LENGTHS = (7, 3, 5)


def test_families() -> None:
    assert {name: replay_obstacle(build(name)) for name in REPLAYED} == dict.fromkeys(REPLAYED)


def test_what_cannot_be_replayed_is_refused() -> None:
    with pytest.raises(UserError, match=r"'replay' is not possible because Qwen3ForCausalLM has no routers; set"):
        need_replay(build("qwen3"))
    with pytest.raises(UserError, match=r"the routers of PhimoeForCausalLM do not choose experts with torch.topk"):
        need_replay(build("phimoe"))


def test_a_router_whose_choices_are_ignored_is_refused() -> None:
    """The block of this model routes all tokens to the first experts, whatever its router returns."""
    model = build("qwen3_moe")
    experts = type(stacked_experts(model)[0])
    forward = experts.forward

    def ignoring(self: Any, hidden: Tensor, choices: Tensor, weights: Tensor) -> Any:
        return forward(
            self, hidden, torch.zeros_like(choices) + torch.arange(choices.shape[1]), weights.detach() * 0 + 1
        )

    with mock.patch.object(experts, "forward", ignoring):
        assert replay_obstacle(model) == "Qwen3MoeForCausalLM does not use the routes that it is given"


def samples_of(seed: int = 0) -> list[Sample]:
    rng = np.random.default_rng(seed)
    return [Sample(tokens=rng.integers(0, 64, length), uid=length) for length in LENGTHS]


def local(samples: list[Sample], dtype: torch.dtype = torch.float32) -> LocalBatch:
    return shard(collate(samples).padded_to(20))


def with_routes(samples: list[Sample], routes: np.ndarray) -> list[Sample]:
    ends = np.cumsum(LENGTHS)
    parts = np.split(routes[: ends[-1]], ends[:-1])
    return [Sample(tokens=one.tokens, uid=one.uid, routes=part) for one, part in zip(samples, parts, strict=True)]


def attached(name: str, dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, RouteRecorder]:
    model = build(name).to(dtype)
    if dtype == torch.float64:
        model.set_experts_implementation("eager")
    attach(model, "auto")
    RouteReplay(model)
    return model, RouteRecorder(model)


def gradients(model: PreTrainedModel, batch: LocalBatch) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    with float64_throughout() if model.dtype == torch.float64 else nullcontext():
        hidden = hidden_states(model, batch)
        hidden[: sum(LENGTHS)].square().sum().backward()
    return hidden.detach(), {
        name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None
    }


@pytest.mark.parametrize("name", REPLAYED)
def test_a_models_own_routes_change_no_bit(name: str) -> None:
    model, recorder = attached(name)
    samples = samples_of()
    free, expected = gradients(model, local(samples))
    routes = recorder.take().numpy()
    for own in (routes, as_int16(routes)):
        found, same = gradients(model, local(with_routes(samples, own)))
        assert torch.equal(found[: sum(LENGTHS)], free[: sum(LENGTHS)])
        assert all(torch.equal(same[key], expected[key]) for key in expected)
        recorder.clear()


@pytest.mark.parametrize("name", LOOPED)
def test_other_routes_equal_a_loop_over_experts(name: str) -> None:
    """In float64: outputs and gradients of all weights, with a router written out here and fixed random routes."""
    model, recorder = attached(name, torch.float64)
    samples = samples_of()
    rng = np.random.default_rng(3)
    num_routers, num_experts = len(routers_of(model)), routers_of(model)[0].num_experts
    random = rng.random((sum(LENGTHS), num_routers, num_experts)).argsort(-1)[..., :2].astype(np.uint8)
    random[4] = 255  # an unknown route in the middle
    found, own = gradients(model, local(with_routes(samples, random)))
    taken = recorder.take().numpy()[: sum(LENGTHS)]
    known = np.arange(sum(LENGTHS)) != 4
    assert (taken[known] == random[known]).all()

    plain = build(name).double()
    plain.set_experts_implementation("eager")
    attach(plain, "auto")
    fixed = torch.from_numpy(np.concatenate([taken, np.zeros((20 - sum(LENGTHS), *taken.shape[1:]), np.uint8)])).long()
    for number, router in enumerate(routers_of(plain)):
        object.__setattr__(router.module, "forward", loop_router(name, router.module, fixed[:, number]))
    expected, others = gradients(plain, local(samples))
    real = slice(0, sum(LENGTHS))
    torch.testing.assert_close(found[real], expected[real], atol=1e-12, rtol=1e-12)
    for key, gradient in others.items():
        torch.testing.assert_close(own[key], gradient, atol=1e-12, rtol=1e-12, msg=key)


def loop_router(name: str, router: Any, routes: Tensor) -> Any:
    """The router of a family, written out token by token."""

    def forward(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = hidden.reshape(-1, hidden.shape[-1])
        logits = hidden @ router.weight.T + (router.bias if name == "gpt_oss" else 0.0)
        rows = []
        for row, chosen in zip(logits, routes, strict=True):
            if name == "gpt_oss":
                weights = torch.exp(row[chosen]) / torch.exp(row[chosen]).sum()
            elif name in ("deepseek_v3", "glm4_moe"):
                scores = 1 / (1 + torch.exp(-row[chosen]))
                weights = scores / scores.sum() if router.norm_topk_prob else scores
                weights = weights * router.routed_scaling_factor
            else:
                shares = torch.exp(row - row.max())
                shares = (shares / shares.sum())[chosen]
                weights = shares / shares.sum() if getattr(router, "norm_topk_prob", True) else shares
            rows.append(weights)
        return logits, torch.stack(rows), routes

    return forward


def test_load_balancing_counts_the_routers_own_choices() -> None:
    model, _ = attached("qwen3_moe")
    recorder = RouterRecorder(routers_of(model), own=True)
    samples = samples_of()
    recorder.record(True)
    hidden_states(model, local(samples))
    free = [call[2].clone() for call in recorder.calls]
    recorder.clear()
    routes = np.stack([call.numpy() for call in free], 1).astype(np.uint8)[: sum(LENGTHS)]
    hidden_states(model, local(with_routes(samples, (routes + 1) % 4)))
    assert torch.equal(recorder.calls[0][2][: sum(LENGTHS)], free[0][: sum(LENGTHS)]), "of the first layer"


def test_routes_of_another_model_are_refused() -> None:
    model = build("qwen3_moe")
    routes = np.zeros((3, len(routers_of(model)), 2), np.int16)
    check_routes([None, routes, unknown_routes(3, routes)], routers_of(model))
    with pytest.raises(UserError, match=r"routes: are for 2 layers with at least 5 experts each"):
        check_routes([routes + 4], routers_of(model))
    with pytest.raises(UserError, match=r"routes: are for 1 layers"):
        check_routes([routes[:, :1]], routers_of(model))
    attach(model, "auto")
    RouteReplay(model)
    wrong = [Sample(tokens=np.arange(3), routes=routes[:, :1])]
    with pytest.raises(UserError, match=r"routes: have 1 layers with experts, but the model has 2"):
        hidden_states(model, shard(collate(wrong)))
    wrong = [Sample(tokens=np.arange(3), routes=np.zeros((3, 2, 3), np.int16))]
    with pytest.raises(UserError, match=r"routes: have 3 experts per token"):
        hidden_states(model, shard(collate(wrong)))
