"""Sizes read from a config are those of the modules that transformers makes of it."""

from __future__ import annotations

import re
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from padfree.estimate.activations import attends, token_bytes
from padfree.model.mixers import kind_of
from padfree.model.structure import layers_of
from padfree.packing import CostModel
from padfree.sizes import AttentionSizes, LatentSizes, ModelSizes
from tests.models import ARCHITECTURES, WINDOW, build
from tests.refused import refused

DENSE: dict[str, Any] = {
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 10,
}


@cache
def skeleton(name: str) -> PreTrainedModel:
    with torch.device("meta"):
        return build(name)


NOT_COUNTED = ("zamba", "zamba2")
"""Some of their layers share weights, attend to two rows of hidden states side by side, and have adapters of their own:
their FLOPs are an estimate."""


def test_sizes_are_those_of_the_modules() -> None:
    for name in ARCHITECTURES:
        model = skeleton(name)
        sizes = ModelSizes.of(model.config)
        embeddings: Any = model.get_input_embeddings()
        assert (sizes.vocabulary, sizes.hidden) == tuple(embeddings.weight.shape), name
        layers = layers_of(model)
        assert sizes.layers == len(layers), name
        assert sizes.sparse_layers == sum(any("experts" in part for part, _ in each.named_modules()) for each in layers)
        assert sizes.attention_layers == sum(attends(layer) for layer in layers), name
        mixers = [module for module in layers.modules() if kind_of(module).name != "other"]
        assert sizes.mixer_layers == len(mixers), name
        inside = {part for mixer in mixers for part in mixer.modules()}
        for number, layer in enumerate(layers):
            slides = bool(sizes.layer_types) and sizes.layer_types[number] == "sliding_attention"
            heads = sizes.windowed_attention if slides else sizes.attention
            for part, module in layer.named_modules():
                if isinstance(module, nn.Linear) and module not in inside:
                    compare_widths(sizes, heads, f"{name} {number} {part}", module)


def compare_widths(sizes: ModelSizes, heads: AttentionSizes, name: str, module: nn.Linear) -> None:
    last = name.rpartition(".")[2]
    if last == "q_proj" and sizes.latent is None:
        assert module.out_features in (heads.query, heads.query + heads.gate), name
    if last in ("k_proj", "v_proj") and sizes.latent is None:
        assert module.out_features == (heads.key if last == "k_proj" else heads.value), name
    if last == "o_proj":
        assert module.in_features == heads.output, name
    if last == "up_proj" and "expert" not in name:
        assert module.out_features == sizes.mlp, name
    if last == "up_proj" and "shared_expert" in name:
        assert module.out_features == sizes.shared_mlp, name


def met_weights(model: PreTrainedModel, sizes: ModelSizes) -> float:
    """The weights of all matmuls of one token, counted from the modules; of experts those that it meets."""
    met = sizes.experts_per_token / max(1, sizes.experts)
    found = 0.0
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.Linear | Conv1D):
            found += module.weight.numel() * (met if re.search(r"experts\.\d", name) else 1)
        elif name.endswith("experts"):
            found += met * sum(each.numel() for each in module.parameters(recurse=False) if each.ndim == 3)
        elif re.search(r"(router|gate)$", name):  # those that are no linear layers
            found += sum(each.numel() for each in module.parameters(recurse=False) if each.ndim == 2)
    return found


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in NOT_COUNTED])
def test_flops_are_those_of_the_weights_a_token_meets(name: str) -> None:
    model = skeleton(name)
    sizes, cost = ModelSizes.of(model.config), CostModel.from_config(model.config)
    windowed = sizes.windowed_attention
    attention = 2 * sizes.windowed_layers * sizes.window * (windowed.query + windowed.output)
    state = sizes.mixer_layers * sizes.mixer_flops
    assert cost.linear == 3 * (2 * met_weights(model, sizes) + attention + state)
    mixers = [module for module in model.modules() if kind_of(module).name != "other"]
    assert state == pytest.approx(sum(kind_of(mixer).state_flops(mixer) for mixer in mixers), rel=0.1)
    assert cost.quadratic == 3 * sizes.full_layers * (sizes.attention.query + sizes.attention.output)


