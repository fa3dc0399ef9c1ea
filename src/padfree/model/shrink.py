"""Make a config of the same architecture whose model is small enough to run in milliseconds.

For example, Gemma3 27B has 62 layers (5 with sliding windows, then 1 without, and so on), a window of 1024 and hidden
size 5376. The shrunken model has 2 layers (one of each kind), a window of 4 and hidden size 64.

Activations, norms, scaling factors, soft caps and rotary types are kept, because they decide whether an architecture
can be packed.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

WINDOW = 4
"""The size of sliding windows in the shrunken model. Most samples on which the model is tested are longer, so that a
window that is ignored changes the results.
"""

CHUNK = 8
"""The chunk size of recurrent layers in the shrunken model. Most samples on which the model is tested are longer, so
that a state passes from one chunk to the next.
"""

VOCABULARY = 64
POSITIONS = 128
HEAD_DIM = 16
NUM_HEADS = 4
ROPE_HEAD_DIM = 8  # size of the rotary part of a head in multi-head latent attention

SIZES = {
    # field names as in most configs; other names are found through the config's own attribute_map
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
    # sizes of state-space layers; some configs check them even if the model has no such layers
    "mamba_n_heads": NUM_HEADS,
    "n_mamba_heads": NUM_HEADS,
    "mamba_num_heads": NUM_HEADS,
    "mamba_n_groups": 1,
    "n_groups": 1,
    "mamba_ngroups": 1,
    "mamba_d_state": 16,
    "ssm_state_size": 16,
    "state_size": 16,
    "mamba_head_dim": HEAD_DIM,
    "mamba_d_ssm": NUM_HEADS * HEAD_DIM,
    "mamba_dt_rank": 4,
    "time_step_rank": 4,
    "lru_width": NUM_HEADS * HEAD_DIM,
    # linear attention
    "linear_num_heads": NUM_HEADS,
    "linear_num_key_heads": NUM_HEADS,
    "linear_num_value_heads": NUM_HEADS,
    "linear_head_dim": ROPE_HEAD_DIM,
    "linear_key_head_dim": ROPE_HEAD_DIM,
    "linear_value_head_dim": ROPE_HEAD_DIM,
    # chunk sizes of recurrences, shorter than most test samples, so that a state passes between chunks
    "chunk_size": CHUNK,
    "mamba_chunk_size": CHUNK,
    "block_size": CHUNK,
    # attention in chunks of positions
    "attention_chunk_size": WINDOW,
    "floor_scale": WINDOW,
    # less common sizes: of further MLPs, of adapters in shared layers, and of embeddings that each layer adds
    "intermediate_size_mlp": 96,
    "block_ff_dim": 96,
    "block_multiple_of": 16,
    "adapter_rank": 8,
    "laurel_rank": 8,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": HEAD_DIM,
    "global_head_dim": HEAD_DIM,
}

DROPPED = ("architectures", "dtype", "torch_dtype", "quantization_config", "transformers_version", "_name_or_path")
"""The fields of a config that describe a checkpoint, not the architecture. `shrink` removes them."""

LAYER_INDICES = ("full_attn_idxs", "moe_layers", "hybrid_layer_ids", "mlp_only_layers")
"""The config fields that are lists of layer indices."""


def shrink(config: PreTrainedConfig, num_layers: int = 2) -> PreTrainedConfig:
    """Return a config of the same class with small sizes and `num_layers` layers.

    If the model has more kinds of layers than `num_layers`, the result has one layer of each kind.
    """
    real = {alias: config.attribute_map.get(alias, alias) for alias in (*SIZES, "num_hidden_layers")}
    values = {name: value for name, value in config.to_dict().items() if name not in DROPPED}
    kept = _kept_layers(values, int(config.num_hidden_layers), num_layers)
    for name, value in values.items():
        if name in LAYER_INDICES and isinstance(value, (list, tuple)):
            values[name] = [kept.index(layer) for layer in value if layer in kept]
        elif name == "per_layer_config" and isinstance(value, dict):
            values[name] = {
                kept.index(int(layer)): {key: 2 * SIZES[key] if key in SIZES else each for key, each in entry.items()}
                for layer, entry in value.items()
                if int(layer) in kept
            }
        elif _is_per_layer(value, int(config.num_hidden_layers)):
            values[name] = [value[layer] for layer in kept]
    if isinstance(shared := values.get("num_kv_shared_layers"), int):
        values["num_kv_shared_layers"] = sum(layer >= int(config.num_hidden_layers) - shared for layer in kept)
    values[real["num_hidden_layers"]] = len(kept)
    for alias, size in SIZES.items():
        value = values.get(real[alias])
        if _is_size(value):
            values[real[alias]] = size
        elif isinstance(value, (list, tuple)) and all(_is_size(entry) for entry in value):
            values[real[alias]] = [size] * len(value)
    _fit_heads(values, config)
    for name, value in values.items():
        if name in _KEY_HEADS and _is_size(value):
            values[name] = _key_heads(value, int(config.num_attention_heads))
        elif ("drop" in name or "jitter" in name) and isinstance(value, float):
            values[name] = 0.0
        elif name.endswith("_token_id") and value is not None:
            values[name] = 1  # within the vocabulary; None stays None
    values["output_router_logits"] = False
    if "qk_rope_head_dim" in values and config.to_dict().get("head_dim") == config.qk_rope_head_dim:
        # in some configs with latent attention, head_dim is the size of the rotary part
        values["head_dim"] = ROPE_HEAD_DIM
    if isinstance(values.get("rope_parameters"), dict):
        values["rope_parameters"] = _rope(values["rope_parameters"], "qk_rope_head_dim" in values)
    return type(config).from_dict(values)


def _fit_heads(values: dict[str, Any], config: PreTrainedConfig) -> None:
    """Adjust the sizes in `values` that follow from other sizes, such as the head size of Mamba.

    Some config classes raise an error if the sizes do not match.
    """
    width = NUM_HEADS * HEAD_DIM
    if _is_size(values.get("mamba_d_head")):
        heads = values.get("mamba_d_ssm") or values.get("mamba_expand", 1) * width  # total width of the heads
        values["mamba_d_head"] = heads // NUM_HEADS
    if _is_size(values.get("mamba_headdim")):
        values["mamba_headdim"] = values.get("mamba_expand", 1) * width // NUM_HEADS
    if "expand" in values and "num_heads" in values and _is_size(values.get("head_dim")):
        values["num_heads"] = values["expand"] * width // values["head_dim"]
    if _is_size(values.get("attention_hidden_size")):
        # some models apply attention to two concatenated inputs, which doubles the width
        times = values["attention_hidden_size"] // int(config.hidden_size)
        values["attention_hidden_size"] = times * width
        if "attention_head_dim" in values:
            values["attention_head_dim"] = times * HEAD_DIM
    if "linear_num_key_heads" in values and config.linear_num_key_heads != config.linear_num_value_heads:
        values["linear_num_key_heads"] = NUM_HEADS // 2


_KEY_HEADS = ("num_key_value_heads", "num_kv_heads")


def _is_size(value: Any) -> bool:
    """Return whether a value is a positive integer, and therefore a size.

    None, False and 0 mean that the architecture does not have the feature.
    """
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_per_layer(value: Any, num_layers: int) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == num_layers


def _key_heads(num_key_heads: int, num_heads: int) -> int:
    """Return the number of key heads of the shrunken model, from the numbers of heads of the real model.

    The kind of attention stays the same: multi-query (one key head), grouped-query or multi-head.
    """
    if num_key_heads == 1:
        return 1
    return NUM_HEADS if num_key_heads == num_heads else NUM_HEADS // 2


def _kept_layers(values: dict[str, Any], num_layers: int, wanted: int) -> list[int]:
    """Return the indices of the layers of the real model that the shrunken model keeps.

    The shrunken model keeps the first layer of each kind. If these are fewer than `wanted` layers, it keeps further
    layers from the start of the model.
    """
    lists = [value for name, value in values.items() if _is_per_layer(value, num_layers) and name not in LAYER_INDICES]
    indices = [value for name, value in values.items() if name in LAYER_INDICES and isinstance(value, (list, tuple))]
    own = {int(layer): entry for layer, entry in (values.get("per_layer_config") or {}).items()}
    first_shared = num_layers - (values.get("num_kv_shared_layers") or 0)
    kinds: dict[str, int] = {}
    for layer in range(num_layers):
        numbered = [layer in value for value in indices]
        kind = [value[layer] for value in lists], numbered, own.get(layer), layer >= first_shared
        kinds.setdefault(repr(kind), layer)
    kept = set(kinds.values())
    for layer in range(num_layers):
        if len(kept) >= wanted:
            break
        kept.add(layer)
    return sorted(kept)


def _rope(parameters: dict[str, Any], latent: bool) -> dict[str, Any]:
    """Return the rotary parameters of the shrunken model, from the `parameters` of the real model.

    Lists with one factor per pair of channels are cut, because the heads of the shrunken model are smaller.
    """
    width = ROPE_HEAD_DIM if latent else HEAD_DIM
    pairs = int(width * float(parameters.get("partial_rotary_factor", 1.0))) // 2

    def fitted(value: Any) -> Any:
        if isinstance(value, dict):
            return _rope(value, latent)
        return (value * pairs)[:pairs] if isinstance(value, list) else value

    values = {name: fitted(value) for name, value in parameters.items()}
    if isinstance(sections := parameters.get("mrope_section"), list) and sum(sections):
        # Divide the pairs of channels between time, height and width of an image in the same proportions as the model.
        ends = [round(pairs * sum(sections[: count + 1]) / sum(sections)) for count in range(len(sections))]
        values["mrope_section"] = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    if "original_max_position_embeddings" in values:
        values["original_max_position_embeddings"] = POSITIONS
    return values
