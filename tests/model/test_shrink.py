"""Shrunken configs keep everything that decides whether an architecture can be packed."""

from __future__ import annotations

import pytest
import transformers

from padfree.model.shrink import NUM_HEADS, WINDOW, shrink
from padfree.testing.models import ARCHITECTURES, build


def test_one_layer_of_each_kind_and_a_short_window_are_kept() -> None:
    config = transformers.Gemma3TextConfig(num_hidden_layers=14, sliding_window=1024, num_key_value_heads=4)
    small = shrink(config)
    assert small.num_hidden_layers == 2
    assert small.layer_types == ["sliding_attention", "full_attention"]
    assert small.sliding_window == WINDOW
    assert (small.vocab_size, small.hidden_size, small.num_attention_heads, small.num_key_value_heads) == (64, 64, 4, 2)
    assert small.query_pre_attn_scalar == config.query_pre_attn_scalar
    assert (config.num_hidden_layers, config.sliding_window, len(config.layer_types)) == (14, 1024, 14)


def test_more_kinds_than_wanted_layers_are_all_kept() -> None:
    config = transformers.SmolLM3Config(
        num_hidden_layers=8,
        use_sliding_window=True,
        sliding_window=512,
        no_rope_layers=[1, 1, 1, 0, 1, 1, 1, 0],
        layer_types=["sliding_attention"] * 3 + ["full_attention"] * 5,
    )
    small = shrink(config)
    assert list(zip(small.layer_types, small.no_rope_layers, strict=True)) == [
        ("sliding_attention", 1),
        ("full_attention", 0),
        ("full_attention", 1),
    ]


@pytest.mark.parametrize(("heads", "expected"), [(32, NUM_HEADS), (8, 2), (1, 1)])
def test_grouped_keys_stay_grouped(heads: int, expected: int) -> None:
    config = transformers.LlamaConfig(num_attention_heads=32, num_key_value_heads=heads)
    assert shrink(config).num_key_value_heads == expected


def test_names_of_other_times_are_found_through_the_attribute_map() -> None:
    small = shrink(transformers.GPT2Config(n_embd=768, n_head=12, n_layer=12))
    assert (small.n_embd, small.n_head, small.n_layer, small.n_positions) == (64, 4, 2, 128)
    assert (small.attn_pdrop, small.resid_pdrop, small.embd_pdrop) == (0.0, 0.0, 0.0)


def test_lists_of_rotary_factors_get_the_length_of_the_small_head() -> None:
    factors = {"short_factor": [1.0] * 48, "long_factor": [4.0] * 48, "original_max_position_embeddings": 4096}
    config = transformers.Phi3Config(
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 1.0, **factors},
    )
    small = shrink(config)
    assert small.rope_parameters["rope_type"] == "longrope"
    assert len(small.rope_parameters["short_factor"]) == len(small.rope_parameters["long_factor"]) == 8


def test_what_belongs_to_a_checkpoint_is_left_behind() -> None:
    config = transformers.LlamaConfig(pad_token_id=31999, eos_token_id=[128001, 128009], dtype="bfloat16")
    config.quantization_config = {"quant_method": "fp8"}
    small = shrink(config)
    assert not hasattr(small, "quantization_config")
    assert small.dtype is None
    assert small.pad_token_id < small.vocab_size
    assert small.bos_token_id < small.vocab_size
    assert shrink(transformers.LlamaConfig(pad_token_id=None)).pad_token_id is None


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_number_of_layers_can_be_chosen(name: str) -> None:
    config = build(name).config
    for num_layers in (1, 2):
        small = shrink(config, num_layers)
        assert type(small) is type(config)
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        if name != "jamba" or num_layers > 1:  # its layer types follow from periods
            assert set(getattr(small, "layer_types", None) or ["full_attention"]) == kinds
        assert num_layers <= small.num_hidden_layers <= max(num_layers, 2, len(kinds))