def test_what_can_be_planned_is_planned() -> None:
    """What a run asks of the sizes before it trains."""
    for name in ARCHITECTURES:
        model = skeleton(name)
        kept, recomputed = (token_bytes(model, 4, checkpointing) for checkpointing in ("none", "full"))  # type: ignore[arg-type]
        assert kept > recomputed >= 4 * ModelSizes.of(model.config).hidden, name


def test_a_size_that_differs_between_layers_is_the_largest() -> None:
    config = skeleton("gemma4").config
    found = {layer.head_dim for layer in config.per_layer_config}
    assert len(found) > 1
    sizes = ModelSizes.of(config)
    assert {sizes.attention.head, sizes.windowed_attention.head} == found
    assert sizes.head == sizes.attention.head == max(found)


def test_what_is_not_given_is_derived() -> None:
    sizes = ModelSizes.of(DENSE)
    assert (sizes.head, sizes.query, sizes.key, sizes.value, sizes.output) == (4, 8, 8, 8, 8)
    assert (sizes.experts, sizes.experts_per_token, sizes.sparse_layers, sizes.shared_mlp) == (0, 0, 0, 0)
    assert (sizes.windowed_layers, sizes.full_layers, sizes.layer_types) == (0, 2, ())
    assert ModelSizes.of({**DENSE, "head_dim": None, "num_key_value_heads": 0}) == sizes
    grouped = ModelSizes.of({**DENSE, "num_key_value_heads": 1, "head_dim": 3})
    assert (grouped.query, grouped.key) == (6, 3)


def test_objects_dicts_and_text_parts_are_read_alike() -> None:
    sizes = ModelSizes.of(DENSE)
    assert ModelSizes.of(SimpleNamespace(**DENSE)) == sizes
    assert ModelSizes.of({"text_config": DENSE}) == sizes
    assert ModelSizes.of(SimpleNamespace(text_config=SimpleNamespace(**DENSE))) == sizes
    config = build("gemma3").config
    assert ModelSizes.of(config) == ModelSizes.of(config.to_dict())


def test_kinds_of_layers() -> None:
    assert ModelSizes.of({**DENSE, "sliding_window": 5}).windowed_layers == 2
    assert ModelSizes.of({**DENSE, "sliding_window": 5, "use_sliding_window": False}).windowed_layers == 0
    mixed = ModelSizes.of(build("gemma3").config)
    assert (mixed.window, mixed.windowed_layers, mixed.full_layers) == (WINDOW, 1, 1)
    experts = {**DENSE, "num_hidden_layers": 6, "num_experts": 4, "num_experts_per_tok": 2}
    assert ModelSizes.of({**experts, "decoder_sparse_step": 2}).sparse_layers == 3
    assert ModelSizes.of({**experts, "mlp_only_layers": [0, 3]}).sparse_layers == 4
    assert ModelSizes.of({**experts, "first_k_dense_replace": 1}).sparse_layers == 5


def test_latent_attention_has_heads_of_its_own() -> None:
    sizes = ModelSizes.of(build("deepseek_v3").config)
    assert sizes.latent == LatentSizes(query_rank=24, key_value_rank=16, rope=8, nope=8, value=8)
    assert (sizes.head, sizes.query, sizes.key, sizes.value, sizes.output) == (16, 64, 64, 32, 32)


@pytest.mark.parametrize("missing", [*sorted(DENSE.keys() - {"intermediate_size"}), "num_experts_per_tok"])
def test_a_config_without_a_size_is_refused_by_its_name(missing: str) -> None:
    config = {name: value for name, value in {**DENSE, "num_experts": 4}.items() if name != missing}
    if missing != "num_experts_per_tok":
        config["num_experts_per_tok"] = 2
    with refused("config", f"no {missing}"):
        ModelSizes.of(config)
