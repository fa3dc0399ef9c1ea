"""`rollout.exact`: the sampler with the trainer's kernels. On a CPU: the right tokens, pages, and reasons."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from padfree.config import LoraConfig, ParallelConfig, RolloutConfig
from padfree.rollout.engines.in_process import decode_attention, exact_attention, exact_operators
from padfree.rollout.engines.in_process.cached_model import CachedModel
from padfree.rollout.engines.in_process.decode import Decoder
from padfree.rollout.engines.in_process.exact_attention import PAGE_SIZE, step_keys
from padfree.rollout.engines.in_process.policy_model import PolicyModel
from padfree.rollout.engines.in_process.sampled_tokens import ACTIVE, OWN, PROMPT, STORED, WRITTEN
from padfree.train.rl.sampler_agreement import AGREED, SamplerAgreement
from padfree.warning import PadfreeWarning
from tests.rollout.sampling_cases import STOPS, TEMPERATURE, assert_responses, build, by_definition, group_requests

CPU = torch.device("cpu")
P = PAGE_SIZE


def exact_decoder(model: PreTrainedModel, **changes: Any) -> Decoder:
    policy = PolicyModel(model, torch.float32, CPU)
    policy.update(model)
    settings: dict[str, Any] = {
        "num_slots": 7, "temperature": TEMPERATURE, "stops": STOPS, "step_rows": (16, 8), **changes
    }  # fmt: skip
    return Decoder(CachedModel(policy.model, exact=True), **settings)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gpt_oss"])
def test_exact_sampling_samples_what_the_definition_samples(name: str) -> None:
    """Prompts end inside, at and after the border of a page. Slots are reused, and prompts are shared."""
    requests = group_requests((6, 1, P, P + 1, P + 2, 3), group=3, max_new_tokens_each=(30, 9))
    definition = build(name).eval()
    decoder = exact_decoder(build(name).eval())
    assert_responses(decoder.sample(requests), [by_definition(definition, request) for request in requests])
    # The second call reuses the cache.
    assert_responses(decoder.sample(requests[:4]), [by_definition(definition, request) for request in requests[:4]])


def test_computed_buffers_are_those_of_the_trained_model() -> None:
    """A GPU computes other frequencies of RoPE than a CPU, and a model may have been made on either."""
    model = build("qwen3").eval()
    frequencies = model.model.rotary_emb.inv_freq
    frequencies.copy_(torch.nextafter(frequencies, torch.tensor(2.0)))
    policy = PolicyModel(model, torch.float32, CPU)
    assert torch.equal(policy.model.model.rotary_emb.inv_freq, frequencies)


def test_a_small_cache_is_shared_by_waiting_responses() -> None:
    requests = group_requests((P + 5, 3), group=4, max_new_tokens_each=(20,))
    definition = build("qwen3").eval()
    model = build("qwen3").eval()
    decoder = exact_decoder(model)
    token_bytes = sum(shape.token_bytes for shape in decoder.model.layer_shapes())
    small = exact_decoder(model, cache_bytes=token_bytes * P * 6)
    assert_responses(small.sample(requests), [by_definition(definition, request) for request in requests])


def test_slots_share_the_whole_pages_of_a_prompt() -> None:
    slots = torch.zeros(5, 3, dtype=torch.int64)
    # Slot 0: 2 whole pages and 3 keys of the prompt at page 4, 5 own tokens. Slot 1: no prompt. Slot 2 is inactive.
    slots[[PROMPT, STORED, OWN, WRITTEN, ACTIVE], 0] = torch.tensor([4 * P, 2 * P + 3, 9 * P + 3, 5, 1])
    slots[[PROMPT, STORED, OWN, WRITTEN, ACTIVE], 1] = torch.tensor([0, 0, 11 * P, P, 1])
    step = step_keys(slots, 20 * P, 3 * P)
    assert step.lengths.tolist() == [2 * P + 3 + 5 + 1, P + 1, 1]
    assert step.place.tolist() == [9 * P + 3 + 5, 11 * P + P, 20 * P - 1]
    assert step.table[0, :3].tolist() == [4, 5, 9]
    assert step.table[1, :2].tolist() == [11, 12]
    assert step.table[2].tolist() == [19] * 4
    assert step.table.dtype == step.lengths.dtype == torch.int32


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (40, None), (None, 3.0)])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_paged_attention_is_decode_attention(window: int | None, softcap: float | None, with_sinks: bool) -> None:
    torch.manual_seed(0)
    heads, groups, size, pages = 2, 3, 8, 12
    keys, values = (torch.randn(pages * P, heads, size, dtype=torch.float64) for _ in range(2))
    slots = torch.zeros(9, 3, dtype=torch.int64)
    slots[[PROMPT, STORED, OWN, WRITTEN, ACTIVE], 0] = torch.tensor([P, 2 * P + 3, 4 * P + 3, 5, 1])
    slots[[PROMPT, STORED, OWN, WRITTEN, ACTIVE], 1] = torch.tensor([P, 2 * P + 3, 6 * P + 3, 0, 1])
    keys[4 * P : 4 * P + 3] = keys[6 * P : 6 * P + 3] = keys[3 * P : 3 * P + 3]
    values[4 * P : 4 * P + 3] = values[6 * P : 6 * P + 3] = values[3 * P : 3 * P + 3]
    q = torch.randn(3, heads * groups, size, dtype=torch.float64)
    k, v = (torch.randn(3, heads, size, dtype=torch.float64) for _ in range(2))
    sinks = torch.randn(heads * groups, dtype=torch.float64) if with_sinks else None
    rest = (sinks, 0.3, window, softcap, 3 * P)
    expected_keys, expected_values = keys.clone(), values.clone()
    expected = decode_attention.reference(q, k, v, expected_keys, expected_values, slots, *rest)
    found = exact_attention.exact_decode_attention(q, k, v, keys, values, slots, *rest, "reference")
    active = slots[ACTIVE] != 0
    torch.testing.assert_close(found[active], expected[active], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(keys[:-1], expected_keys[:-1], rtol=0, atol=0)
    torch.testing.assert_close(values[:-1], expected_values[:-1], rtol=0, atol=0)


# Reasons

SETTINGS: dict[str, Any] = {
    "rollout": RolloutConfig(reward="exact_match"),
    "parallel": ParallelConfig(compile="none", checkpointing="none", reshard=True),
    "lora": LoraConfig(),
    "dtype": torch.bfloat16,
    "attention": "auto",
}


@pytest.mark.parametrize(
    ("section", "changes", "named"),
    [
        ("rollout", {"engine": "vllm", "servers": ("http://a:1",)}, "rollout.engine=vllm"),
        ("lora", {"rank": 4, "dropout": 0.1}, "lora.dropout=0.1"),
        ("parallel", {"context": 2, "method": "ring"}, "parallel.method=ring"),
        ("parallel", {"context": "auto", "method": "ulysses"}, "parallel.method=ulysses"),
        ("parallel", {"expert": 2}, "parallel.expert=2"),
        ("parallel", {"compile": "inductor", "kernels": "none"}, "parallel.kernels=none"),
        ("rollout", {}, "CPU"),
    ],
)
def test_settings_that_prevent_equal_bits_are_named(section: str, changes: dict[str, Any], named: str) -> None:
    settings = {**SETTINGS, section: replace(SETTINGS[section], **changes)}
    assert named in (exact_operators.problem(build("qwen3"), CPU, **settings) or "")


DENSE = (
    "qwen3",
    "llama",
    "gemma2",
    "gemma3",
    "olmo2",
    "phi3",
    "mistral",
    "gpt_neox",
    "phi",
    "olmo",
    "cohere",
    "apertus",
)


@pytest.mark.parametrize("name", DENSE)
def test_dense_models_have_known_operators(name: str) -> None:
    assert exact_operators.model_problem(build(name), CPU) is None


@pytest.mark.parametrize(
    ("name", "named"),
    [("jamba", "linear_attention"), ("gpt2", "wpe"), ("opt", "embed_positions")],
)
def test_operators_without_known_bits_are_named(name: str, named: str) -> None:
    assert named in (exact_operators.model_problem(build(name), CPU) or "")


def test_an_unknown_module_in_a_layer_is_named() -> None:
    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

    model = build("qwen3")
    model.model.layers[1].mlp.extra = Mixing()
    assert "Mixing (mlp.extra)" in (exact_operators.model_problem(model, CPU) or "")


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "qwen2_moe", "olmoe", "granitemoe"])
def test_stacked_experts_are_accepted_on_a_cpu_and_on_a_gpu(name: str) -> None:
    model = build(name)
    assert exact_operators.model_problem(model, CPU) is None
    assert exact_operators.model_problem(model, torch.device("cuda")) is None


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("afmoe", "AfmoeSparseMoeBlock chooses experts"),
        ("minimax_m2", "MiniMaxM2TopKRouter needs other inputs"),
        ("gpt_oss", "sinks"),
        ("deepseek_v3", "latent"),
    ],
)
def test_mixtures_that_were_not_compared_on_a_gpu_are_named(name: str, named: str) -> None:
    assert named in (exact_operators.model_problem(build(name), torch.device("cuda")) or "")


def test_experts_without_a_grouped_kernel_are_named() -> None:
    model = build("qwen3_moe", moe_intermediate_size=36)
    reason = exact_operators.model_problem(model, torch.device("cuda")) or ""
    assert "4 experts with 36 inputs and 64 outputs has no grouped kernel" in reason


def test_layer_norm_is_accepted_on_a_cpu_only() -> None:
    gpu = torch.device("cuda")  # the GPU itself is not used
    assert "LayerNorm (input_layernorm)" in (exact_operators.model_problem(build("phi"), gpu) or "")


def test_a_norm_over_all_tokens_is_named() -> None:
    class TokenNorm(nn.LayerNorm):
        """Subtracts the mean over the tokens."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x - x.mean(-2, keepdim=True)

    model = build("phi")
    model.model.layers[1].input_layernorm = TokenNorm(64)
    assert "TokenNorm (input_layernorm)" in (exact_operators.model_problem(model, CPU) or "")


# What a run says


def test_a_run_says_once_that_sampler_and_trainer_agree() -> None:
    notes: list[str] = []
    steps: list[Any] = []
    agreement = SamplerAgreement(steps.append, notes.append)
    first = {"step": 0, "seconds/sampling": 1.0, "loss/sampler_difference": 0.0}
    agreement(first)
    agreement({"step": 1, "loss/sampler_difference": 0.3})  # the second update of the batch has other weights
    agreement({**first, "step": 2})
    assert notes == [AGREED]
    assert len(steps) == 3
    with pytest.warns(PadfreeWarning, match="differ by 1e-08 on average in step 3"):
        agreement({**first, "step": 3, "loss/sampler_difference": 1e-8})
    agreement({**first, "step": 4, "loss/sampler_difference": 1e-8})
