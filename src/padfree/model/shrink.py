"""A config of the same architecture, small enough to run in milliseconds.

    Gemma3 27B   62 layers: 5 sliding, 1 full, 5 sliding ...  window 1024  hidden 5376, 32 heads on 16, vocabulary 262k
    shrunken      2 layers:   sliding, full                   window    4  hidden   64,  4 heads on  2, vocabulary   64

Sizes are replaced. Everything else (activations, norms, scaling factors, soft caps, rotary types) is kept, because it
decides whether an architecture can be packed. Of lists with one entry per layer, the first layer of each kind is kept.
Windows become shorter than a probe's sample, so that ignoring one shows in the numbers.

The result may be wrong for a new architecture: `padfree.model.probe` builds the copy and refuses it if it is too large
or lacks a module class of the real model.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

WINDOW = 4
"""The sliding window of a shrunken model: shorter than the samples of a probe."""

VOCABULARY = 64
POSITIONS = 128
HEAD_DIM = 16
NUM_HEADS = 4
ROPE_HEAD_DIM = 8  # the rotary part of a head in multi-head latent attention

SIZES = {
    # names as in most configs; others are found through the config's own attribute_map
    "vocab_size": VOCABULARY,
    "hidden_size": NUM_HEADS * HEAD_DIM,
    "intermediate_size": 96,
    "num_attention_heads": NUM_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": POSITIONS,
    "original_max_position_embeddings": POSITIONS,
    "sliding_window": WINDOW,
    # multi-head latent attention
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": ROPE_HEAD_DIM,
    "qk_rope_head_dim": ROPE_HEAD_DIM,
    "qk_head_dim": 2 * ROPE_HEAD_DIM,
    "v_head_dim": ROPE_HEAD_DIM,
    # mixtures of experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_layer_start_index": 1,
    "num_dense_layers": 1,
    "moe_intermediate_size": 32,
    "expert_ffn_hidden_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    # others
    "ffn_dim": 96,
    "ffn_hidden_size": 96,
    "word_embed_proj_dim": NUM_HEADS * HEAD_DIM,
    "num_mtp_layers": 0,
    "rotary_dim": ROPE_HEAD_DIM,
    # state-space layers, whose sizes some configs check without having one
    "mamba_n_heads": NUM_HEADS,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
}

DROPPED = ("architectures", "dtype", "torch_dtype", "quantization_config", "transformers_version", "_name_or_path")
"""Entries that belong to a checkpoint, not to an architecture."""


def shrink(config: PreTrainedConfig, num_layers: int = 2) -> PreTrainedConfig:
    """The same config class with small sizes and `num_layers` layers, or as many as there are kinds of layers."""
    real = {alias: config.attribute_map.get(alias, alias) for alias in (*SIZES, "num_hidden_layers")}
    values = {name: value for name, value in config.to_dict().items() if name not in DROPPED}
    kept = _kept_layers(values, int(config.num_hidden_layers), num_layers)
    values = {
        name: [value[layer] for layer in kept] if _is_per_layer(value, int(config.num_hidden_layers)) else value
        for name, value in values.items()
    }
    values[real["num_hidden_layers"]] = len(kept)
    for alias, size in SIZES.items():
        if _is_size(values.get(real[alias])):
            values[real[alias]] = size
    for name, value in values.items():
        if name in _KEY_HEADS and _is_size(value):
            values[name] = _key_heads(value, int(config.num_attention_heads))
        elif ("drop" in name or "jitter" in name) and isinstance(value, float):
            values[name] = 0.0
        elif name.endswith("_token_id") and value is not None:
            values[name] = 1  # within the vocabulary; a pad token stays one
    values["output_router_logits"] = False
    if "mamba_n_heads" in values and _is_size(values.get("mamba_expand")) and _is_size(values.get("mamba_d_head")):
        values["mamba_d_head"] = values["mamba_expand"] * HEAD_DIM  # heads together are `mamba_expand` times as wide
    if "qk_rope_head_dim" in values and config.to_dict().get("head_dim") == config.qk_rope_head_dim:
        values["head_dim"] = ROPE_HEAD_DIM  # latent attention: some configs call the rotary part the head
    if isinstance(values.get("rope_parameters"), dict):
        values["rope_parameters"] = _rope(values["rope_parameters"], "qk_rope_head_dim" in values)
    return type(config).from_dict(values)


_KEY_HEADS = ("num_key_value_heads", "num_kv_heads")


def _is_size(value: Any) -> bool:
    """A number that is set: None, False and 0 mean that the architecture does without."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_per_layer(value: Any, num_layers: int) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == num_layers


def _key_heads(num_key_heads: int, num_heads: int) -> int:
    """Multi-query stays multi-query, grouped stays grouped, and as many keys as queries stay as many."""
    if num_key_heads == 1:
        return 1
    return NUM_HEADS if num_key_heads == num_heads else NUM_HEADS // 2


def _kept_layers(values: dict[str, Any], num_layers: int, wanted: int) -> list[int]:
    """The first layer of each kind, and the first layers of all until there are `wanted`."""
    lists = [value for value in values.values() if _is_per_layer(value, num_layers)]
    kinds: dict[str, int] = {}
    for layer in range(num_layers):
        kinds.setdefault(repr([value[layer] for value in lists]), layer)
    kept = set(kinds.values())
    for layer in range(num_layers):
        if len(kept) >= wanted:
            break
        kept.add(layer)
    return sorted(kept)


def _rope(parameters: dict[str, Any], latent: bool) -> dict[str, Any]:
    """Rotary parameters whose lists, one factor per pair of channels, have the length of the small head."""
    width = ROPE_HEAD_DIM if latent else HEAD_DIM
    pairs = int(width * float(parameters.get("partial_rotary_factor", 1.0))) // 2

    def fitted(value: Any) -> Any:
        if isinstance(value, dict):
            return _rope(value, latent)
        return (value * pairs)[:pairs] if isinstance(value, list) else value

    values = {name: fitted(value) for name, value in parameters.items()}
    if "original_max_position_embeddings" in values:
        values["original_max_position_embeddings"] = POSITIONS
    return values
