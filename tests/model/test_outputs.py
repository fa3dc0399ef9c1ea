"""Hidden states and `LmHead` reproduce the model's logits."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
import transformers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from padfree.cp import shard
from padfree.model import attach, hidden_states, lm_head_of
from padfree.testing.models import ARCHITECTURES, build, row
from tests.refused import refused


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_head_of_hidden_states_is_the_logits(name: str) -> None:
    model = attach(build(name))
    batch = shard(row([11, 1, 6], pad=2))
    expected = model(**batch.model_inputs()).logits[0]
    hidden = hidden_states(model, batch)
    head = lm_head_of(model)
    assert hidden.shape == (20, model.config.hidden_size)
    assert head.weight is model.get_output_embeddings().weight
    torch.testing.assert_close(head.logits(hidden), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


def test_heads_say_how_they_scale_and_cap() -> None:
    heads = {name: lm_head_of(build(name)) for name in ("llama", "gemma2", "cohere", "granite", "phi")}
    assert [(head.softcap, round(head.logit_scale, 4)) for head in heads.values()] == [
        (None, 1.0),
        (3.0, 1.0),
        (None, 0.0625),
        (None, 0.3333),
        (None, 1.0),
    ]
    assert [head.bias is not None for head in heads.values()] == [False, False, False, False, True]


def test_logits_are_never_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = attach(build("llama"))

    def refuse(*args: object) -> None:
        raise AssertionError("the head was called")

    monkeypatch.setattr(model.lm_head, "forward", refuse)
    hidden_states(model, shard(row([5]))).sum().backward()
    assert model.model.embed_tokens.weight.grad is not None
    assert model.lm_head.weight.grad is None


def test_a_head_that_does_more_is_refused() -> None:
    small = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    config = transformers.ModernBertDecoderConfig(
        **small, num_attention_heads=2, local_attention=8, pad_token_id=1, bos_token_id=1, eos_token_id=2
    )
    config.cls_token_id = config.sep_token_id = 1
    model = attach(transformers.ModernBertDecoderForCausalLM(config))
    with pytest.raises(
        ValueError, match=r"the head of ModernBertDecoderForCausalLM is not a plain matrix: its logits .* differ"
    ):
        lm_head_of(model)


def test_a_head_with_an_unknown_scale_is_refused() -> None:
    class Scaled(LlamaForCausalLM):
        def __init__(self, config: LlamaConfig) -> None:
            super().__init__(config)
            self.lm_head = nn.Sequential(nn.Linear(config.hidden_size, config.vocab_size), nn.Softplus())

        def get_output_embeddings(self) -> nn.Module:
            return self.lm_head[0]

    model = Scaled(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_attention_heads=2))
    with pytest.raises(ValueError, match=r"the head of Scaled is not a plain matrix: its logits .* differ"):
        lm_head_of(model)


def test_models_without_a_head_attach_and_have_none() -> None:
    values = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    base = attach(transformers.LlamaModel(LlamaConfig(**values)))
    batch = shard(row([4, 3]))
    assert torch.equal(hidden_states(base, batch), base(**batch.model_inputs()).last_hidden_state[0])
    with pytest.raises(
        ValueError, match="the head of LlamaModel is not a plain matrix: the model has no head on top of a base model"
    ):
        lm_head_of(base)


@pytest.mark.parametrize("name", ["opt", "qwen3"])
def test_a_model_that_is_not_attached_is_refused(name: str) -> None:
    """OPT's own attention mixes the samples of a pack; on one of several context ranks, every model's would."""
    model, batch = build(name), shard(row([5, 4]))
    with refused("model", ".* is not attached"):
        hidden_states(model, batch)
    attach(model)
    hidden_states(model, batch)
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="is not attached"):
        hidden_states(model, batch)


def test_the_name_of_the_attention_does_not_make_a_model_attached() -> None:
    """After one model is attached, transformers accepts the name for any model, without a probe."""
    attach(build("llama"))
    model = build("opt")
    model.set_attn_implementation("padfree")
    with pytest.raises(ValueError, match="OPTModel is not attached"):
        hidden_states(model, shard(row([5, 4])))


def test_a_copy_of_an_attached_model_is_attached() -> None:
    model, batch = attach(build("llama")), shard(row([5, 4]))
    assert torch.equal(hidden_states(deepcopy(model), batch), hidden_states(model, batch))
