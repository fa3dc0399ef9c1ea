"""Sampling responses to prompts with images: tokens of transformers' `generate`, log-probabilities of the trainer."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from padfree.cp import shard
from padfree.head import score
from padfree.model import attach, hidden_states, lm_head_of
from padfree.model.vision.families import need_family
from padfree.packing.collate import collate
from padfree.rollout import Response, SamplingRequest
from padfree.rollout.engines.in_process import cached_model
from padfree.rollout.engines.in_process.policy_model import PolicyModel
from padfree.rollout.engines.in_process.sampler import InProcessSampler
from padfree.rollout.sampling_rng import GREEDY, response_keys
from padfree.sample import Sample
from padfree.testing.vision_models import PLACEHOLDER, VISION_MODELS, build_vision, picture, shown
from tests.model.vision.one_at_a_time import stock_inputs
from tests.refused import refused
from tests.rounding import in_float64

RECURRENT = ("qwen3_5", "qwen3_5_moe")
SAMPLED = [name for name in VISION_MODELS if name not in RECURRENT]
NEW_TOKENS = 9
TEMPERATURE = 0.7


def prompts_of(model: PreTrainedModel) -> list[Sample]:
    """One image, the same image behind other text, two images if the model allows it, and text only."""
    one, other = picture(model, 0, rows=2, columns=3), picture(model, 1, rows=1, columns=2)
    several = [one] if need_family(model).one_image else [one, 2, other]
    return [
        shown(model, [4, one, 3], seed=1),
        shown(model, [2, one, 5], seed=2),
        shown(model, [3, *several, 4], seed=3),
        shown(model, [6], seed=4),
    ]


def requests_for(prompts: list[Sample], *, group: int, greedy: bool) -> list[SamplingRequest]:
    keys = response_keys(1, 2, np.arange(len(prompts) * group))
    return [
        SamplingRequest(
            tokens=prompt.tokens,
            images=prompt.images,
            rotary_positions=prompt.rotary_positions,
            max_new_tokens=NEW_TOKENS - number % 2,
            key=GREEDY if greedy else int(keys[number * group + member]),
        )
        for number, prompt in enumerate(prompts)
        for member in range(group)
    ]


def sampled(
    model: PreTrainedModel, requests: list[SamplingRequest], dtype: torch.dtype = torch.float32, **changes: Any
) -> list[Response]:
    settings: dict[str, Any] = {"stops": (), "temperature": TEMPERATURE, "batch_size": 5, **changes}
    sampler = InProcessSampler(PolicyModel(model, dtype, torch.device("cpu")), **settings)
    sampler.update_weights(model, 1)
    return sampler.sample(requests)


def with_response(request: SamplingRequest, tokens: Any) -> Sample:
    """The sample of a prompt and its response, as the trainer gets it. Positions go on from the last one."""
    whole = np.concatenate([request.tokens, tokens])
    positions = request.rotary_positions
    if positions is not None:
        later = positions[:, -1:] + 1 + np.arange(len(tokens))
        positions = np.concatenate([positions, later], axis=1)
    mask = np.arange(len(whole)) >= len(request.tokens)
    logprobs = np.zeros(len(whole))  # a rollout has them; no test reads their values
    return Sample(tokens=whole, loss_mask=mask, logprobs=logprobs, images=request.images, rotary_positions=positions)


def scored(model: PreTrainedModel, samples: list[Sample]) -> list[Tensor]:
    """The trainer's log-probabilities of the trained tokens of each sample, from one pack."""
    local = shard(collate(samples, share_prefixes=False))
    found = score(hidden_states(model, local), lm_head_of(model), local.labels, temperature=TEMPERATURE).logprobs
    return list(found[local.labels >= 0].split([int(sample.mask.sum()) for sample in samples]))


