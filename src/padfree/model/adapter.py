"""Attach padfree's attention to a stock Hugging Face (HF) model.

    model = attach(AutoModelForCausalLM.from_pretrained(...))
    output = model(**local_batch.model_inputs())

The model then computes packs (samples one after the other without padding). `model.set_attn_implementation("sdpa")`
undoes `attach`.

`attach` first tests the architecture on a small copy of the model (few layers, random weights). It raises an error if a
pack gives other results than single samples.

Prepare a model in this order: `attach`, compilation, activation checkpointing, FSDP2.
"""

from __future__ import annotations

from weakref import WeakSet

from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedConfig, PreTrainedModel

from padfree.attention import BACKENDS
from padfree.batch import LmHead
from padfree.errors import UserError
from padfree.model.interface import check_inputs, is_attached, mark_chunked_layers, mark_image_layers, register
from padfree.model.mixers import install
from padfree.model.outputs import base_of, described_head
from padfree.model.probe import probe, stock_leak
from padfree.model.vision.families import (
    family_of,
    is_image_text,
    language_part,
    unsupported_vision,
    why_refused,
)

TESTED = (
    "AfmoeForCausalLM",
    "ApertusForCausalLM",
    "ArceeForCausalLM",
    "BailingHybridForCausalLM",
    "BambaForCausalLM",
    "Cohere2ForCausalLM",
    "CohereForCausalLM",
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "Dots1ForCausalLM",
    "Ernie4_5ForCausalLM",
    "Ernie4_5_MoeForCausalLM",
    "Exaone4ForCausalLM",
    "FalconH1ForCausalLM",
    "FalconMambaForCausalLM",
    "GPT2LMHeadModel",
    "GPTNeoXForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "Gemma3nForCausalLM",
    "Gemma4ForCausalLM",
    "GemmaForCausalLM",
    "Glm4ForCausalLM",
    "Glm4MoeForCausalLM",
    "GlmForCausalLM",
    "GptOssForCausalLM",
    "GraniteForCausalLM",
    "GraniteMoeForCausalLM",
    "GraniteMoeHybridForCausalLM",
    "HeliumForCausalLM",
    "HunYuanDenseV1ForCausalLM",
    "HunYuanMoEV1ForCausalLM",
    "JambaForCausalLM",
    "KimiLinearForCausalLM",
    "Lfm2ForCausalLM",
    "Lfm2MoeForCausalLM",
    "Llama4ForCausalLM",
    "LlamaForCausalLM",
    "MambaForCausalLM",
    "MiniCPM3ForCausalLM",
    "MiniMaxForCausalLM",
    "MiniMaxM2ForCausalLM",
    "MinistralForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "NemotronHForCausalLM",
    "OPTForCausalLM",
    "Olmo2ForCausalLM",
    "Olmo3ForCausalLM",
    "OlmoForCausalLM",
    "OlmoHybridForCausalLM",
    "OlmoeForCausalLM",
    "Phi3ForCausalLM",
    "PhiForCausalLM",
    "PhimoeForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
    "SeedOssForCausalLM",
    "SmolLM3ForCausalLM",
    "Starcoder2ForCausalLM",
    "Zamba2ForCausalLM",
    "ZambaForCausalLM",
)
"""The architectures for which padfree's tests compare the logits and parameter gradients of a pack with those of one
sample at a time.
"""

PADDED_CURE = "train it with padding, using transformers.Trainer and DataCollatorForSeq2Seq(tokenizer)"
"""What error messages advise if a model cannot be trained on packs."""

LAYER_TYPES = (
    "full_attention",
    "sliding_attention",
    "chunked_attention",
    "attention",
    # layers with a mixer; the probe finds the mixer by its behaviour, not by these names
    "linear_attention",
    "mamba",
    "hybrid",
    "conv",
    "recurrent",
    # no interaction between tokens
    "mlp",
    "moe",
)
"""The layer types in Hugging Face configs that padfree supports. For other types, the small copy on which
padfree tests a model may not represent the model.
"""

HARMLESS_FIELDS = (
    "sliding_window",  # passed to every layer that has one
    "max_window_layers",  # this field and the next three say which layers have a window
    "sliding_window_pattern",
    "_sliding_window_pattern",
    "prefix_dense_sliding_window_pattern",
    "chunk_size_feed_forward",  # only saves memory
    "mamba_chunk_size",  # the chunks in which a recurrence is computed; its state passes from chunk to chunk
    "chunk_size",
    "attention_chunk_size",  # for layers of the type chunked_attention
)
"""Integer config fields about windows and chunks that are no reason to refuse a model. padfree supports the field, or
the field does not change the attention mask.
"""


def attach(model: PreTrainedModel, backend: str = "auto", *, fast_mixers: bool = True) -> PreTrainedModel:
    """Prepare a model for packs (samples without padding between them), and return the model. Raises `UserError` if the
    architecture cannot be packed.

    The model's forward then needs `attn_context`. The backend "auto" is the fastest for each call. If `fast_mixers` is
    False, recurrent layers run one sample at a time.
    """
    name = _class_name(model)
    if isinstance(model, FSDPModule):
        raise UserError("model", f"{name} is already sharded", "call attach first, then fully_shard")
    if backend != "auto" and backend not in BACKENDS:
        raise UserError(
            "backend", "is not an attention backend", f"choose auto or one of {', '.join(BACKENDS)}", value=backend
        )
    family = family_of(model)
    language = language_part(model)
    reason = unsupported(language.config) or (family and unsupported_vision(model.config))
    if family is None and is_image_text(model):
        reason = why_refused(type(model))
    verdict = None if reason else probe(_probed(language))
    if verdict is None or verdict.leak:
        raise UserError(
            "model", f"{name} cannot be trained packed: {reason or (verdict and verdict.leak)}", f"{PADDED_CURE}"
        )
    install(language, verdict.mixers, fast=fast_mixers)
    return _with_attention(model, register(backend))


