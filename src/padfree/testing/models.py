"""Tiny models of many architectures with random weights, made from transformers' own classes.

    model = build("gemma3")             two layers (sliding window of 5 tokens; full attention), float32, on the CPU
    batch = row([17, 1, 9], pad=4)      a PackedBatch of random tokens, including token id 0

The weights are large, so that a wrong attention mask changes the first digits of every logit.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import SkipTest

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from padfree.batch import PackedBatch
from padfree.packing.collate import collate
from padfree.sample import Sample

VOCABULARY = 64
WINDOW = 5

_BASIC: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_WINDOWED: dict[str, Any] = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_FOUR_EXPERTS: dict[str, Any] = {**_EXPERTS, "num_experts": 4}
_FOUR_LOCAL_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "num_local_experts": 4}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
_ROUTED: dict[str, Any] = {
    **_EXPERTS,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_d_head": 16,
    "mamba_chunk_size": 8,
}
_STATE: dict[str, Any] = {"num_key_value_heads": None, "head_dim": None, "state_size": 8, "time_step_rank": 4}
_GPT: dict[str, Any] = {
    "attn_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "intermediate_size": None,
    "num_key_value_heads": None,
    "head_dim": None,
}
_LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 16.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 16,
}

# Architecture name -> model class, and config values that are added to the basic values. A None removes a basic value.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "llama_tied": ("LlamaForCausalLM", {"tie_word_embeddings": True, "attention_bias": True}),
    "llama_rope": ("LlamaForCausalLM", {"rope_parameters": _LLAMA3}),
    "mistral": ("MistralForCausalLM", {"sliding_window": WINDOW}),
    "qwen2": ("Qwen2ForCausalLM", {"head_dim": None, "use_sliding_window": False}),
    "qwen2_sliding": (
        "Qwen2ForCausalLM",
        {"head_dim": None, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", _FOUR_EXPERTS),
    "gemma2": (
        "Gemma2ForCausalLM",
        {
            **_WINDOWED,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "query_pre_attn_scalar": 24,
        },
    ),
    "gemma3": ("Gemma3ForCausalLM", {**_WINDOWED, "query_pre_attn_scalar": 24}),
    "phi3": ("Phi3ForCausalLM", {"head_dim": None, "sliding_window": WINDOW}),
    "olmo2": ("Olmo2ForCausalLM", {"head_dim": None}),
    "glm4": ("Glm4ForCausalLM", {}),
    "gpt2": ("GPT2LMHeadModel", _GPT),
    "gpt_oss": ("GptOssForCausalLM", {**_WINDOWED, **_FOUR_LOCAL_EXPERTS, "rope_parameters": _YARN}),
    # further architectures
    "afmoe": ("AfmoeForCausalLM", {**_WINDOWED, **_FOUR_EXPERTS, "num_dense_layers": 1}),
    "apertus": ("ApertusForCausalLM", {"head_dim": None, "rope_parameters": _LLAMA3}),
    "arcee": ("ArceeForCausalLM", {}),
    "cohere": ("CohereForCausalLM", {"head_dim": None}),
    "cohere2": ("Cohere2ForCausalLM", {**_WINDOWED, "head_dim": None}),
    "deepseek_v2": (
        "DeepseekV2ForCausalLM",
        {**_LATENT, **_ROUTED, "topk_method": "greedy", "head_dim": None},
    ),
    "deepseek_v3": ("DeepseekV3ForCausalLM", {**_LATENT, **_ROUTED, "head_dim": None}),
    "dots1": ("Dots1ForCausalLM", {**_WINDOWED, **_ROUTED}),
    "ernie4_5": ("Ernie4_5ForCausalLM", {}),
    "ernie4_5_moe": ("Ernie4_5_MoeForCausalLM", {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32}),
    "exaone4": ("Exaone4ForCausalLM", {**_WINDOWED, "head_dim": None}),
    "gemma": ("GemmaForCausalLM", {}),
    "glm": ("GlmForCausalLM", {}),
    "glm4_moe": ("Glm4MoeForCausalLM", _ROUTED),
    "gpt_neox": ("GPTNeoXForCausalLM", {"num_key_value_heads": None, "head_dim": None}),
    "granite": (
        "GraniteForCausalLM",
        {
            "head_dim": None,
            "logits_scaling": 3.0,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.5,
            "embedding_multiplier": 2.0,
        },
    ),
    "granitemoe": ("GraniteMoeForCausalLM", {**_FOUR_LOCAL_EXPERTS, "head_dim": None}),
    "granitemoehybrid": (
        "GraniteMoeHybridForCausalLM",
        {
            **_FOUR_LOCAL_EXPERTS,
            "head_dim": None,
            "layer_types": ["full_attention"] * 2,
            "position_embedding_type": "rope",
            "shared_intermediate_size": 32,
            "mamba_n_heads": 8,
        },
    ),
    "granitemoehybrid_dense": (
        "GraniteMoeHybridForCausalLM",
        {
            "head_dim": None,
            "layer_types": ["full_attention"] * 2,
            "num_local_experts": 0,
            "shared_intermediate_size": 64,
            "mamba_n_heads": 8,
            "logits_scaling": 3.0,
        },
    ),
    "helium": ("HeliumForCausalLM", {}),
    "hunyuan_v1_dense": ("HunYuanDenseV1ForCausalLM", {}),
    "hunyuan_v1_moe": ("HunYuanMoEV1ForCausalLM", {"num_experts": 4, "moe_topk": 2}),
    "minicpm3": ("MiniCPM3ForCausalLM", {**_LATENT, "head_dim": None}),
    "ministral": ("MinistralForCausalLM", _WINDOWED),
    "minimax_m2": ("MiniMaxM2ForCausalLM", _FOUR_LOCAL_EXPERTS),
    "mixtral": ("MixtralForCausalLM", _FOUR_LOCAL_EXPERTS),
    "olmo": ("OlmoForCausalLM", {"head_dim": None}),
    "olmo3": ("Olmo3ForCausalLM", {**_WINDOWED, "head_dim": None}),
    "olmoe": ("OlmoeForCausalLM", {"num_experts": 4, "num_experts_per_tok": 2, "head_dim": None}),
    "opt": (
        "OPTForCausalLM",
        {
            "num_key_value_heads": None,
            "ffn_dim": 64,
            "word_embed_proj_dim": 64,
            "dropout": 0.0,
            "pad_token_id": 1,
        },
    ),
    "phi": ("PhiForCausalLM", {"head_dim": None}),
    "phimoe": ("PhimoeForCausalLM", {**_FOUR_LOCAL_EXPERTS, "head_dim": None, "router_jitter_noise": 0.0}),
    "qwen2_moe": ("Qwen2MoeForCausalLM", {**_FOUR_EXPERTS, "head_dim": None, "shared_expert_intermediate_size": 32}),
    "seed_oss": ("SeedOssForCausalLM", {"attention_dropout": 0.0, "residual_dropout": 0.0}),
    "smollm3": ("SmolLM3ForCausalLM", {"head_dim": None, "no_rope_layers": [1, 0]}),
    "starcoder2": (
        "Starcoder2ForCausalLM",
        {"head_dim": None, "sliding_window": WINDOW, "residual_dropout": 0.0, "embedding_dropout": 0.0},
    ),
}

# Architectures with mixer layers, or with chunked attention.
ARCHITECTURES |= {
    "bailing_hybrid": (
        "BailingHybridForCausalLM",
        {
            **_LATENT,
            **_ROUTED,
            "q_lora_rank": None,
            "head_dim": 16,
            "num_experts": 4,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_heads": 4,
            "linear_head_dim": 8,
        },
    ),
    "bamba": ("BambaForCausalLM", {**_MAMBA, "head_dim": None, "attn_layer_indices": [1]}),
    "falcon_h1": ("FalconH1ForCausalLM", {**_MAMBA, "mamba_d_ssm": 128}),
    "falcon_mamba": ("FalconMambaForCausalLM", _STATE),
    "gemma3n": (
        "Gemma3nForCausalLM",
        {
            "num_hidden_layers": 4,
            "intermediate_size": [64] * 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": WINDOW,
            "num_kv_shared_layers": 0,
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 8,
            "activation_sparsity_pattern": [0.0] * 4,
        },
    ),
    "gemma4": (
        "Gemma4ForCausalLM",
        {**_WINDOWED, "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8},
    ),
    "granitemoehybrid_mamba": (
        "GraniteMoeHybridForCausalLM",
        {
            **_MAMBA,
            **_FOUR_LOCAL_EXPERTS,
            "head_dim": None,
            "layer_types": ["linear_attention", "full_attention"],
            "shared_intermediate_size": 32,
        },
    ),
    "jamba": (
        "JambaForCausalLM",
        {
            **_FOUR_LOCAL_EXPERTS,
            "head_dim": None,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_offset": 0,
            "num_experts": 4,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
        },
    ),
    "kimi_linear": (
        "KimiLinearForCausalLM",
        {
            **_LATENT,
            **_FOUR_EXPERTS,
            "q_lora_rank": None,
            "head_dim": None,
            "layer_types": ["linear_attention", "full_attention"],
            "mlp_layer_types": ["dense", "sparse"],
            "linear_num_heads": 4,
            "linear_head_dim": 8,
        },
    ),
    "lfm2": ("Lfm2ForCausalLM", {"head_dim": None, "layer_types": ["conv", "full_attention"], "block_multiple_of": 16}),
    "lfm2_moe": (
        "Lfm2MoeForCausalLM",
        {**_FOUR_EXPERTS, "head_dim": None, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    ),
    "llama4": (
        "Llama4ForCausalLM",
        {
            **_FOUR_LOCAL_EXPERTS,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 64,
            "attention_chunk_size": WINDOW,
            "floor_scale": 4,
            "no_rope_layers": [1, 0],
            "layer_types": ["chunked_attention", "full_attention"],
            "moe_layers": [1],
        },
    ),
    "mamba": ("MambaForCausalLM", _STATE),
    "minimax": (
        "MiniMaxForCausalLM",
        {**_FOUR_LOCAL_EXPERTS, "layer_types": ["linear_attention", "full_attention"], "block_size": 8},
    ),
    "nemotron_h": (
        "NemotronHForCausalLM",
        {
            **_ROUTED,
            "num_hidden_layers": None,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
            "ssm_state_size": 8,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "n_groups": 1,
            "chunk_size": 8,
            "moe_shared_expert_intermediate_size": 32,
        },
    ),
    "olmo_hybrid": ("OlmoHybridForCausalLM", {**_DELTA, "head_dim": None, "linear_num_key_heads": 4}),
    "qwen3_5": ("Qwen3_5ForCausalLM", _DELTA),
    "qwen3_5_moe": ("Qwen3_5MoeForCausalLM", {**_DELTA, **_FOUR_EXPERTS, "shared_expert_intermediate_size": 32}),
    "qwen3_next": ("Qwen3NextForCausalLM", {**_DELTA, **_FOUR_EXPERTS, "shared_expert_intermediate_size": 32}),
    "zamba": (
        "ZambaForCausalLM",
        {
            "head_dim": None,
            "num_hidden_layers": 4,
            "num_key_value_heads": 4,
            "layers_block_type": ["linear_attention", "hybrid"] * 2,
            "attention_hidden_size": 128,
            "attention_head_dim": 32,
            "n_mamba_heads": 2,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
        },
    ),
    "zamba2": (
        "Zamba2ForCausalLM",
        {
            "head_dim": None,
            "num_key_value_heads": 4,
            "layers_block_type": ["linear_attention", "hybrid"],
            "mamba_d_state": 8,
            "n_mamba_heads": 8,
            "mamba_ngroups": 1,
            "mamba_headdim": 16,
            "chunk_size": 8,
            "adapter_rank": 8,
        },
    ),
}

MIXERS = (
    "bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid_mamba", "jamba", "kimi_linear", "lfm2",
    "lfm2_moe", "mamba", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_next", "zamba",
    "zamba2",
)  # fmt: skip
"""Architectures with layers that have a recurrent state."""

EXPERTS = tuple(name for name, (_, extra) in ARCHITECTURES.items() if any("expert" in key for key in extra))
"""Architectures with experts. A changed token can change the rounding of other tokens, because the shapes of matmuls
depend on the chosen experts.
"""


def build(name: str, *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Make a small model of architecture `name` in training mode. `changes` replace values of its config."""
    class_name, extra = ARCHITECTURES[name]
    model_class = getattr(transformers, class_name, None)
    if model_class is None:
        raise SkipTest(f"transformers {transformers.__version__} has no {class_name}")
    values = {**_BASIC, **extra, **changes}
    missing = ("head_dim", "num_key_value_heads", "num_hidden_layers", "intermediate_size")
    values = {key: value for key, value in values.items() if value is not None or key not in missing}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = model_class(model_class.config_class(**values))
        randomise(model)
    assert isinstance(model, PreTrainedModel)
    model.train()
    return model


