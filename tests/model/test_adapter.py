"""Stock models give the same results packed and one sample at a time, or are refused with a one-line error."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from padfree.batch import AttnContext, PackedBatch
from padfree.cp import shard
from padfree.model import TESTED, attach, interface
from padfree.testing.models import ARCHITECTURES, MIXERS, VOCABULARY, build, row
from tests.refused import refused
from tests.rounding import assert_same_but_for_rounding, in_float64, largest_difference, noise_of

LENGTHS = [19, 1, 12, 7]


def gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in model.named_parameters()
    }


def one_at_a_time(model: PreTrainedModel, batch: PackedBatch, weights: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits [real tokens, V] of the stock model, one call per sample, and the gradients."""
    samples = batch.unpack(batch.input_ids)
    logits = torch.cat([model(input_ids=sample[None], use_cache=False).logits[0] for sample in samples])
    (logits * weights[: len(logits)].to(logits.dtype)).sum().backward()
    return logits.detach(), gradients(model)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_packed_equals_one_at_a_time(name: str) -> None:
    batch = row(LENGTHS, pad=5)
    model = build(name)
    stock = copy.deepcopy(model)
    stock.set_attn_implementation("eager")
    weights = torch.randn(batch.num_tokens, VOCABULARY)

    attach(model)
    logits = model(**shard(batch).model_inputs()).logits[0]
    real = sum(LENGTHS)
    (logits[:real] * weights[:real]).sum().backward()

    wide_logits, wide_gradients = one_at_a_time(in_float64(stock), batch, weights)
    expected_logits, expected_gradients = one_at_a_time(stock, batch, weights)
    assert_same_but_for_rounding({"logits": logits[:real]}, {"logits": expected_logits}, {"logits": wide_logits})
    assert_same_but_for_rounding(gradients(model), expected_gradients, wide_gradients)
    if name in MIXERS:
        assert largest_difference({"logits": logits[:real]}, {"logits": expected_logits})[0] < 1e-5
        noise = noise_of(expected_gradients, wide_gradients)  # 1e-5 for Zamba
        assert largest_difference(gradients(model), expected_gradients)[0] < max(1e-5, 2 * noise)


def test_the_list_of_tested_architectures_is_the_tested_list() -> None:
    assert sorted({class_name for class_name, _ in ARCHITECTURES.values()}) == sorted(TESTED)
    assert len(set(TESTED)) == len(TESTED)


def test_attach_changes_nothing_but_the_attention() -> None:
    model = build("llama")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    config = model.config.to_dict()
    random_state = torch.get_rng_state()
    forward = type(model).forward
    assert attach(model, "cpu") is model
    assert torch.equal(torch.get_rng_state(), random_state)
    assert type(model).forward is forward
    assert model.config.to_dict() == config
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    attach(model)
    assert len(model._forward_pre_hooks) == 1, "attaching again adds nothing"


def test_the_stock_model_comes_back_with_its_own_attention() -> None:
    model = build("qwen3")
    batch = row([9])
    expected = model(input_ids=batch.input_ids[None]).logits
    attach(model)
    model.set_attn_implementation("sdpa")
    assert torch.equal(model(input_ids=batch.input_ids[None]).logits, expected)


@pytest.mark.parametrize(
    ("own", "asked", "used"), [("auto", "auto", "auto"), ("cpu", "auto", "cpu"), ("cpu", "reference", "reference")]
)
def test_the_backend_of_the_batch_wins_over_the_models(
    own: str, asked: str, used: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = attach(build("llama"), own)
    seen: list[str] = []

    def recording(q: Tensor, k: Tensor, v: Tensor, context: AttnContext, **options: Any) -> Tensor:
        seen.append(context.backend)
        return attend(q, k, v, context, **options)

    attend = interface.attend
    monkeypatch.setattr(interface, "attend", recording)
    model(**shard(row([5, 4]), backend=asked).model_inputs())
    assert seen == [used, used]


def test_no_mask_is_made_and_positions_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    model = attach(build("gemma3"))

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("transformers looked for packed sequences")

    monkeypatch.setattr(transformers.masking_utils, "find_packed_sequence_indices", refuse)
    inputs = shard(row([8, 5])).model_inputs()
    model(**inputs)
    model.set_attn_implementation("eager")
    with pytest.raises(AssertionError, match="looked for packed sequences"):
        model(**inputs)


# Wrong arguments


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"labels": torch.zeros(1, 13, dtype=torch.long)},
            r"labels: was passed to LlamaForCausalLM, .*; .*padfree\.head",
        ),
        ({"past_key_values": transformers.DynamicCache()}, r"past_key_values: was passed to LlamaForCausalLM"),
        ({"use_cache": None}, r"use_cache: is True"),
        (
            {"cu_seq_lens_q": torch.tensor([0, 13])},
            r"cu_seq_lens_q: was passed to LlamaAttention, but padfree's attention does not support this argument",
        ),
        ({"is_causal": False}, r"is_causal: is False in LlamaAttention"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_wrong_calls_are_refused(change: dict[str, Any], message: str) -> None:
    model = attach(build("llama"))
    inputs = {**shard(row([8, 5])).model_inputs(), **change}
    with pytest.raises(ValueError, match=message) as caught:
        model(**inputs)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=r"[a-z_]+: "):
        model.model(**inputs)


