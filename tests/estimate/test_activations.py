"""The estimate of activations against what autograd saves."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from padfree.cp.shard import shard
from padfree.estimate.activations import feature_bytes, layer_bytes, token_bytes
from padfree.layers.compile import compile_layers
from padfree.layers.matmuls import is_matmul
from padfree.layers.recompute import recompute_layers
from padfree.model import attach, hidden_states
from padfree.model.parts import freeze
from padfree.model.structure import layers_of
from padfree.model.vision.families import need_family
from padfree.packing.collate import collate
from padfree.testing.models import ARCHITECTURES, build, row
from padfree.testing.vision_models import build_vision, picture, shown
from tests.estimate.test_memory import num_bytes

TOKENS = (130, 126)


class Products(TorchDispatchMode):
    """Bytes of the results that selective checkpointing keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if is_matmul(func, "after autograd"):
            self.kept += num_bytes([result])
        return result


def kept_bytes(model: PreTrainedModel, dtype: torch.dtype, checkpointing: str, *, compiled: bool = False) -> float:
    """Bytes per token that forward keeps for backward, except weights and buffers."""
    attach(model)
    if compiled:
        compile_layers(layers_of(model), "aot_eager_decomp_partition", "selective")
    elif checkpointing != "none":
        recompute_layers(layers_of(model), checkpointing)  # type: ignore[arg-type]
    model.to(dtype)
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    seen: dict[int, int] = {}
    alive = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    products = Products()
    counting = nullcontext() if compiled else products  # under this mode nothing would be compiled
    with counting, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden_states(model, shard(row(TOKENS)))
    cached = products.kept if checkpointing == "selective" else 0
    return (sum(seen.values()) + cached) / sum(TOKENS)


SIZES: dict[torch.dtype, int] = {torch.float32: 4, torch.bfloat16: 2}
TRIED = ["llama", "qwen3", "gemma3", "qwen3_moe", "deepseek_v3", "starcoder2", "gpt2", "phi3"]


@pytest.mark.parametrize("dtype", SIZES, ids=str)
@pytest.mark.parametrize("name", TRIED)
def test_activations_of_many_architectures(name: str, dtype: torch.dtype) -> None:
    assert name in ARCHITECTURES
    changes = {"intermediate_size": 256 if name == "gpt2" else 160, "moe_intermediate_size": 48}
    model = build(name, **changes)
    found = token_bytes(model, SIZES[dtype], "none")
    assert found == pytest.approx(kept_bytes(model, dtype, "none"), rel=0.3)


@pytest.mark.parametrize("dtype", SIZES, ids=str)
@pytest.mark.parametrize("checkpointing", ["full", "selective"])
def test_activations_with_checkpointing(checkpointing: str, dtype: torch.dtype) -> None:
    model = build("qwen3", num_hidden_layers=3, intermediate_size=160)
    found = token_bytes(model, SIZES[dtype], checkpointing)  # type: ignore[arg-type]
    assert found < token_bytes(model, SIZES[dtype], "none")
    assert found == pytest.approx(kept_bytes(model, dtype, checkpointing), rel=0.1)


def test_activations_of_compiled_layers() -> None:
    model = build("qwen3", num_hidden_layers=1, intermediate_size=160)
    found = token_bytes(model, 4, "selective", compiled=True)
    assert found < token_bytes(model, 4, "selective")
    assert found == pytest.approx(kept_bytes(model, torch.float32, "selective", compiled=True), rel=0.1)


def test_a_layer_of_llama_by_hand() -> None:
    """D 64, q 64, k v 32, 4 heads, I 64, bfloat16: norms 2 · 6 · 64, inputs 2 · 2 · 64, attention, MLP 4 · 2 · 64."""
    model = build("llama")
    expected = 2 * 6 * 64 + 2 * 2 * 64 + 2 * (64 + 32 + 32 + 64) + 4 * 4 + 4 * 2 * 64
    assert layer_bytes(model.config, layers_of(model)[0], 2) == expected


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen2_5_vl", "internvl", "mistral3"])
def test_activations_of_a_tower(name: str) -> None:
    model = attach(build_vision(name))
    local = shard(collate([shown(model, [3, picture(model, 0, rows=2, columns=12), 3])]))
    assert local.images is not None
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    seen: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            seen[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        need_family(model).encode(model.base_model, local.images.inputs)
    kept = sum(tensor.untyped_storage().nbytes() for tensor in seen.values()) / sum(local.images.counts)
    found = feature_bytes(model, 4, "none")
    assert found == pytest.approx(kept, rel=0.2)
    assert feature_bytes(model, 4, "full") < found / 2
    # Beside compiled layers, the blocks of a tower keep everything with these values.
    assert feature_bytes(model, 4, "selective") == feature_bytes(model, 4, "2 host, 1 none") == found
    freeze(model, ["tower"])
    assert 0 < feature_bytes(model, 4, "none") < found / 2
    freeze(model, ["projector"])
    assert feature_bytes(model, 4, "none") == 0
    assert feature_bytes(build("qwen3"), 4, "none") == 0