def randomise(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)


def row(lengths: Sequence[int], *, pad: int = 0, seed: int = 0, vocabulary: int = VOCABULARY) -> PackedBatch:
    """Return a pack of random samples of these lengths, followed by `pad` padding tokens."""
    rng = np.random.default_rng(seed)
    tokens = [rng.integers(0, vocabulary, length) for length in lengths]
    for sample in tokens:
        sample[:1] = 0
    batch = collate([Sample(tokens=sample) for sample in tokens])
    return batch.padded_to(batch.num_tokens + pad)


LETTERS = "0123456789+-*/=# abcdefghijklmnopqrstuvwxyz"


def save_with_tokenizer(
    folder: Path, *, writes_back: bool = False, architecture: str = "qwen3", **changes: Any
) -> Path:
    """Save a small model with tied embeddings, and a tokenizer of single letters, in the format of transformers.

    If `writes_back` is true, decoding restores the original text; otherwise it writes spaces between the letters.
    `changes` replaces values of the model's config.
    """
    vocabulary = {letter: index for index, letter in enumerate(["<eos>", "<unk>", *LETTERS])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    if writes_back:
        tokenizer.decoder = decoders.Fuse()
    make: Any = PreTrainedTokenizerFast
    make(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>").save_pretrained(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": len(vocabulary), "tie_word_embeddings": True}
    build(architecture, **{**sizes, **changes}).save_pretrained(folder)
    return folder