def attach_variant(model: PreTrainedModel, attached: PreTrainedModel) -> PreTrainedModel:
    """Attach padfree's attention to a model without testing its architecture, because `attached` passed the tests.

    `attached` must be a model of the same class. The configs of the two models may differ only in numbers, such as
    sizes.
    """
    assert type(model) is type(attached)
    if mixers := probe(_probed(attached)).mixers:
        install(model, mixers, fast=True)
    return _with_attention(model, attached.config._attn_implementation)


def _with_attention(model: PreTrainedModel, name: str) -> PreTrainedModel:
    """Let the model use the attention implementation `name`, and check the arguments of its forward in every call.

    Returns the same model.
    """
    language = language_part(model)
    mark_chunked_layers(language)
    family = family_of(model)
    if family is not None and family.whole_images:
        mark_image_layers(language)
    # The tower of a vision-language model keeps its own attention: it already separates images.
    model.set_attn_implementation(name if family is None else {"": name, "text_config": name})
    assert is_attached(model.config), "the probe found that this class uses transformers' AttentionInterface"
    for module in {model, base_of(model), language}:
        if check_inputs not in module._forward_pre_hooks.values():
            # Run this hook before the hooks that `install` registers, which may pass the context as the attention mask.
            module.register_forward_pre_hook(check_inputs, with_kwargs=True, prepend=True)
    return model


def _probed(model: PreTrainedModel) -> PreTrainedModel:
    """Return the module that `padfree.model.probe` tests: the model, or its base model if there is no LM head."""
    return base_of(model) if model.get_output_embeddings() is None else model  # type: ignore[no-untyped-call]


def check_stock_packing(model: PreTrainedModel) -> None:
    """Raise `UserError` if the model cannot be trained on packs with transformers' attention instead of padfree's."""
    name = _class_name(model)
    if is_attached(model.config):
        raise UserError(
            "model",
            f"{name} is attached to padfree and needs an attn_context in every call",
            "first detach the model with model.set_attn_implementation('sdpa')",
        )
    reason = unsupported(model.config) or stock_leak(model)
    if reason:
        raise UserError(
            "model", f"{name} with transformers' own attention cannot be trained packed: {reason}", f"{PADDED_CURE}"
        )


def _class_name(model: object) -> str:
    """Return the name of the model's class. Raises `UserError` if it is not a class of transformers."""
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        fix = "give the transformers model itself, before it is wrapped"
        raise UserError("model", f"{name} is not a transformers model", fix)
    return name


def unsupported(config: PreTrainedConfig) -> str | None:
    """Return a description of a feature in the config that padfree does not support, or None if all are supported."""
    parts = [part for part in config.sub_configs if getattr(config, part, None) is not None]
    if parts:
        return f"the model consists of several models ({', '.join(parts)}), and only its language model can be packed"
    if getattr(config, "is_encoder_decoder", False):
        return "the model has an encoder and a decoder"
    if getattr(config, "is_causal", True) is False or getattr(config, "use_bidirectional_attention", False):
        return "the attention of the model is not causal"
    for kind in getattr(config, "layer_types", None) or ():
        if kind not in LAYER_TYPES:
            return f"layer type {kind!r} is not supported (supported: {', '.join(LAYER_TYPES)})"
    chunked = "chunked_attention" in (getattr(config, "layer_types", None) or ())
    if getattr(config, "attention_chunk_size", None) and not chunked:
        return f"attention_chunk_size is {config.attention_chunk_size}, but no layer has the type chunked_attention"
    for field, value in config.to_dict().items():
        if (
            ("window" in field or "chunk" in field)
            and field not in HARMLESS_FIELDS
            and type(value) is int
            and value > 0
        ):
            return f"{field} {value} may imply a mask that padfree does not know"
    return None


_PLAIN_HEADS: WeakSet[PreTrainedModel] = WeakSet()
"""The models whose head passed the test of `lm_head_of`. The test runs only once per model, because `lm_head_of` is
called for every micro-batch.
"""


def lm_head_of(model: PreTrainedModel) -> LmHead:
    """Return the model's head as an `LmHead` (weight, bias, soft cap and scale).

    Raises `UserError` if an `LmHead` cannot reproduce the model's logits.

    The weight is the model's own parameter. Under FSDP2, it is a DTensor. In a function that is called through
    `padfree.sharding.parallelize.inside`, it is unsharded.
    """
    head = described_head(model)
    # A vision-language model needs no probe: padfree's tests compare the logits of its family with the described head.
    reason = None if model in _PLAIN_HEADS or family_of(model) is not None else probe(model).head
    if reason or head is None:
        raise UserError(
            "model",
            f"the head of {type(model).__name__} is not a plain matrix: {reason}",
            "use the model's own logits",
        )
    _PLAIN_HEADS.add(model)
    return head