def generated(model: PreTrainedModel, prompt: Sample) -> list[int]:
    """Greedy tokens of transformers, which gets the pixels."""
    inputs = stock_inputs(model, prompt) | {"use_cache": True}
    with torch.no_grad():
        found = model.generate(  # type: ignore[operator]
            **inputs, do_sample=False, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, eos_token_id=None
        )
    return found[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", SAMPLED)
def test_greedy_tokens_are_those_of_transformers(name: str) -> None:
    model = build_vision(name).eval()
    prompts = prompts_of(model)
    requests = requests_for(prompts, group=1, greedy=True)
    stock = copy.deepcopy(model)
    stock.set_attn_implementation("sdpa")
    for prompt, request, response in zip(prompts, requests, sampled(model, requests), strict=True):
        assert response.tokens.tolist() == generated(stock, prompt)[: request.max_new_tokens]


@pytest.mark.parametrize("name", SAMPLED)
def test_log_probabilities_are_those_of_the_trainer(name: str) -> None:
    """In float32 they differ by no more than ten times the rounding of the trainer itself."""
    model = build_vision(name).eval()
    requests = requests_for(prompts_of(model), group=3, greedy=False)
    responses = sampled(model, requests)
    assert len({tuple(response.tokens) for response in responses}) > len(requests) / 2
    samples = [with_response(*pair) for pair in zip(requests, (each.tokens for each in responses), strict=True)]
    trainer, wide = attach(copy.deepcopy(model)), attach(in_float64(copy.deepcopy(model)))
    with torch.no_grad():
        exact = torch.cat(scored(wide, samples))
        own = torch.cat(scored(trainer, samples))
    found = torch.from_numpy(np.concatenate([each.logprobs for each in responses]))
    rounding = max((own - exact).abs().max().item(), 1e-6)
    assert (found - exact).abs().max().item() < 10 * rounding


def test_a_group_encodes_its_image_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompts of one prefill share the tower's work, too: six prompts show two distinct images."""
    model = build_vision("qwen3_vl")
    requests = requests_for([prompt for prompt in prompts_of(model) for _ in range(2)], group=4, greedy=False)
    encoded: list[int] = []
    family = need_family(model)

    def counted(base: Any, inputs: Mapping[str, Tensor]) -> Any:
        encoded.append(len(inputs["image_grid_thw"]))
        return family.encode(base, inputs)

    monkeypatch.setattr(cached_model, "family_of", lambda _: replace(family, encode=counted))
    sampled(model, requests, batch_size=len(requests))
    assert encoded == [2]


def test_another_image_gives_another_response() -> None:
    model = build_vision("qwen3_vl")
    (first, *_), other = requests_for(prompts_of(model), group=1, greedy=True), picture(model, 7, rows=2, columns=3)
    changed = replace(first, images=shown(model, [4, other, 3], seed=1).images)
    assert np.array_equal(first.tokens, changed.tokens)
    one, two = sampled(model, [first, changed])
    assert one.logprobs.tolist() != two.logprobs.tolist()


@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3", "internvl"])
def test_a_sampled_placeholder_is_an_ordinary_token(name: str) -> None:
    """A policy may sample the id of the placeholder. The model then sees the embedding of this id, not an image."""
    model = build_vision(name).eval()
    (prompt, *_) = prompts_of(model)
    with torch.no_grad():
        head = model.get_output_embeddings().weight  # type: ignore[no-untyped-call]
        head[PLACEHOLDER] = 30 * torch.randn(head.shape[1], generator=torch.Generator().manual_seed(0))
    responses = sampled(model, requests := requests_for([prompt], group=8, greedy=False))
    samples = [with_response(*pair) for pair in zip(requests, (each.tokens for each in responses), strict=True)]
    assert any(PLACEHOLDER in each.tokens[:-1] for each in responses)
    with torch.no_grad():
        found = torch.cat(scored(attach(copy.deepcopy(model)), samples))
    logprobs = np.concatenate([each.logprobs for each in responses])
    np.testing.assert_allclose(logprobs, found.numpy(), atol=2e-3)


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_models_are_refused(name: str) -> None:
    with refused("model.vision", "cannot be sampled"):
        sampled(build_vision(name), [])
