"""`check_sampler`: equal bits for dense models on a CPU, and a planted fault is named."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from padfree.cli.main import main
from padfree.rollout.engines.in_process.cached_model import CachedModel
from padfree.testing.models import VOCABULARY, build, save_with_tokenizer
from padfree.tools.check import check_sampler, sampler_check

SAMPLED = 12


def prompts(*lengths: int) -> list[Any]:
    generator = np.random.default_rng(0)
    return [generator.integers(0, VOCABULARY, length) for length in lengths]


def check(model: PreTrainedModel, **options: Any) -> Any:
    return check_sampler(model, prompts(5, 1, 130), **{"max_new_tokens": SAMPLED, "backend": "tiles", **options})


@pytest.mark.parametrize(
    ("name", "temperature"),
    [
        ("llama", 1.0),
        ("qwen3", 0.7),
        ("gemma2", 0.7),
        ("gemma3", 1.0),
        ("olmo2", 0.7),
        ("phi3", 1.0),
        ("gpt_neox", 1.0),
        ("phi", 0.7),
        ("cohere", 1.0),
        ("olmo", 1.0),
        ("apertus", 1.0),
        ("qwen3_moe", 1.0),
        ("qwen2_moe", 0.7),
        ("gpt_oss", 0.7),
        ("deepseek_v3", 1.0),
    ],
)
def test_sampler_and_trainer_agree_to_the_bit(name: str, temperature: float) -> None:
    report = check(build(name).eval(), temperature=temperature)
    assert report.unequal == 0, report.verdict
    assert report.num_tokens == 3 * SAMPLED
    assert report.problem is None
    assert "agree to the bit" in report.verdict


def split_sum(linear: Any, x: Tensor) -> Tensor:
    """A linear layer that sums each half of K by itself, as a library does when it splits K."""
    half = x.shape[-1] // 2
    result = nn.functional.linear(x[..., :half], linear.weight[:, :half])
    return result + nn.functional.linear(x[..., half:], linear.weight[:, half:])


def mean_of_halves(norm: Any, x: Tensor) -> Tensor:
    """An RMSNorm that adds up the squares of the two halves of a vector separately, as a split sum does."""
    first, second = (half.flip(-1).pow(2).mean(-1, keepdim=True) for half in x.chunk(2, -1))
    scaled: Tensor = x * torch.rsqrt((first + second) / 2 + norm.variance_epsilon)
    return norm.weight * scaled  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("layer", "path", "fault"),
    [
        (0, "self_attn.q_proj", split_sum),
        (1, "self_attn.o_proj", split_sum),
        (1, "mlp.down_proj", split_sum),
        (1, "post_attention_layernorm", mean_of_halves),
    ],
)
def test_a_planted_fault_is_named(
    layer: int, path: str, fault: Callable[[Any, Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling_model = sampler_check.sampling_model

    def with_fault(*arguments: Any) -> PreTrainedModel:
        model = sampling_model(*arguments)
        module = model.model.layers[layer].get_submodule(path)
        module.forward = partial(fault, module)
        return model

    monkeypatch.setattr(sampler_check, "sampling_model", with_fault)
    report = check(build("llama", num_hidden_layers=3).eval())
    assert not report.passed
    assert report.operator == f"layer {layer}, {path}"
    assert report.operator in report.verdict


def with_other_sums(module: nn.Module) -> Callable[..., Any]:
    """The forward of a module in float64, rounded at the end: as if every sum had another order."""
    double = copy.deepcopy(module).double()

    def forward(*inputs: Tensor) -> Any:
        results = double(*(x.double() if x.is_floating_point() else x for x in inputs))
        if isinstance(results, Tensor):
            return results.float()
        return tuple(x.float() if x.is_floating_point() else x for x in results)

    return forward


@pytest.mark.parametrize(
    ("name", "path", "operator"),
    [
        ("phi", "model.layers.1.input_layernorm", "layer 1, input_layernorm"),
        ("qwen3", "model.layers.1.self_attn.q_norm", "layer 1, self_attn.q_norm"),
        ("llama", "model.norm", "model.norm"),
        ("qwen3_moe", "model.layers.1.mlp.experts", "layer 1, mlp.experts"),
        ("gpt_oss", "model.layers.0.mlp.router", "layer 0, mlp.router, result 0"),
        ("qwen2_moe", "model.layers.1.mlp.shared_expert_gate", "layer 1, mlp.shared_expert_gate"),
    ],
)
def test_a_fault_in_any_operator_is_named(name: str, path: str, operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_fault(model: PreTrainedModel, **options: Any) -> CachedModel:
        cached = CachedModel(model, **options)
        module = model.get_submodule(path)
        is_rms_norm = type(module).__name__.endswith("RMSNorm")  # computes in float32 for every dtype
        fault = partial(mean_of_halves, module) if is_rms_norm else with_other_sums(module)
        object.__setattr__(module, "forward", fault)
        return cached

    monkeypatch.setattr(sampler_check, "CachedModel", with_fault)
    report = check(build(name).eval())
    assert not report.passed
    assert report.operator == operator


def test_a_fault_at_a_late_token_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other RoPE angles from position 40 on: the search must go on to the first token that differs."""
    sampling_model = sampler_check.sampling_model

    def with_fault(*arguments: Any) -> PreTrainedModel:
        model = sampling_model(*arguments)
        rotary = model.model.rotary_emb
        angles = rotary.forward

        def forward(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
            cos, sin = angles(x, position_ids)
            return cos, torch.where(position_ids[..., None] >= 40, sin + 0.1, sin)

        rotary.forward = forward
        return model

    monkeypatch.setattr(sampler_check, "sampling_model", with_fault)
    report = check_sampler(build("llama").eval(), prompts(5), max_new_tokens=45, backend="tiles")
    assert 0 < report.unequal <= 10
    assert report.operator == "model.rotary_emb, result 1"


def test_attention_with_other_bits_is_named() -> None:
    """PyTorch's CPU attention in the trainer, whose bits depend on the number of queries, and tiles in the sampler."""
    model = build("llama").eval()
    report = check(model, backend="reference")
    if not report.passed:  # a library may happen to agree
        assert "self_attn.v_proj and layer 0, self_attn.o_proj" in report.operator


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(save_with_tokenizer(tmp_path / "model"))
    target = tmp_path / "report.json"
    arguments = ["check", "--model", model, "--samples", "3", "--max-length", "40", "--device", "cpu", "--sampler"]
    assert main([*arguments, "--json", str(target)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Qwen3ForCausalLM, float32")
    assert "rollout.exact=false" in lines[1]
    assert "'cpu'" in lines[1]
    assert lines[-1].startswith("passed: sampler and trainer agree to the bit")
    assert json.loads(target.read_text())["unequal"] == 0
    assert main([*arguments, "--loss", "dpo"]) == 1
    assert "--loss cannot be combined with --sampler" in capsys.readouterr().err.replace(": ", " ")
