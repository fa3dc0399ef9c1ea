"""Adapters: the gradients of plain PEFT, the same on any number of ranks, exported exactly."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from padfree.config import LoraConfig
from padfree.cp.shard import shard
from padfree.distributed import make_mesh
from padfree.head import score
from padfree.model import attach, hidden_states
from padfree.model.export import export_adapters, export_model
from padfree.model.load import load_model
from padfree.model.lora import ADAPTER, add_adapters, initial_values, is_adapter
from padfree.model.mixers import installed
from padfree.model.named_tensors import named_tensors
from padfree.packing import pack
from padfree.sample import Sample
from padfree.sharding.parallelize import parallelize, transformations
from padfree.testing.models import build
from tests.ranks import run_ranks
from tests.refused import refused
from tests.rounding import assert_same_but_for_rounding, in_float64

VOCABULARY = 40
SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": VOCABULARY}
LENGTHS = (5, 9, 2, 7)
LORA = LoraConfig(rank=3, alpha=6.0)


def small(name: str) -> PreTrainedModel:
    return build(name, **({} if name in ("gpt2", "bamba") else SIZES))


def samples() -> list[Sample]:
    rng = np.random.default_rng(0)
    return [Sample(tokens=rng.integers(0, VOCABULARY, length)) for length in LENGTHS]


def disturb(model: nn.Module) -> None:
    """Give B non-zero values, the same on any number of ranks; with zeros, A would have no gradient."""
    with torch.no_grad():
        for name, tensor in named_tensors(model).items():
            if is_adapter(name) and ".lora_B." in name:
                whole = initial_values(name.replace("lora_B", "lora_A"), tensor.shape, 7)
                if isinstance(tensor, DTensor):
                    whole = torch.distributed.tensor.distribute_tensor(whole, tensor.device_mesh, tensor.placements)
                tensor.copy_(whole)


def packed_loss(model: PreTrainedModel) -> Tensor:
    (batch,) = pack(samples(), max_tokens=100)
    local = shard(batch)
    head = model.get_output_embeddings().weight
    return -(score(hidden_states(model, local), head, local.labels).logprobs).sum()


def logits(model: nn.Module) -> Tensor:
    model.eval()
    with torch.no_grad():
        return model(input_ids=torch.arange(12)[None]).logits


# Injection


MIXERS = {
    "qwen3_5": {"in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"},
    "jamba": {"in_proj", "x_proj", "out_proj"},
    "bamba": {"in_proj"},
    "lfm2": {"in_proj", "out_proj"},
    "minimax": {"qkv_proj", "output_gate", "out_proj"},
}
"""The linear layers that adapters find in their mixers."""


@pytest.mark.parametrize("name", ["qwen3", "gpt2", "qwen3_moe", "llama4", *MIXERS])
def test_gradients_are_those_of_peft_one_at_a_time(name: str) -> None:
    """Also in GPT-2 with transposed weights, next to frozen experts, and in mixers."""
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model

    model = attach(small(name))
    add_adapters(model, LORA)
    disturb(model)
    packed_loss(model).backward()
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained
    assert trained == {name for name in named_tensors(model) if is_adapter(name)}

    targets = sorted({name.split(".lora_")[0] for name in trained})
    mixers = {name: module for name, module in model.named_modules() if installed(module)}
    assert not any(target.endswith("router") for target in targets)
    inside = {target.removeprefix(f"{mixer}.") for target in targets for mixer in mixers if target.startswith(mixer)}
    assert inside == MIXERS.get(name, set())
    plain: Any = get_peft_model(
        small(name), PeftConfig(r=3, lora_alpha=6, target_modules=targets, fan_in_fan_out=name == "gpt2")
    )
    disturb(plain.base_model.model)
    with torch.no_grad():
        for key, tensor in named_tensors(plain.base_model.model).items():
            if ".lora_A." in key:
                tensor.copy_(initial_values(key, tensor.shape, 0))

    def one_at_a_time(plain: Any) -> dict[str, Any]:
        for sample in samples():
            tokens = torch.from_numpy(sample.tokens).long()[None]
            scores = plain(input_ids=tokens).logits[:, :-1].log_softmax(-1)
            (-scores.gather(-1, tokens[:, 1:, None]).sum()).backward()
        return {key: tensor.grad for key, tensor in named_tensors(plain.base_model.model).items() if is_adapter(key)}

    wide = one_at_a_time(in_float64(plain))
    found = {key: parameter.grad for key, parameter in model.named_parameters() if key in trained}
    assert all(gradient is not None and gradient.abs().max() > 1e-4 for gradient in found.values())
    assert_same_but_for_rounding(found, one_at_a_time(plain), wide)


def test_it_begins_as_the_model_without_adapters() -> None:
    model = small("qwen3")
    before = logits(model)
    add_adapters(model, LORA)
    assert torch.equal(logits(model), before)
    a = model.model.layers[0].self_attn.q_proj.lora_A[ADAPTER].weight
    assert a.shape == (3, 32)
    assert 0.5 / math.sqrt(32) < a.abs().max() <= 1 / math.sqrt(32)


def test_values_come_from_seed_and_name() -> None:
    shape = torch.Size((3, 32))
    first = initial_values("q.lora_A.default.weight", shape, 0)
    assert torch.equal(first, initial_values("q.lora_A.default.weight", shape, 0))
    assert not torch.equal(first, initial_values("k.lora_A.default.weight", shape, 0))
    assert not torch.equal(first, initial_values("q.lora_A.default.weight", shape, 1))


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (("q_proj", "lm_head"), r"lm_head \(Linear\) cannot have an adapter, .* head .*; choose from down_proj, "),
        (("embed_tokens",), r"model.embed_tokens \(Embedding\) .* not a linear layer; choose"),
        (("wq",), r"the model has no module 'wq'; choose from down_proj, gate_proj, k_proj"),
        (("all-linear", "q_proj"), r"remove either the single layers or 'all-linear' \(only experts"),
    ],
)
def test_targets_that_cannot_be_are_refused(targets: tuple[str, ...], message: str) -> None:
    with refused("lora.targets"):
        add_adapters(small("qwen3"), LoraConfig(rank=2, targets=targets))


def test_a_weight_that_a_mixer_reads_by_itself_is_refused() -> None:
    with refused("lora.targets"):
        add_adapters(small("jamba"), LoraConfig(rank=2, targets=("in_proj", "dt_proj")))


def test_named_targets_alone_are_adapted() -> None:
    model = small("qwen3")
    add_adapters(model, LoraConfig(rank=2, targets=("q_proj", "layers.1.mlp.up_proj")))
    found = {name.split(".lora_")[0] for name in named_tensors(model) if is_adapter(name)}
    layers = [f"model.layers.{layer}.self_attn.q_proj" for layer in (0, 1)]
    assert found == {*layers, "model.layers.1.mlp.up_proj"}


def test_peft_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with refused("lora.rank"):
        add_adapters(small("qwen3"), LORA)


# Loading and exporting


def test_merged_export_is_the_trained_model(tmp_path: Path) -> None:
    for name in ("llama_tied", "gpt2", "qwen3_moe"):
        small(name).save_pretrained(tmp_path / name)
        model = load_model(tmp_path / name, shard=lambda model: add_adapters(model, LORA))
        disturb(model)
        export_model(model, tmp_path / f"{name} merged")
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / f"{name} merged")
        assert not any(is_adapter(key) for key, _ in merged.named_parameters())
        torch.testing.assert_close(logits(merged), logits(model), atol=1e-4, rtol=0)
        assert (logits(merged) - logits(small(name))).abs().max() > 1e-2


def test_adapter_export_is_one_of_peft(tmp_path: Path) -> None:
    from peft import PeftModel

    for name in ("llama_tied", "gpt2", "qwen3_moe"):
        small(name).save_pretrained(tmp_path / name)
        model = load_model(tmp_path / name, shard=lambda model: add_adapters(model, LORA))
        disturb(model)
        folder = tmp_path / f"{name} adapter"
        for _ in range(2):  # an earlier export is replaced
            export_adapters(model, folder, base=str(tmp_path / name))
        written = ["adapter_config.json", "adapter_model.safetensors", "padfree_export.json"]
        assert sorted(path.name for path in folder.iterdir()) == written
        base = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        loaded = PeftModel.from_pretrained(base, folder)
        assert loaded.peft_config[ADAPTER].base_model_name_or_path == str(tmp_path / name)
        torch.testing.assert_close(logits(loaded), logits(model), atol=1e-6, rtol=0)
    with refused("export", "LlamaForCausalLM has no adapters"):
        export_adapters(small("llama"), tmp_path / "none")


def whole(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
        for name, tensor in named_tensors(model).items()
    }


def sharded(rank: int, world: int, folder: Path) -> tuple[dict[str, Tensor], set[torch.dtype]]:
    """Files read in slices, experts broadcast by rank 0, random weights; and bfloat16 base weights."""
    mesh = make_mesh("cpu")

    def load(source: Any, dtype: torch.dtype) -> PreTrainedModel:
        steps = transformations(mesh, lora=LORA, dtype=dtype, checkpointing="full")
        return load_model(source, shard=lambda model: parallelize(model, steps), seed=5)

    model = load(folder / "llama_tied", torch.float32)
    started = whole(model)
    disturb(model)
    export_model(model, folder / "merged")
    export_adapters(model, folder / "adapter")
    started |= {f"experts {name}": tensor for name, tensor in whole(load(folder / "qwen3_moe", torch.float32)).items()}
    lower = load(folder / "llama_tied" / "config.json", torch.bfloat16)
    started |= {f"random {name}": tensor for name, tensor in whole(lower).items()}
    return started, {parameter.dtype for parameter in lower.parameters() if parameter.requires_grad}


def test_two_ranks_load_and_export_what_one_does(tmp_path: Path) -> None:
    for name in ("llama_tied", "qwen3_moe"):
        small(name).save_pretrained(tmp_path / name)
    (found, trained), _ = run_ranks(2, sharded, tmp_path)
    assert trained == {torch.float32}

    def load(source: Path) -> PreTrainedModel:
        return load_model(source, shard=lambda model: add_adapters(model, LORA), seed=5)

    model = load(tmp_path / "llama_tied")
    expected = whole(model)
    expected |= {f"experts {name}": tensor for name, tensor in whole(load(tmp_path / "qwen3_moe")).items()}
    for name, tensor in whole(load(tmp_path / "llama_tied" / "config.json")).items():
        expected[f"random {name}"] = tensor if is_adapter(name) else tensor.bfloat16()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name

    from peft import PeftModel

    disturb(model)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(merged), logits(model), atol=1e-4, rtol=0)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "llama_tied")
    adapted = PeftModel.from_pretrained(base, tmp_path / "adapter")
    torch.testing.assert_close(logits(adapted), logits(model), atol=1e-6, rtol=0)
