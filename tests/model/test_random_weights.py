"""Random weights that are drawn on the device: the distributions of transformers, the same numbers on any ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig

from padfree.distributed import make_mesh
from padfree.model import load
from padfree.model.broadcast_weights import initialised
from padfree.model.load import load_model
from padfree.model.named_tensors import named_tensors
from padfree.model.random_weights import draw_weights, recipes_of
from padfree.sharding.parallelize import parallelize, transformations
from padfree.testing.models import build
from tests.ranks import run_ranks

CPU = torch.device("cpu")


def config_of(name: str) -> PreTrainedConfig:
    found = build(name).config
    assert isinstance(found, PreTrainedConfig)
    return found


def drawn(config: PreTrainedConfig, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    recipes = recipes_of(config, dtype, False)
    assert recipes is not None
    like = named_tensors(initialised(config, dtype, False, seed))
    found = {name: torch.full(tensor.shape, -99, dtype=tensor.dtype) for name, tensor in like.items()}
    draw_weights(found, recipes, CPU, seed)
    return found


@pytest.mark.parametrize("name", ["qwen3", "llama_tied", "gpt2", "gemma3", "qwen3_moe", "deepseek_v3", "phi3", "lfm2"])
def test_tensors_are_distributed_as_transformers_draws_them(name: str) -> None:
    """Constants are the same; other tensors have the same mean and standard deviation."""
    config = config_of(name)
    found, expected = drawn(config), named_tensors(initialised(config, torch.float32, False, 0))
    assert found.keys() == expected.keys()
    for key, ours in found.items():
        theirs = expected[key].detach()
        assert ours.shape == theirs.shape
        if theirs.numel() == 1 or float(theirs.double().std()) == 0:
            assert torch.equal(ours, theirs), key
            continue
        spread, count = float(theirs.double().std()), theirs.numel()
        assert not torch.equal(ours, theirs), key
        assert float(ours.double().std()) == pytest.approx(spread, rel=6 / count**0.5), key
        assert abs(float(ours.double().mean() - theirs.double().mean())) < 8 * spread / count**0.5, key


def test_numbers_depend_on_seed_and_name_only() -> None:
    config = config_of("qwen3")
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first, again, other = drawn(config), drawn(config), drawn(config, seed=1)
    assert torch.equal(torch.get_rng_state(), state), "the caller's generator is left alone"
    more = drawn(build("qwen3", num_hidden_layers=3).config)
    weights = [name for name, tensor in first.items() if tensor.ndim > 1]
    for name in weights:
        assert torch.equal(first[name], again[name])
        assert torch.equal(first[name], more[name])
        assert not torch.equal(first[name], other[name])
    same_shape = [first[name] for name in weights if name.endswith(("gate_proj.weight", "up_proj.weight"))]
    assert not any(torch.equal(a, b) for i, a in enumerate(same_shape) for b in same_shape[:i])


def test_padding_rows_stay_zero() -> None:
    config = build("llama", pad_token_id=3).config
    embedding = drawn(config)["model.embed_tokens.weight"]
    assert (embedding[3] == 0).all()
    assert (embedding[4] != 0).any()


@pytest.mark.parametrize("name", ["mamba", "qwen3_next"])
def test_values_that_are_computed_from_other_tensors_are_left_to_transformers(name: str) -> None:
    assert recipes_of(config_of(name), torch.float32, False) is None


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def loaded(config: PreTrainedConfig, **changes: Any) -> dict[str, Tensor]:
    mesh = make_mesh("cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "DRAWN_ON", ("cpu",))
        patch.setattr(load, "broadcast_weights", None)  # not called
        steps = transformations(mesh, **changes)
        model = load_model(config, shard=lambda model: parallelize(model, steps), seed=3)
    return {name: whole(tensor) for name, tensor in named_tensors(model).items()}


def ranks(rank: int, world: int, config: PreTrainedConfig) -> dict[str, Tensor]:
    return loaded(config)


def test_the_same_numbers_on_any_number_of_ranks() -> None:
    """Odd sizes, tied embeddings, and parts of two ranks."""
    config = build("llama_tied", hidden_size=20, intermediate_size=27, head_dim=4).config
    (alone,) = run_ranks(1, ranks, config)
    for found in run_ranks(2, ranks, config):
        assert found.keys() == alone.keys()
        for name, tensor in found.items():
            assert torch.equal(tensor, alone[name]), name
