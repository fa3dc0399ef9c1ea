"""Attach padfree's attention to a stock HF model.

    model = attach(AutoModelForCausalLM.from_pretrained(...))
    hidden = model(**local_batch.model_inputs())        one row of samples laid end to end; attention stays in each

`attach` changes the name of the model's attention implementation, through transformers' own interface, and adds a
forward pre-hook that checks the arguments. No class, method or weight is replaced, and
`model.set_attn_implementation("sdpa")` undoes it. Attach first, then compile the layers, then wrap them in activation
checkpointing, then apply FSDP2. In a compiled layer attention is one operator; over context ranks it is a graph break.

Before that, the architecture must pass: padfree must be able to do what the config says, and a small copy must compute
the same packed as one sample at a time (`padfree.model.probe`). Otherwise the model is refused with the reason.

The backend is the one in the batch's AttnContext, if it names one; else the one named here; else the fastest that can
serve (`auto`).
"""

from __future__ import annotations

from weakref import WeakSet

from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedConfig, PreTrainedModel

from padfree.attention import BACKENDS
from padfree.batch import LmHead
from padfree.errors import UserError
from padfree.model.interface import check_inputs, is_attached, mark_chunked_layers, register
from padfree.model.mixers import install
from padfree.model.outputs import base_of, described_head
from padfree.model.probe import probe, stock_leak

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
"""Architectures whose packed logits and parameter gradients the tests compare with one sample at a time."""

PADDED_CURE = "train it on padded rows, by transformers.Trainer with DataCollatorForSeq2Seq(tokenizer)"
"""What to do with a model that cannot be packed."""

LAYER_TYPES = (
    "full_attention",
    "sliding_attention",
    "chunked_attention",
    "attention",
    # mixers, which the probe finds by what they do
    "linear_attention",
    "mamba",
    "hybrid",
    "conv",
    "recurrent",
    # no tokens meet
    "mlp",
    "moe",
)
"""The kinds of layers, as HF configs name them, that padfree computes. Of others the small copy may not show what the
real model does."""

HARMLESS_FIELDS = (
    "sliding_window",  # passed to every layer that has one
    "max_window_layers",  # these say which layers have one
    "sliding_window_pattern",
    "_sliding_window_pattern",
    "prefix_dense_sliding_window_pattern",
    "chunk_size_feed_forward",  # a way to save memory
    "mamba_chunk_size",  # recurrences are computed by chunks, and chunks pass their state on
    "chunk_size",
    "block_size",
    "attention_chunk_size",  # of layers of the type chunked_attention
)
"""Whole-number fields about windows and chunks that hide no mask."""


def attach(model: PreTrainedModel, backend: str = "auto", *, fast_mixers: bool = True) -> PreTrainedModel:
    """The same model, whose forward now takes `attn_context` and attends inside samples only.

    Without `fast_mixers` layers that carry a state run one sample at a time, whatever is installed.
    """
    if not isinstance(model, PreTrainedModel):
        raise UserError("model", f"{type(model).__name__}", "give the transformers model itself, before it is wrapped")
    name = type(model).__name__
    if isinstance(model, FSDPModule):
        raise UserError("model", f"{name} is sharded already", "attach first, then fully_shard")
    if backend != "auto" and backend not in BACKENDS:
        raise UserError("backend", "", f"choose auto or one of {', '.join(BACKENDS)}", value=backend)
    reason = unsupported(model.config)
    verdict = None if reason else probe(_probed(model))
    if verdict is None or verdict.leak:
        raise UserError(
            "model", f"{name} cannot be trained packed: {reason or (verdict and verdict.leak)}", f"{PADDED_CURE}"
        )
    install(model, verdict.mixers, fast=fast_mixers)
    mark_chunked_layers(model)
    model.set_attn_implementation(register(backend))
    assert is_attached(model.config), "the probe has seen this class use the AttentionInterface"
    for module in {model, base_of(model)}:
        if check_inputs not in module._forward_pre_hooks.values():
            # in front of others: mixers may get their context in the place of a mask
            module.register_forward_pre_hook(check_inputs, with_kwargs=True, prepend=True)
    return model


def _probed(model: PreTrainedModel) -> PreTrainedModel:
    """What can be tried packed: the model, or what is below a head that gives no output for every token."""
    return base_of(model) if model.get_output_embeddings() is None else model  # type: ignore[no-untyped-call]


def check_stock_packing(model: PreTrainedModel) -> None:
    """Refuse a model that cannot be trained packed with the attention of transformers that it uses."""
    if not isinstance(model, PreTrainedModel):
        raise UserError("model", f"{type(model).__name__}", "give the transformers model itself, before it is wrapped")
    name = type(model).__name__
    if is_attached(model.config):
        raise UserError(
            "model",
            f"{name} is attached, its calls need an attn_context",
            "take it off with model.set_attn_implementation('sdpa')",
        )
    reason = unsupported(model.config) or stock_leak(model)
    if reason:
        raise UserError(
            "model", f"{name} with transformers' own attention cannot be trained packed: {reason}", f"{PADDED_CURE}"
        )


def unsupported(config: PreTrainedConfig) -> str | None:
    """What a config says outright that padfree cannot do; None if nothing."""
    parts = [part for part in config.sub_configs if getattr(config, part, None) is not None]
    if parts:
        return f"it is made of several models ({', '.join(parts)}): use its language model instead"
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder and a decoder"
    if getattr(config, "is_causal", True) is False or getattr(config, "use_bidirectional_attention", False):
        return "its layers see tokens that come later"
    for kind in getattr(config, "layer_types", None) or ():
        if kind not in LAYER_TYPES:
            return f"layer type {kind!r} is none of {', '.join(LAYER_TYPES)}"
    chunked = "chunked_attention" in (getattr(config, "layer_types", None) or ())
    if getattr(config, "attention_chunk_size", None) and not chunked:
        return f"attention_chunk_size {config.attention_chunk_size}: no layer type says which layers attend by chunks"
    for field, value in config.to_dict().items():
        if (
            ("window" in field or "chunk" in field)
            and field not in HARMLESS_FIELDS
            and type(value) is int
            and value > 0
        ):
            return f"{field} {value} may be a mask that padfree does not know"
    return None


_PLAIN_HEADS: WeakSet[PreTrainedModel] = WeakSet()
"""Models whose head was found right: it is asked for in every micro-batch, and compared once."""


def lm_head_of(model: PreTrainedModel) -> LmHead:
    """The model's head as it is at this moment; refused where it does not reproduce the model's logits.

    Its weight is the model's own parameter: under FSDP2 a DTensor, and whole `inside` the model.
    """
    head = described_head(model)
    reason = None if model in _PLAIN_HEADS else probe(model).head
    if reason or head is None:
        raise UserError("model", f"{type(model).__name__} has no plain head: {reason}", "use the model's own logits")
    _PLAIN_HEADS.add(model)
    return head
