"""Sizes read from a config are those of the modules that transformers makes of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from padfree.model.structure import layers_of
from padfree.sizes import LatentSizes, ModelSizes
from tests.models import ARCHITECTURES, WINDOW, build

DENSE: dict[str, Any] = {
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 10,
}


NOT_DESCRIBED = ("gemma4", "jamba", "kimi_linear", "llama4", "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_next")
"""Their configs do not tell the sizes of all layers: gated queries, latent attention beside mixers, two widths of MLPs,
heads that differ by layer. What is estimated of them is not exact."""


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in NOT_DESCRIBED])
def test_sizes_are_those_of_the_modules(name: str) -> None:
    model = build(name)
    sizes = ModelSizes.of(model.config)
    embeddings: Any = model.get_input_embeddings()
    assert (sizes.vocabulary, sizes.hidden) == tuple(embeddings.weight.shape)
    layers = layers_of(model)
    assert sizes.layers == len(layers)
    assert sizes.sparse_layers == sum(any("experts" in part for part, _ in layer.named_modules()) for layer in layers)
    widths = {"q_proj": sizes.query, "k_proj": sizes.key, "v_proj": sizes.value}
    for module_name, module in layers.named_modules():
        last = module_name.rpartition(".")[2]
        if not isinstance(module, nn.Linear):
            continue
        if last in widths and sizes.latent is None:
            assert module.out_features == widths[last], module_name
        if last == "o_proj":
            assert module.in_features == sizes.output, module_name
        if last == "up_proj" and "expert" not in module_name:
            assert module.out_features == sizes.mlp, module_name
        if last == "up_proj" and "shared_expert" in module_name:
            assert module.out_features == sizes.shared_mlp, module_name


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
    with pytest.raises(ValueError, match=f"^config: no {missing}; give a causal language model's config"):
        ModelSizes.of(config)
