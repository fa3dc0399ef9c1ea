"""The cost and the memory of mixers follow their modules, not a guess."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from padfree.estimate.activations import layer_bytes
from padfree.model.mixers import kind_of
from padfree.model.structure import layers_of
from padfree.packing import CostModel
from padfree.sizes import ModelSizes
from padfree.testing.models import build


def mixer_of(name: str) -> nn.Module:
    return next(module for module in build(name).modules() if kind_of(module).name != "other")


@pytest.mark.parametrize("name", ["bamba", "nemotron_h", "minimax"])
def test_the_linear_cost_is_that_of_the_weights_a_token_meets(name: str) -> None:
    """Three times two FLOPs per weight; experts count by the fraction of them that a token is routed to."""
    model = build(name)
    sizes, cost = ModelSizes.of(model.config), CostModel.from_config(model.config)
    weights = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
    mixers = [module for module in model.modules() if kind_of(module).name != "other"]
    flops = 6 * weights + 3 * sum(kind_of(mixer).state_flops(mixer) for mixer in mixers)
    if not sizes.experts:
        assert cost.linear == pytest.approx(flops, rel=0.1)
    assert sizes.mixer_layers == len(mixers)
    assert cost.quadratic == 3 * sizes.full_layers * (sizes.query + sizes.output)
    assert sizes.full_layers == 1


def test_a_layer_with_a_mixer_keeps_what_its_kind_says() -> None:
    model = build("qwen3_5")
    mixing, attending = layers_of(model)
    mixer = mixer_of("qwen3_5")
    assert layer_bytes(model.config, mixing, 4) > 4 * kind_of(mixer).state_width(mixer)
    sizes = ModelSizes.of(model.config)
    attention = 4 * (sizes.query + sizes.key + sizes.value + sizes.output)
    assert layer_bytes(model.config, attending, 4) > attention
    with torch.device("meta"):
        assert kind_of(type(mixer)(model.config, 0)).name == "gated_delta", "without weights as well"
