"""The in-process sampler: shared and copied weights, and its metrics."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from padfree.config import LoraConfig
from padfree.model import attach
from padfree.model.lora import add_adapters
from padfree.model.named_tensors import named_tensors
from padfree.optim.master_weights import compute_copies, keep_master_weights
from padfree.rollout.engines.in_process.policy_model import PolicyModel
from padfree.rollout.engines.in_process.sampler import InProcessSampler
from padfree.testing.models import build
from tests.refused import refused
from tests.rollout.sampling_cases import STOPS, TEMPERATURE, assert_responses, by_definition, group_requests

CPU = torch.device("cpu")


def make_sampler(model: PreTrainedModel, dtype: torch.dtype = torch.float32, **changes: Any) -> InProcessSampler:
    settings: dict[str, Any] = {"stops": STOPS, "temperature": TEMPERATURE, "batch_size": 4, **changes}
    return InProcessSampler(PolicyModel(model, dtype, CPU), **settings)


@pytest.mark.parametrize("decodes", [None, True], ids=["cache of transformers", "our cache"])
@pytest.mark.parametrize("name", ["qwen3", "llama_tied", "gpt2"])
def test_sampling_shares_the_trained_weights(name: str, decodes: bool | None) -> None:
    model = build(name)
    sampler = make_sampler(model, decodes=decodes)
    requests = group_requests()
    for version, factor in ((3, 1.0), (4, 1.1)):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(factor)
        sampler.update_weights(model, version)
        responses = sampler.sample(requests)
        model.eval()
        assert_responses(responses, [by_definition(model, request) for request in requests])
        model.train()
        assert {response.version for response in responses} == {version}
    assert sampler.policy.is_shared
    theirs = named_tensors(model)
    for tensor_name, tensor in named_tensors(sampler.policy.model).items():
        assert tensor.data_ptr() == theirs[tensor_name].data_ptr()
        assert not tensor.requires_grad
    assert all(parameter.requires_grad for parameter in model.parameters()), "the trained model is unchanged"
    assert model.training
    assert sampler.metrics()["tokens_per_second"] > 0
    sampler.close()


@pytest.mark.parametrize("decodes", [None, True], ids=["cache of transformers", "our cache"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_named(value: float, decodes: bool | None) -> None:
    model = build("qwen3")
    sampler = make_sampler(model, decodes=decodes)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[:, 3] = value
    sampler.update_weights(model, 7)
    with refused("model", about="model.layers.1.mlp.down_proj.weight"):
        sampler.sample(group_requests())


def test_the_tensors_that_float32_masters_are_rounded_to_are_shared() -> None:
    model = build("qwen3")
    keep_master_weights(model, torch.bfloat16, model.model.layers)
    sampler = make_sampler(model, torch.bfloat16)
    addresses = []
    for _ in range(2):
        with compute_copies(model):
            sampler.update_weights(model, 0)
            assert sampler.policy.is_shared
            addresses.append([tensor.data_ptr() for tensor in named_tensors(sampler.policy.model).values()])
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
    assert addresses[0] == addresses[1]
    with compute_copies(model):
        sampler.update_weights(model, 1)
    for name, tensor in named_tensors(sampler.policy.model).items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, named_tensors(model)[name].bfloat16()), name


def test_a_model_with_adapters_is_copied() -> None:
    pytest.importorskip("peft")
    model = build("llama_tied")
    plain = build("llama_tied").eval()
    add_adapters(model, LoraConfig(rank=2, alpha=6.0))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.2)
    sampler = make_sampler(model)
    sampler.update_weights(model, 0)
    assert not sampler.policy.is_shared
    copied = sampler.policy.model
    assert copied.lm_head.weight is copied.model.embed_tokens.weight
    tokens = torch.arange(3, 12)[None]
    with torch.no_grad():
        expected, found = (one(input_ids=tokens).logits for one in (model.eval(), copied))
        assert (plain(input_ids=tokens).logits - found).abs().max() > 0.1
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    addresses = [tensor.data_ptr() for tensor in copied.parameters()]
    sampler.update_weights(model, 1)
    assert [tensor.data_ptr() for tensor in copied.parameters()] == addresses


def test_adapters_that_are_not_merged_have_the_dtype_of_the_sampler() -> None:
    """The trainer keeps adapters in float32 but computes with them in bfloat16."""
    model, settings = attach(build("qwen3")), LoraConfig(rank=2)
    add_adapters(model, settings)
    policy = PolicyModel(model, torch.bfloat16, CPU, adapters=settings)
    policy.update(model)
    own = dict(policy.model.named_parameters())
    assert {parameter.dtype for parameter in own.values()} == {torch.bfloat16}
    assert all(torch.equal(own[name], parameter.bfloat16()) for name, parameter in model.named_parameters())
