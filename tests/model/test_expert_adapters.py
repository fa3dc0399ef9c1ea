"""Adapters on stacked experts: equal to a loop over experts, exported exactly, and alike in sampler and servers."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedModel

from padfree.config import LoraConfig, config_from_dict
from padfree.estimate.activations import layer_bytes
from padfree.estimate.memory import estimate_memory
from padfree.model.expert_adapters import grouped_matmul, has_expert_adapters, low_rank
from padfree.model.export import export_adapters, export_model
from padfree.model.load import load_model, named_tensors
from padfree.model.lora import ADAPTER, add_adapters, initial_values, is_adapter, needs_merging
from padfree.model.roles import roles_of
from padfree.model.structure import layers_of
from padfree.optim.optimizer import make_optimizer
from padfree.rollout.base import SamplingRequest
from padfree.rollout.engines.in_process.policy_model import PolicyModel
from padfree.rollout.engines.in_process.sampler import InProcessSampler
from padfree.rollout.engines.servers.start import served_model
from padfree.rollout.engines.servers.weight_sync import WeightStream
from padfree.rollout.sampling_rng import GREEDY
from padfree.testing.models import build
from padfree.tools.check.exact import float64_throughout, make_float64
from tests.refused import refused

MODELS = ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "glm4_moe"]
TARGETS = ("all-linear", "experts")
LORA = LoraConfig(rank=3, alpha=6.0, targets=TARGETS)


def adapted(name: str, lora: LoraConfig = LORA) -> PreTrainedModel:
    model = build(name)
    add_adapters(model, lora)
    disturb(model)
    return model


def disturb(model: nn.Module) -> None:
    """Give B non-zero values; with zeros, A would have no gradient."""
    with torch.no_grad():
        for name, tensor in named_tensors(model).items():
            if is_adapter(name) and ".lora_B." in name:
                tensor.copy_(initial_values(name.replace("lora_B", "lora_A"), tensor.shape, 7))


def logits(model: nn.Module, tokens: int = 12) -> Tensor:
    model.eval()
    with torch.no_grad():
        return model(input_ids=torch.arange(tokens)[None]).logits


def experts_of(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if has_expert_adapters(module)]


# The computation


def dense_loop(self: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Every token through every expert, one expert after the other; the weight of an expert not chosen is 0."""
    result = torch.zeros_like(hidden)
    for expert in range(self.num_experts):

        def project(name: str, x: Tensor, expert: int = expert) -> Tensor:
            weight = getattr(self, name)[expert]
            y = x @ (weight if self.is_transposed else weight.T)
            if self.has_bias:
                y = y + getattr(self, f"{name}_bias")[expert]
            if hasattr(self.lora_A, name):
                a, b = getattr(self.lora_A, name)[expert], getattr(self.lora_B, name)[expert]
                y = y + self.lora_scale * functional.linear(functional.linear(x, a), b)
            return y

        x = project("gate_up_proj" if self.has_gate else "up_proj", hidden)
        x = project("down_proj", self._apply_gate(x) if self.has_gate else self.act_fn(x))
        result = result + x * (weights * (index == expert)).sum(-1, keepdim=True)
    return result


