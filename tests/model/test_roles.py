"""Roles follow from the modules, for every architecture."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from padfree.config import LoraConfig
from padfree.model.lora import add_adapters
from padfree.model.roles import roles_of
from padfree.model.scalar_head import scalar_model
from padfree.testing.models import ARCHITECTURES, build


def by_name(model: nn.Module) -> dict[str, str]:
    roles = roles_of(model)
    return {name: roles[parameter] for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_parameter_has_the_role_of_its_module(name: str) -> None:
    model = build(name)
    roles = roles_of(model)
    assert list(roles) == list(model.parameters())
    for path, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            role, about = roles[parameter], f"{path} {tuple(parameter.shape)}"
            if parameter.ndim < 2:
                assert role == "vector", about
            elif role == "hidden":
                assert isinstance(module, nn.Linear | Conv1D), about
                assert parameter.ndim == 2, about
            elif role == "expert":
                assert parameter.shape[0] == module.num_experts or ".experts." in f"{path}.", about
            elif isinstance(module, nn.Linear | Conv1D):
                assert role in ("head", "embedding"), about
    counts = Counter(roles.values())
    assert counts["hidden"] >= 4
    assert counts["embedding"] >= 1
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert roles[model.get_input_embeddings().weight] == "embedding"
    assert roles[model.get_output_embeddings().weight] == ("embedding" if tied else "head")
    assert (counts["expert"] > 0) == any("experts" in path for path, _ in model.named_modules())


def test_parameters_that_are_no_matrices_of_a_linear_layer() -> None:
    oss, mamba, gpt2 = by_name(build("gpt_oss")), by_name(build("mamba")), by_name(build("gpt2"))
    assert oss["model.layers.0.mlp.experts.gate_up_proj"] == "expert"
    assert oss["model.layers.0.mlp.experts.gate_up_proj_bias"] == "vector"  # [E, out]
    assert oss["model.layers.0.mlp.router.weight"] == "head"
    assert mamba["backbone.layers.0.mixer.A_log"] == "vector"  # [inner, state]
    assert mamba["backbone.layers.0.mixer.conv1d.weight"] == "vector"  # [inner, 1, width]
    assert gpt2["transformer.wpe.weight"] == "embedding"
    assert gpt2["transformer.h.0.attn.c_attn.weight"] == "hidden"
    assert by_name(build("phimoe"))["model.layers.0.mlp.router.weight"] == "head"  # more than a linear layer


def test_experts_that_are_modules_each() -> None:
    block = nn.Module()
    block.gate = nn.Linear(4, 3, bias=False)
    block.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 4)) for _ in range(3))
    roles = by_name(block)
    assert roles["gate.weight"] == "head"
    assert roles["experts.2.1.weight"] == "expert"
    assert roles["experts.2.1.bias"] == "vector"


def test_adapters_and_scalar_heads() -> None:
    pytest.importorskip("peft")
    model = build("qwen3")
    add_adapters(model, LoraConfig(rank=2))
    roles = by_name(model)
    assert {role for name, role in roles.items() if ".lora_" in name} == {"hidden"}
    assert by_name(scalar_model(build("qwen3").config, torch.float32, False))["score.weight"] == "head"
