"""Sizes are those of the modules, FLOPs those that PyTorch counts in a forward pass, for every architecture."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from padfree.estimate.activations import token_bytes
from padfree.model.mixers import kind_of
from padfree.model.structure import layers_of
from padfree.packing import CostModel
from padfree.sizes import AttentionSizes, ModelSizes
from padfree.testing.models import ARCHITECTURES, WINDOW, build
from tests.refused import refused

DENSE: dict[str, Any] = {
    "model_type": "llama",
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


def test_sizes_are_those_of_the_modules() -> None:
    for name in ARCHITECTURES:
        model = skeleton(name)
        sizes = ModelSizes.of(model.config)
        embeddings: Any = model.get_input_embeddings()
        assert (sizes.vocabulary, sizes.hidden) == tuple(embeddings.weight.shape), name
        layers = layers_of(model)
        assert sizes.layers == len(layers), name
        mixtures = tuple(any("experts" in part for part, _ in each.named_modules()) for each in layers)
        assert sizes.sparse == mixtures, name
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
    if last == "q_proj" and not sizes.latent:
        assert module.out_features in (heads.query, heads.query + heads.gate), name
    if last in ("k_proj", "v_proj") and not sizes.latent:
        assert module.out_features == (heads.key if last == "k_proj" else heads.value), name
    if last == "o_proj":
        assert module.in_features == heads.output, name
    if last == "up_proj" and "expert" not in name:
        assert module.out_features == sizes.mlp, name
    if last == "up_proj" and "shared_expert" in name:
        assert module.out_features == sizes.shared_mlp, name


OTHERWISE = ("llama4", "gemma3n")
"""transformers routes every token to all of Llama 4's experts, and computes Gemma 3n's streams as larger matmuls."""


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in OTHERWISE])
def test_flops_are_those_of_a_forward_pass(name: str) -> None:
    """PyTorch counts the matmuls of linear layers, routers and experts; attention and states are counted separately."""
    model = build(name).eval()
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(input_ids=torch.arange(1, 12)[None], use_cache=False)
    counted = {str(operation): flops for operation, flops in counter.get_flop_counts()["Global"].items()}
    sizes, cost = ModelSizes.of(model.config), CostModel.from_config(model.config)
    assert 2 * 11 * sizes.weights == counted.get("aten.mm", 0) + counted.get("aten.addmm", 0)
    windowed = sizes.windowed_attention
    attention = 2 * sizes.windowed_layers * sizes.window * (windowed.query + windowed.output)
    assert cost.linear == 3 * (2 * sizes.weights + attention + sizes.state_flops)
    assert cost.quadratic == 3 * sizes.full_layers * (sizes.attention.query + sizes.attention.output)


def test_a_model_without_attention_has_no_pairs() -> None:
    sizes = ModelSizes.of(skeleton("mamba").config)
    assert (sizes.query, sizes.key, sizes.mlp) == (0, 0, 0)
    assert CostModel.from_config(skeleton("mamba").config).quadratic == 0


def test_a_config_is_counted_once() -> None:
    assert ModelSizes.of(build("qwen3").config) is ModelSizes.of(build("qwen3").config)
    assert ModelSizes.of(build("qwen3", hidden_size=32).config) is not ModelSizes.of(build("qwen3").config)


def test_what_can_be_planned_is_planned() -> None:
    """What a run computes from the sizes before training."""
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
    assert (sizes.experts, sizes.experts_per_token, sizes.sparse, sizes.shared_mlp) == (0, 0, (False, False), 0)
    assert (sizes.windowed_layers, sizes.full_layers, sizes.layer_types) == (0, 2, ())
    assert ModelSizes.of({**DENSE, "head_dim": None, "num_key_value_heads": None}) == sizes
    grouped = ModelSizes.of({**DENSE, "num_key_value_heads": 1, "head_dim": 6})
    assert (grouped.query, grouped.key) == (12, 6)


def test_objects_dicts_and_text_parts_are_read_alike() -> None:
    sizes = ModelSizes.of(DENSE)
    assert ModelSizes.of(SimpleNamespace(**DENSE)) == sizes
    assert ModelSizes.of({"text_config": DENSE}) == sizes
    assert ModelSizes.of(SimpleNamespace(text_config=SimpleNamespace(**DENSE))) == sizes
    config = build("gemma3").config
    assert ModelSizes.of(config) == ModelSizes.of(config.to_dict())


def test_kinds_of_layers() -> None:
    heads = {"num_key_value_heads": 2, "sliding_window": 5}
    assert ModelSizes.of({**DENSE, **heads, "model_type": "mistral"}).windowed_layers == 2
    qwen2 = {**DENSE, **heads, "model_type": "qwen2"}
    assert ModelSizes.of({**qwen2, "use_sliding_window": False}).windowed_layers == 0
    mixed = ModelSizes.of(build("gemma3").config)
    assert (mixed.window, mixed.windowed_layers, mixed.full_layers) == (WINDOW, 1, 1)
    experts = {**DENSE, "model_type": "qwen3_moe", "num_hidden_layers": 6, "num_experts": 4, "num_experts_per_tok": 2}
    assert ModelSizes.of({**experts, "decoder_sparse_step": 2}).sparse == (False, True) * 3
    assert ModelSizes.of({**experts, "mlp_only_layers": [0, 3]}).sparse == (False, True, True) * 2


def test_latent_attention_has_heads_of_its_own() -> None:
    sizes = ModelSizes.of(build("deepseek_v3").config)
    assert sizes.latent
    assert (sizes.head, sizes.query, sizes.key, sizes.value, sizes.output) == (16, 64, 64, 32, 32)


@pytest.mark.parametrize("missing", sorted(DENSE.keys() - {"intermediate_size"}))
def test_a_config_without_a_size_is_refused_by_its_name(missing: str) -> None:
    config = {name: value for name, value in DENSE.items() if name != missing}
    with refused("config", f"no {missing}"):
        ModelSizes.of(config)


def test_a_model_type_that_transformers_lacks_is_refused() -> None:
    with refused("config", "model_type 'abacus'"):
        ModelSizes.of({**DENSE, "model_type": "abacus"})