@pytest.mark.parametrize(
    ("name", "tokens"),
    [*((name, 12) for name in (*MODELS, "qwen2_moe", "nemotron_h")), ("qwen3_moe", 1), ("gpt_oss", 1)],
)
def test_loss_and_gradients_are_those_of_a_loop_over_experts(name: str, tokens: int) -> None:
    """In float64. One token leaves experts without tokens."""
    model = adapted(name)
    make_float64(model)
    loop = copy.deepcopy(model)
    empty = []
    for module in experts_of(loop):
        object.__setattr__(module, "forward", MethodType(dense_loop, module))
    for module in experts_of(model):
        module.register_forward_pre_hook(lambda module, args: empty.append(module.num_experts - len(args[1].unique())))

    def outcome(model: PreTrainedModel) -> tuple[Tensor, dict[str, Tensor | None]]:
        ids = torch.randint(0, model.config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(1))
        with float64_throughout():
            scores = model(input_ids=ids).logits.double().log_softmax(-1)
            loss = -scores[0, :, 3].sum()
            loss.backward()
        return loss, {name: parameter.grad for name, parameter in model.named_parameters()}

    (loss, found), (expected_loss, expected) = outcome(model), outcome(loop)
    assert len(empty) == len(experts_of(model)) > 0
    assert tokens > 1 or min(empty) > 0
    torch.testing.assert_close(loss, expected_loss, atol=0, rtol=1e-12)
    for key, gradient in expected.items():
        if not is_adapter(key):
            assert found[key] is None, key
            continue
        own = found[key]
        assert own is not None
        assert gradient is not None
        assert own.dtype == torch.float64
        assert own.abs().max() > 0 or tokens == 1, key
        torch.testing.assert_close(own, gradient, atol=1e-12 * float(gradient.abs().max()), rtol=0, msg=key)


