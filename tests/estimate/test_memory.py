"""The memory estimate against what models, optimizers and the head allocate."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from padfree.config import Config, LoraConfig, RolloutConfig, config_from_dict
from padfree.estimate.activations import cache_bytes, token_bytes
from padfree.estimate.memory import estimate_memory, head_bytes, key_copies
from padfree.head import fused_loss
from padfree.head.budget import choose_tile
from padfree.layers.float8 import use_float8
from padfree.model.lora import add_adapters
from padfree.model.roles import roles_of
from padfree.model.structure import skeleton
from padfree.optim.optimizer import make_optimizer
from padfree.testing.models import save_with_tokenizer
from tests.refused import refused
from tests.train.cases import small_model


def settings(**sections: dict[str, Any]) -> Config:
    values: dict[str, dict[str, Any]] = {
        "model": {"path": "m"},
        "data": {"path": "d"},
        "batch": {"samples": 8, "max_tokens": 64},
        "run": {"folder": "f"},
        "parallel": {"compile": "none", "checkpointing": "none", "reshard": True},  # settled
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return config_from_dict(values)


def num_bytes(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


# Permanent memory


@pytest.mark.parametrize("optimizer_name", ["adamw", "muon"])
@pytest.mark.parametrize("rank", [0, 3])
def test_weights_gradients_and_optimizer_state_are_exact(rank: int, optimizer_name: str) -> None:
    model = small_model()
    if rank:
        add_adapters(model, LoraConfig(rank=rank))
    config = settings(lora={"rank": rank}, optimizer={"name": optimizer_name})
    optimizer = make_optimizer(model, config.optimizer)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    moments = [tensor for state in optimizer.state.values() for name, tensor in state.items() if name != "step"]
    found = estimate_memory(config, small_model(), processes=1, device_type="cpu")
    assert found.weights == num_bytes(model.parameters())
    assert found.gradients == num_bytes(parameter.grad for parameter in trained)
    assert found.optimizer == num_bytes(moments)
    assert found.trained == sum(parameter.numel() for parameter in trained)
    assert found.parameters == sum(parameter.numel() for parameter in small_model().parameters())


def test_muon_stores_one_moment_of_hidden_matrices() -> None:
    model = small_model("qwen3_moe")
    roles = roles_of(model)
    found = estimate_memory(settings(optimizer={"name": "muon"}), model, processes=1, device_type="cpu")
    hidden = [each for each in model.parameters() if roles[each] in ("hidden", "expert")]
    assert found.optimizer == 2 * num_bytes(model.parameters()) - num_bytes(hidden)
    assert found.optimizer_state == "Muon's momentum, AdamW's two moments"
    critic = settings(optimizer={"name": "muon"}, lora={"rank": 2})
    assert estimate_memory(critic, model, processes=1, device_type="cpu").optimizer_state == "Muon's momentum"


def test_the_largest_shard_is_counted() -> None:
    """FSDP2 shards the first dimension like torch.chunk."""
    model = small_model(vocab_size=41)
    found = estimate_memory(settings(), model, processes=3, device_type="cpu")
    assert found.weights == num_bytes(torch.chunk(parameter, 3)[0] for parameter in model.parameters())
    replicated = estimate_memory(settings(parallel={"replicate": 3}), model, processes=3, device_type="cpu")
    assert replicated.weights == num_bytes(model.parameters())


def test_divided_experts_are_even_and_gathered_in_part() -> None:
    model = small_model("qwen3_moe")
    experts = [each for name, each in model.named_parameters() if ".experts." in name]
    whole = estimate_memory(settings(), model, processes=8, device_type="cpu")
    found = estimate_memory(settings(parallel={"expert": 2}), model, processes=8, device_type="cpu")
    # 4 experts on 8 ranks: without the division half of the ranks hold one expert each, and the others none
    saved = num_bytes(experts) // 4 - num_bytes(experts) // 8
    assert (whole.weights - found.weights, whole.gradients - found.gradients) == (saved, saved)
    assert whole.optimizer - found.optimizer == 2 * saved
    layer = num_bytes(experts) // 2  # of two layers; two are gathered, and one has gradients
    assert whole.gathered - found.gathered == 3 * layer // 2
    sent = 64 * 2 * 4 * 2 * 32  # tokens, sent and received, bytes, choices, hidden size
    assert found.working == whole.working + sent


def test_frozen_weights_are_bfloat16_where_the_run_is() -> None:
    config = settings(model={"dtype": "bfloat16"}, lora={"rank": 2})
    found = estimate_memory(config, small_model(), processes=1, device_type="cpu")
    assert found.weights == 2 * found.parameters + 4 * found.trained


def test_offload_moves_the_states_to_the_host() -> None:
    here = estimate_memory(settings(), small_model(), processes=2, device_type="cpu")
    there = estimate_memory(settings(parallel={"offload": True}), small_model(), processes=2, device_type="cpu")
    assert (here.host, there.host) == (0, here.states)
    assert there.device == here.device - here.states


def test_the_weights_of_the_last_sync_are_counted_on_the_host() -> None:
    def host(dtype: str, kind: str, *, processes: int = 1, device_type: str = "cpu", **sections: Any) -> int:
        servers = {"reward": "exact_match", "engine": "vllm", "servers": ["http://a:1"], "weight_sync": kind}
        config = settings(
            model={"dtype": dtype}, loss={"kind": "clip"}, batch={"samples": 8}, rollout=servers, **sections
        )
        return estimate_memory(config, small_model(), processes=processes, device_type=device_type).host

    parameters = sum(parameter.numel() for parameter in small_model().parameters())
    assert host("bfloat16", "auto") == host("bfloat16", "difference") == 2 * parameters
    assert host("float32", "difference") == 4 * parameters
    assert host("bfloat16", "full") == host("float32", "auto") == 0
    assert parameters <= host("bfloat16", "auto", processes=2) < 1.1 * parameters, "half of the model per rank"
    pinned = host("bfloat16", "auto", device_type="cuda")
    assert 2 * parameters < pinned < 4 * parameters, "the size of a pinned tensor is a power of two"
    pytest.importorskip("peft")
    assert host("bfloat16", "auto", lora={"rank": 2}) == 0, "only adapters are sent"


def test_activations_are_those_of_the_longest_micro_batch() -> None:
    model = small_model()
    found = estimate_memory(settings(), model, processes=1, device_type="cpu")
    assert (found.tokens, found.activations) == (64, 64 * token_bytes(model, 4, "none"))
    longer = estimate_memory(settings(), model, processes=1, device_type="cpu", longest=100)
    assert (longer.tokens, longer.activations) == (100, 100 * token_bytes(model, 4, "none"))


def test_reference_and_sampler(tmp_path: Path) -> None:
    folder = save_with_tokenizer(tmp_path)
    model = skeleton(str(folder))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    config = settings(
        loss={"kind": "clip", "kl_coefficient": 0.1},
        reference={"path": str(folder), "offload": True},
        rollout={"reward": "exact_match", "samples_per_prompt": 4, "max_new_tokens": 10, "max_concurrent": 3},
    )
    found = estimate_memory(config, model, processes=1, device_type="cpu", prompt_tokens=6)
    assert found.reference == found.host == 4 * parameters
    assert found.sampler == 0, "it samples from the trained weights"
    assert found.cache == 3 * 16 * cache_bytes(model, 4)
    assert not found.cache_stays
    several = estimate_memory(config, model, processes=2, device_type="cuda", prompt_tokens=6)
    assert several.sampler == 4 * parameters
    assert config.batch.samples is not None
    samples = math.ceil(config.batch.samples / 2)
    responses, prompts = min(3, samples), math.ceil(samples / 4)
    assert several.cache == (responses * 10 + prompts * 6) * cache_bytes(model, 4), "a prompt once for its responses"
    unshared = replace(config, batch=replace(config.batch, share_prefixes=False))
    without = estimate_memory(replace(unshared, rollout=RolloutConfig()), model, processes=2, device_type="cuda")
    several = estimate_memory(unshared, model, processes=2, device_type="cuda", prompt_tokens=6)
    assert several.device == without.device + several.sampler + several.cache + several.sampling
    limited = replace(config, rollout=replace(config.rollout, kv_cache_memory=1e-6))
    assert estimate_memory(limited, model, processes=2, device_type="cuda", prompt_tokens=6).cache == 1073
    text = model.config.get_text_config()
    assert cache_bytes(model, 2) == 2 * text.num_hidden_layers * text.num_key_value_heads * text.head_dim * 2


def test_kept_sets_need_memory_in_sampling_and_in_the_head(tmp_path: Path) -> None:
    """Two bytes of masks for each logit of a tile; in a decode step, what finds the kept set of each response."""
    budget = 1 << 30
    model = skeleton(str(save_with_tokenizer(tmp_path)))
    rollout = {"reward": "exact_match", "samples_per_prompt": 4, "max_new_tokens": 10, "max_concurrent": 3}
    plain, truncated = (
        estimate_memory(
            settings(loss={"kind": "clip"}, rollout={**rollout, **given}, parallel={"head_memory": "low"}),
            model,
            processes=1,
            device_type="cuda",
        )
        for given in ({}, {"top_p": 0.9})
    )
    vocabulary = model.config.get_text_config().vocab_size
    assert plain.sampling == 3 * vocabulary * 4
    assert truncated.sampling - plain.sampling == 28 * 3 * vocabulary
    tile = choose_tile(64, vocabulary, itemsize=4, device_type="cuda", budget=budget)
    assert truncated.working_parts.head - plain.working_parts.head == 2 * tile.rows * tile.columns


class Float8Copies(TorchDispatchMode):
    """Bytes of the float8 tensors that casts make."""

    def __init__(self) -> None:
        super().__init__()
        self.made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.name().startswith("padfree::float8_") and isinstance(result, tuple):
            self.made += result[0].numel()
        return result


def test_float8_copies_are_counted() -> None:
    """Casts of the widest linear layer in backward: dy twice, x once, and the weight."""
    model = small_model(hidden_size=64, intermediate_size=128)
    plain, float8 = (
        estimate_memory(
            settings(model={"dtype": "bfloat16"}, parallel={"linear": linear}), model, processes=1, device_type="cpu"
        )
        for linear in ("bfloat16", "float8")
    )
    linear = torch.nn.Linear(64, 128, bias=False)
    use_float8(linear, ("output", "input-gradient", "weight-gradient"))
    x = torch.randn(64, 64, requires_grad=True)
    y = linear(x)
    with Float8Copies() as copies:
        y.sum().backward()
    found = float8.working_parts.backward - plain.working_parts.backward
    assert found == 64 * (2 * 128 + 64) + 128 * 64
    assert found == copies.made


def test_keys_that_are_copied_for_shared_prefixes_count(tmp_path: Path) -> None:
    config = settings(
        loss={"kind": "clip"},
        rollout={"reward": "exact_match", "samples_per_prompt": 4, "max_new_tokens": 10, "max_concurrent": 3},
    )
    assert key_copies(config, 6) == (6 + 4 * 16) / (6 + 4 * 10)
    assert key_copies(replace(config, rollout=RolloutConfig()), 0) == 17 / 9
    assert key_copies(replace(config, batch=replace(config.batch, share_prefixes=False)), 6) == 0
    model = skeleton(str(save_with_tokenizer(tmp_path)))
    sizes = [
        estimate_memory(
            replace(config, batch=replace(config.batch, share_prefixes=share)), model, processes=1, device_type="cuda",
            prompt_tokens=6,
        ).working
        for share in (False, "auto")
    ]  # fmt: skip
    assert sizes[0] <= sizes[1]


def test_a_path_without_a_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no such"}')
    for path in (str(tmp_path / "nothing"), str(tmp_path)):
        with refused("reference.path") as error:
            skeleton(path, setting="reference.path")
        assert "\n" not in str(error.value)


# The head


class Buffers(TorchDispatchMode):
    """Bytes of the uninitialised buffers: the head allocates each of its buffers once."""

    def __init__(self) -> None:
        super().__init__()
        self.made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if "empty" in func.name():
            self.made += num_bytes([result])
        return result


@pytest.mark.parametrize("budget", [1 << 20, 1 << 28])
def test_the_head_allocates_what_is_estimated(budget: int) -> None:
    tokens, hidden, vocabulary = 300, 64, 2000
    states = torch.randn(tokens, hidden, requires_grad=True)
    weight = torch.randn(vocabulary, hidden, requires_grad=True)
    labels = torch.randint(0, vocabulary, (tokens,))
    with Buffers() as buffers:
        fused_loss(states, weight, labels, lambda logprobs, entropy, positions: -logprobs, memory=budget)
    found = head_bytes(tokens, hidden, vocabulary, size=4, device_type="cpu", budget=budget, weight_gradient=True)
    assert found == pytest.approx(buffers.made, rel=0.3)
