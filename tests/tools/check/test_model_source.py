"""The first layers of a model, with their own weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from padfree.model.load import load_model
from padfree.testing.models import build
from padfree.tools.check.model_source import default_layers, first_layers, layer_number, model_source
from tests.tools.check.cases import save_model


def test_stored_names_have_a_layer() -> None:
    assert layer_number("model.layers.3.mlp.experts.7.up_proj.weight") == 3
    assert layer_number("h.11.attn.c_attn.bias") == 11
    assert layer_number("model.embed_tokens.weight") is None


def test_lists_of_one_entry_per_layer_are_cut() -> None:
    kinds = ["sliding_attention"] * 5 + ["full_attention"] + ["sliding_attention"] * 3
    config = build("gemma3", num_hidden_layers=9, layer_types=kinds).config
    assert default_layers(config) == 6  # the first full one is the sixth
    short = first_layers(config, 6)
    assert (short.num_hidden_layers, short.layer_types) == (6, kinds[:6])
    assert first_layers(build("gpt2", num_hidden_layers=5).config, 3).n_layer == 3
    assert default_layers(build("qwen3", num_hidden_layers=9).config) == 4
    assert default_layers(build("qwen3").config) == 2
    assert default_layers(build("deepseek_v3", num_hidden_layers=8, first_k_dense_replace=5).config) == 6


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "gpt2"])
def test_first_layers_keep_their_weights(name: str, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", name, num_hidden_layers=3)
    whole = dict(load_model(folder).named_parameters())
    with model_source(folder, layers=2) as found:
        assert (found.num_layers, found.total_layers, found.random_weights) == (2, 3, False)
        assert found.source != folder
        part = dict(load_model(found.source).named_parameters())
    assert not Path(str(found.source)).exists()
    last = {key for key in whole if layer_number(key) == 2}
    assert last
    assert part.keys() == whole.keys() - last
    for key, parameter in part.items():
        assert torch.equal(parameter, whole[key]), key


def test_a_whole_model_and_a_config_are_taken_as_they_are(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "qwen3")
    with model_source(folder) as found:
        assert (found.source, found.num_layers, found.name) == (folder, 2, "Qwen3ForCausalLM")
    with model_source(build("qwen3", num_hidden_layers=9).config, layers=3) as found:
        assert (found.config.num_hidden_layers, found.total_layers, found.random_weights) == (3, 9, True)
        assert found.source is found.config
    with model_source(build("qwen3", num_hidden_layers=9).config, full=True) as found:
        assert found.num_layers == 9


def test_what_cannot_be_is_refused() -> None:
    config = build("qwen3").config
    for options, message in (
        ({"layers": 0}, "layers: 0 is not a positive number"),
        ({"layers": 2, "full": True}, "layers: 2 cannot be combined with full"),
    ):
        with pytest.raises(ValueError, match=message), model_source(config, **options):
            pass