@pytest.mark.parametrize("rank", [3, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_grouped_kernel_agrees_with_the_loop(dtype: torch.dtype, rank: int) -> None:
    """Also if the rank is not a multiple of the kernel's alignment, and for experts without tokens."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, 16, generator=generator)
    a = torch.randn(4, rank, 16, generator=generator) / 4
    b = torch.randn(4, 24, rank, generator=generator)
    offsets = torch.tensor([3, 3, 7, 7], dtype=torch.int32)

    def outcome(kind: torch.dtype) -> list[Tensor]:
        leaves = [tensor.detach().to(dtype).to(kind, copy=True).requires_grad_() for tensor in (x, a, b)]
        result = low_rank(*leaves, offsets)
        (result * torch.arange(24, dtype=kind)).sum().backward()
        return [result.detach(), *(leaf.grad for leaf in leaves)]  # type: ignore[list-item]

    for found, expected in zip(outcome(dtype), outcome(torch.float64), strict=True):
        assert found.dtype == dtype
        bound = 8 * torch.finfo(dtype).eps * float(expected.abs().max())
        torch.testing.assert_close(found.double(), expected, atol=bound, rtol=0)


def test_sizes_that_the_kernel_does_not_take_are_computed() -> None:
    x, weight = torch.randn(5, 6), torch.randn(2, 6, 3)
    found = grouped_matmul(x, weight, torch.tensor([2, 5], dtype=torch.int32))
    torch.testing.assert_close(found, torch.cat([x[:2] @ weight[0], x[2:] @ weight[1]]))


@pytest.mark.parametrize("name", MODELS)
def test_it_begins_as_the_model_without_adapters(name: str) -> None:
    model, plain = build(name), build(name)
    add_adapters(model, LORA)
    torch.testing.assert_close(logits(model), logits(plain), atol=1e-5, rtol=0)
    assert (logits(adapted(name)) - logits(plain)).abs().max() > 1e-2


def test_dropout_is_active_in_training_only() -> None:
    model = adapted("qwen3_moe", LoraConfig(rank=3, dropout=0.5, targets=("experts",)))
    ids = torch.arange(12)[None]
    first, second = (model.train()(input_ids=ids).logits for _ in range(2))
    assert not torch.equal(first, second)
    torch.testing.assert_close(logits(model), logits(adapted("qwen3_moe", LoraConfig(rank=3, targets=("experts",)))))


ROUTERS = {**dict.fromkeys(MODELS, "mlp.gate"), "gpt_oss": "mlp.router", "llama4": "router", "jamba": "router"}


@pytest.mark.parametrize("name", [*ROUTERS, "qwen3_next", "lfm2_moe"])
def test_the_adapter_of_a_router_is_added_to_its_weight(name: str) -> None:
    """In float64: the logits of the merged weight, and the gradients that follow from the gradient of that weight."""
    ending = ROUTERS.get(name, "gate")
    model = adapted(name, LoraConfig(rank=3, alpha=6.0, targets=(ending,)))
    plain = build(name)
    for each in (model, plain):
        make_float64(each)
    routers = {key.removesuffix(".lora_A.default.weight") for key in found_names(model) if ".lora_A." in key}
    assert routers == {router for router, module in plain.named_modules() if router.endswith(f".{ending}")}

    def parts(router: str) -> tuple[nn.Parameter, nn.Parameter, nn.Parameter]:
        module: Any = model.get_submodule(router)
        merged: Any = plain.get_submodule(router)
        return module.lora_A[ADAPTER].weight, module.lora_B[ADAPTER].weight, merged.weight

    with torch.no_grad():
        for a, b, weight in map(parts, routers):
            weight += 2 * b @ a
    with float64_throughout():
        found, expected = (one.eval()(input_ids=torch.arange(12)[None]).logits for one in (model, plain))
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
        for each in (found, expected):
            each.log_softmax(-1)[..., 3].sum().backward()
    for a, b, weight in map(parts, routers):
        assert weight.grad is not None
        assert weight.grad.abs().max() > 0
        assert a.grad is not None
        assert b.grad is not None
        for own, derived in ((a.grad, 2 * b.T @ weight.grad), (b.grad, 2 * weight.grad @ a.T)):
            torch.testing.assert_close(own, derived, atol=1e-12 * float(weight.grad.abs().max()), rtol=1e-12)


# Targets


def found_names(model: nn.Module) -> set[str]:
    return {name for name in named_tensors(model) if is_adapter(name)}


def test_experts_are_named_as_a_whole_by_layer_or_by_weight() -> None:
    def adapted_names(*targets: str) -> set[str]:
        model = build("qwen3_moe")
        add_adapters(model, LoraConfig(rank=2, targets=targets))
        return {name.replace("lora_A.", "") for name in found_names(model) if ".lora_A." in name}

    layers = [f"model.layers.{number}.mlp.experts" for number in (0, 1)]
    assert adapted_names("experts") == {f"{layer}.{part}" for layer in layers for part in ("gate_up_proj", "down_proj")}
    assert adapted_names("experts.down_proj") == {f"{layer}.down_proj" for layer in layers}
    assert adapted_names("layers.1.mlp.experts") == {f"{layers[1]}.gate_up_proj", f"{layers[1]}.down_proj"}
    assert not any("experts" in name for name in adapted_names("all-linear"))
    both = adapted_names("all-linear", "experts")
    assert both == adapted_names("all-linear") | adapted_names("experts")


def test_a_plain_name_does_not_select_experts() -> None:
    """`down_proj` is a layer of the shared expert and of dense layers, and a weight of the experts."""
    model = build("glm4_moe")
    add_adapters(model, LoraConfig(rank=2, targets=("down_proj",)))
    assert {name.split(".lora_")[0] for name in found_names(model)} == {
        "model.layers.0.mlp.down_proj",
        "model.layers.1.mlp.shared_experts.down_proj",
    }


def test_experts_that_cannot_be_adapted_are_refused() -> None:
    with refused("lora.targets", "experts interface"):
        add_adapters(build("llama4"), LORA)
    with refused("lora.targets", "no module 'experts'"):
        add_adapters(build("qwen3"), LORA)
    with refused("lora.targets", "names both 'all-linear' and single linear layers"):
        add_adapters(build("qwen3_moe"), LoraConfig(rank=2, targets=("all-linear", "experts", "q_proj")))


def test_their_role_is_that_of_experts() -> None:
    model = adapted("qwen3_moe")
    roles = roles_of(model)
    for name, parameter in model.named_parameters():
        if ".experts.lora_" in name:
            assert roles[parameter] == "expert"


# Exports


@pytest.mark.parametrize(
    "targets",
    [TARGETS, ("experts",), ("experts.down_proj",), ("layers.1.mlp.experts",), (*TARGETS, "router"), ("router",)],
)
@pytest.mark.parametrize("name", MODELS)
def test_peft_loads_the_adapters(name: str, targets: tuple[str, ...], tmp_path: Path) -> None:
    from peft import PeftModel, get_peft_model_state_dict

    build(name).save_pretrained(tmp_path / "base")
    targets = tuple(ROUTERS[name] if target == "router" else target for target in targets)
    lora = LoraConfig(rank=3, alpha=6.0, dropout=0.1, targets=targets)
    model = load_model(tmp_path / "base", shard=lambda model: add_adapters(model, lora))
    disturb(model)
    export_adapters(model, tmp_path / "adapter", base=str(tmp_path / "base"))
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    before = logits(base)
    loaded: Any = PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert set(get_peft_model_state_dict(loaded)) == set(load_file(tmp_path / "adapter" / "adapter_model.safetensors"))
    torch.testing.assert_close(logits(loaded), logits(model), atol=2e-5, rtol=0)
    assert (logits(model) - before).abs().max() > 1e-3
    torch.testing.assert_close(logits(loaded.merge_and_unload()), logits(model), atol=2e-5, rtol=0)
    written = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert written["lora_dropout"] == 0, "PEFT refuses dropout for parameters"
    assert written["target_parameters"]


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
def test_peft_does_not_take_the_shared_expert_for_experts(name: str, tmp_path: Path) -> None:
    """PEFT replaces the target `gate_proj` of these models by the stacked weights of the experts."""
    from peft import PeftModel

    for targets in (("all-linear",), ("shared_experts.gate_proj",), ("self_attn.o_proj",)):
        build(name).save_pretrained(tmp_path / "base")
        model = adapted(name, LoraConfig(rank=3, targets=targets))
        assert not experts_of(model)
        export_adapters(model, tmp_path / targets[0], base=str(tmp_path / "base"))
        loaded = PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / targets[0]
        )
        torch.testing.assert_close(logits(loaded), logits(model), atol=2e-5, rtol=0)
        assert (logits(model) - logits(build(name))).abs().max() > 1e-3
        assert needs_merging(model) == (targets != ("self_attn.o_proj",))


@pytest.mark.parametrize("name", MODELS)
def test_merged_export_is_the_adapted_model(name: str, tmp_path: Path) -> None:
    model = adapted(name, LoraConfig(rank=3, alpha=6.0, targets=(*TARGETS, ROUTERS[name])))
    export_model(model, tmp_path)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not found_names(merged)
    difference = (logits(merged) - logits(model)).abs().max()
    assert difference < 1e-5 * logits(model).abs().max().clamp(min=1)
    assert (logits(merged) - logits(build(name))).abs().max() > 1e-2


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_merged_weights_are_exact_in_float64(name: str) -> None:
    from padfree.model.export import whole_tensors

    model = adapted(name, LoraConfig(rank=3, alpha=6.0, targets=("experts",)))
    make_float64(model)
    plain = build(name)
    make_float64(plain)
    with torch.no_grad(), float64_throughout():
        own = named_tensors(plain)
        for key, tensor in whole_tensors(model):
            assert tensor.dtype == torch.float64 or not tensor.is_floating_point()
            own[key].copy_(tensor)
        found, expected = (one(input_ids=torch.arange(12)[None]).logits for one in (plain.eval(), model.eval()))
    assert expected.dtype == torch.float64
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)


# Sampler and servers


@pytest.mark.parametrize("name", MODELS)
def test_the_sampler_samples_with_the_adapters(name: str) -> None:
    model = adapted(name)
    sampler = InProcessSampler(
        PolicyModel(model, torch.float32, torch.device("cpu")), stops=(), temperature=1.0, batch_size=4
    )
    sampler.update_weights(model, 0)
    prompt = [5, 9, 2]
    (response,) = sampler.sample([SamplingRequest(tokens=np.array(prompt), max_new_tokens=6, key=GREEDY)])

    def greedy(model: PreTrainedModel) -> list[int]:
        tokens = list(prompt)
        with torch.no_grad():
            for _ in range(6):
                tokens.append(int(model.eval()(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
        return tokens[len(prompt) :]

    assert list(response.tokens) == greedy(model)
    assert greedy(model) != greedy(build(name)), "the adapters change the response"
    sampler.close()


def test_servers_get_merged_weights() -> None:
    """Servers may drop or refuse adapters in the `target_parameters` format."""
    config = config_from_dict(
        {
            "model": {"path": "m"},
            "data": {"path": "d"},
            "batch": {"samples": 8, "max_tokens": 64},
            "lora": {"rank": 3, "targets": ["all-linear", "experts"]},
            "run": {"folder": "f"},
        }
    )
    model = adapted("qwen3_moe")
    served = served_model(config, model, lambda text, **_: {"input_ids": [1, 2]})
    assert (served.lora_rank, list(served.adapted)) == (0, [])
    plain = adapted("qwen3_moe", LoraConfig(rank=3))
    served = served_model(config, plain, lambda text, **_: {"input_ids": [1, 2]})
    assert (served.lora_rank, list(served.adapted)) == (3, ["k_proj", "o_proj", "q_proj", "v_proj"])

    def streamed(model: PreTrainedModel) -> dict[str, Tensor]:
        buckets = WeightStream(model, torch.float32).buckets(model, keep=True)
        return {name: tensor for bucket in buckets for name, tensor in bucket.tensors}

    before, after = streamed(build("qwen3_moe")), streamed(model)
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if "_proj." in name}
    assert any(".experts.3.down_proj." in name for name in changed)


# Estimates


@pytest.mark.parametrize(("name", "optimizer"), [*((name, "adamw") for name in MODELS), ("qwen3_moe", "muon")])
def test_the_estimate_counts_the_adapters(name: str, optimizer: str) -> None:
    config = config_from_dict(
        {
            "model": {"path": "m"},
            "data": {"path": "d"},
            "batch": {"samples": 8, "max_tokens": 64},
            "lora": {"rank": 3, "targets": ["all-linear", "experts"]},
            "optimizer": {"name": optimizer},
            "run": {"folder": "f"},
            "parallel": {"compile": "none", "checkpointing": "none", "reshard": True},
        }
    )
    model = adapted(name)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert {name for name, parameter in model.named_parameters() if parameter.requires_grad} == found_names(model)
    for parameter in trained:
        parameter.grad = torch.ones_like(parameter)
    updated = make_optimizer(model, config.optimizer)
    updated.step()
    moments = [tensor for state in updated.state.values() for key, tensor in state.items() if key != "step"]
    found = estimate_memory(config, build(name), processes=1, device_type="cpu")
    assert found.trained == sum(parameter.numel() for parameter in trained)
    assert found.parameters == sum(parameter.numel() for parameter in build(name).parameters())
    assert found.weights == 4 * (found.trained + found.parameters)
    assert found.gradients == 4 * found.trained
    assert found.optimizer == 4 * sum(tensor.numel() for tensor in moments)
    largest = 4 * sum(-(-parameter.shape[0] // 3) * parameter[0].numel() for parameter in trained)
    assert estimate_memory(config, build(name), processes=3, device_type="cpu").gradients == largest


def test_activations_of_the_adapters_are_counted() -> None:
    """Each of k experts per token keeps `rank` numbers for each of its two adapters."""
    model, plain = adapted("qwen3_moe", LoraConfig(rank=3, targets=("experts",))), build("qwen3_moe")
    before, after = (layer_bytes(each.config, layers_of(each)[0], 4) for each in (plain, model))
    assert after - before == 4 * 2 * 3 * plain.config.num_experts_per_tok


def test_config_of_peft_is_kept_with_the_model() -> None:
    model = adapted("glm4_moe", LoraConfig(rank=3, alpha=12.0, targets=("experts",)))
    config = model.peft_config[ADAPTER]
    assert config.lora_alpha / config.r == 4
    assert config.target_parameters == ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