def test_attention_dropout_is_refused_in_training_and_absent_in_evaluation() -> None:
    model = attach(build("gpt2", attn_pdrop=0.1))
    inputs = shard(row([8, 5])).model_inputs()
    with refused("dropout"):
        model(**inputs)
    model.eval()
    model(**inputs)


@pytest.mark.parametrize(
    ("name", "parameters", "limit"),
    [
        (
            "phi3",
            {
                "rope_type": "longrope",
                "short_factor": [1.0] * 8,
                "long_factor": [2.0] * 8,
                "original_max_position_embeddings": 8,
                "partial_rotary_factor": 1.0,
                "rope_theta": 1e4,
            },
            8,
        ),
        ("llama", {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, 16),
    ],
)
def test_frequencies_that_follow_the_longest_sample_are_held_to_their_limit(
    name: str, parameters: dict[str, Any], limit: int
) -> None:
    original = {"original_max_position_embeddings": 8} if name == "phi3" else {}
    model = build(name, max_position_embeddings=16, rope_parameters=parameters, **original)
    stock = copy.deepcopy(model)
    attach(model)
    batch = row([limit, 3])
    logits = model(**shard(batch).model_inputs()).logits[0]
    samples = batch.unpack(batch.input_ids)
    expected = torch.cat([stock(input_ids=sample[None]).logits[0] for sample in samples])
    wide_stock = in_float64(stock)
    wide = torch.cat([wide_stock(input_ids=sample[None]).logits[0] for sample in samples])
    assert_same_but_for_rounding({"logits": logits}, {"logits": expected}, {"logits": wide})
    with refused("rope_parameters"):
        model(**shard(row([limit + 1, 3])).model_inputs())


# Models that cannot be attached


SMALL: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}
HEADS: dict[str, Any] = {**SMALL, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
LATER = "the attention of the model is not causal"


@pytest.mark.parametrize(
    ("class_name", "values", "reason"),
    [
        ("RwkvForCausalLM", {**SMALL, "attention_hidden_size": 32}, "RwkvFeedForward mixes tokens without"),
        ("RecurrentGemmaForCausalLM", {**HEADS, "lru_width": 32}, "attention_window_size"),
        ("BloomForCausalLM", {**SMALL, "n_head": 2}, "AttentionInterface"),
        (
            "StableLmForCausalLM",
            HEADS,
            "attn_context: did not reach StableLmAttention, because the model drops keyword arguments",
        ),
        ("NemotronForCausalLM", HEADS, "attn_context: did not reach NemotronAttention"),
        ("BertLMHeadModel", {**HEADS, "is_decoder": False}, "is_causal: is False in BertSelfAttention"),
        ("Gemma3ForCausalLM", {**HEADS, "use_bidirectional_attention": True}, LATER),
        ("LlamaForCausalLM", {**HEADS, "is_causal": False}, LATER),
        ("LlamaForCausalLM", {**HEADS, "attention_chunk_size": 16}, "attention_chunk_size is 16"),
        ("LlamaForCausalLM", {**HEADS, "local_window": 16}, "local_window 16 may imply a mask"),
        ("BartForConditionalGeneration", {"vocab_size": 64, "d_model": 32}, "an encoder and a decoder"),
    ],
)
def test_architectures_that_cannot_be_packed_are_refused(class_name: str, values: dict[str, Any], reason: str) -> None:
    model_class = getattr(transformers, class_name)
    with torch.device("meta"):
        model = model_class(model_class.config_class(**values))
    with refused("model", f"{class_name} cannot be trained packed: .*{reason}") as caught:
        attach(model)
    assert "\n" not in str(caught.value)
    assert not interface.is_attached(model.config)


def test_models_of_several_parts_are_refused() -> None:
    text = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "vocab_size": 64}
    vision = {
        "num_hidden_layers": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "image_size": 28,
        "patch_size": 14,
        "num_attention_heads": 2,
    }
    config = transformers.PaliGemmaConfig(text_config=text, vision_config=vision)
    with torch.device("meta"):
        model = transformers.PaliGemmaForConditionalGeneration(config)
    with refused("model", "attend to each other"):
        attach(model)


def test_a_context_for_another_length_is_refused_in_every_layer_of_a_model_without_the_check() -> None:
    """The attention function itself checks its arguments, even if the hook was removed."""
    model = attach(build("llama"))
    model._forward_pre_hooks.clear()
    model.model._forward_pre_hooks.clear()
    inputs = shard(row([8, 5])).model_inputs()
    other = shard(row([8])).context
    with pytest.raises(ValueError, match="is for 8 tokens"):
        model(**{**inputs, "attn_context": other})
    with refused("attn_context"):
        model(**{**inputs, "attn_context": None})
    with refused("attention_mask"):
        model(**{**inputs, "attention_mask": torch.zeros(1, 1, 13, 13)})
    model(**{**inputs, "attn_context": replace(inputs["attn_context"], backend="reference")})
