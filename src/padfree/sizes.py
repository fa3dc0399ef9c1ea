"""Sizes of a Hugging Face causal language model, read from its config under whatever names it has for them.

    Qwen3-0.6B   hidden 1024   heads 16 of 128   query 2048   key, value 1024   mlp 3072   layers 28   vocabulary 151936

FLOPs (`padfree.packing.cost`), memory (`padfree.estimate`) and calibration (`padfree.planner`) all read sizes here. A
config is an object of transformers, another object with the same fields, or a dict; a multimodal one is read for its
text part. A size that is missing, None or 0 counts as not given.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MIXER_TYPES = ("linear_attention", "mamba", "conv", "recurrent", "hybrid")
ATTENTION_TYPES = ("full_attention", "sliding_attention", "chunked_attention", "attention", "hybrid")
MLP_TYPES = ("mlp", "moe")
"""Kinds of layers as HF configs name them; a hybrid one has a mixer and attention."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentSizes:
    """Multi-head latent attention: queries, keys and values come out of low-rank projections."""

    query_rank: int  # 0: queries are projected at once
    key_value_rank: int
    rope: int  # of a head
    nope: int
    value: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSizes:
    """Widths and counts; widths of queries, keys, values and outputs are those of all heads together."""

    hidden: int
    layers: int
    vocabulary: int
    heads: int
    head: int  # of a query and a key
    query: int
    key: int
    value: int
    output: int  # of attention, before its projection
    latent: LatentSizes | None
    mlp: int
    mlp_matrices: int  # gate, up and down; two without a gate
    experts: int  # of a layer; 0: it is no mixture
    experts_per_token: int
    expert_mlp: int
    shared_mlp: int  # experts that every token meets
    sparse_layers: int  # those with experts
    window: int
    windowed_layers: int
    full_layers: int
    layer_types: tuple[str, ...]  # empty: the config names none
    mixer_layers: int  # those that carry a state along the sequence instead of attending, or besides
    attention_layers: int  # those with attention
    mlp_layers: int  # those with an MLP or experts
    mixer_weights: int  # of the linear layers of one mixer
    mixer_flops: int  # of one token in one mixer, forward, besides those
    dense_first: int  # layers before the first with experts
    dense_named: tuple[int, ...]  # layers without experts
    sparse_every: int  # each so many layers one has experts

    @staticmethod
    def of(config: Any) -> ModelSizes:
        """Refuses a config that has not even the sizes of a decoder."""
        read = _Reader(config)
        hidden, layers = read("hidden_size", "n_embd"), read("num_hidden_layers", "n_layer")
        heads = read("num_attention_heads", "n_head")
        latent = _latent(read)
        if latent is None:
            head = read("head_dim", default=hidden // heads)
            query = output = heads * head
            key = value = read("num_key_value_heads", default=heads) * head
        else:  # every head has keys and values of its own
            head = latent.rope + latent.nope
            query = key = heads * head
            value = output = heads * latent.value
        mlp = read("intermediate_size", "ffn_dim", "n_inner", default=4 * hidden)
        experts = read("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", default=0)
        expert_mlp = read("moe_intermediate_size", default=mlp)
        shared_experts = read("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", default=0)
        dense_first = read("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", default=0)
        dense_named = tuple(read.get("mlp_only_layers") or ())
        sparse_every = read("decoder_sparse_step", "moe_layer_interval", default=1)
        sparse = [
            layer >= dense_first and layer not in dense_named and (layer + 1) % sparse_every == 0
            for layer in range(layers)
        ]
        types = tuple(read.get("layer_types") or read.get("layers_block_type") or ())
        window = read("sliding_window", default=0)
        windowed, full = _layer_kinds(types, layers, window > 0 and read.get("use_sliding_window") is not False)
        chunk = read("attention_chunk_size", default=0)
        if types.count("chunked_attention"):
            window, windowed = chunk // 2, windowed + types.count("chunked_attention")  # a chunk's mean of keys
        mixers = sum(kind in MIXER_TYPES for kind in types)
        attention = sum(kind in ATTENTION_TYPES for kind in types) if types else layers
        bare = sum(kind in MLP_TYPES for kind in types)  # layers that are nothing else, where layers are one thing each
        mixer_weights, mixer_flops = _mixer(read, hidden, heads * head) if mixers else (0, 0)
        return ModelSizes(
            hidden=hidden,
            layers=layers,
            vocabulary=read("vocab_size"),
            heads=heads,
            head=head,
            query=query,
            key=key,
            value=value,
            output=output,
            latent=latent,
            mlp=mlp,
            mlp_matrices=3 if read.get("n_embd") is None else 2,
            experts=experts,
            experts_per_token=read("num_experts_per_tok", "moe_topk", "moe_k", default=None if experts else 0),
            expert_mlp=expert_mlp,
            shared_mlp=read("shared_expert_intermediate_size", default=expert_mlp * shared_experts),
            sparse_layers=(types.count("moe") if bare else sum(sparse)) if experts else 0,
            window=window,
            windowed_layers=windowed,
            full_layers=full,
            layer_types=types,
            mixer_layers=mixers,
            attention_layers=attention,
            mlp_layers=bare or layers,
            mixer_weights=mixer_weights,
            mixer_flops=mixer_flops,
            dense_first=dense_first,
            dense_named=dense_named,
            sparse_every=sparse_every,
        )


def _mixer(read: _Reader, hidden: int, query: int) -> tuple[int, int]:
    """Weights of the linear layers of one mixer, and a token's other FLOPs in it, by the fields that its kind has."""
    kernel = read("linear_conv_kernel_dim", "mamba_d_conv", "conv_kernel", "conv_L_cache", default=4)
    if read.get("linear_num_value_heads") is not None:  # gated delta net: q, k, v, the gate, and two numbers a head
        heads, d_k, d_v = (read(f"linear_{name}") for name in ("num_value_heads", "key_head_dim", "value_head_dim"))
        keys, values = read("linear_num_key_heads") * d_k, heads * d_v
        weights = hidden * (2 * keys + 2 * values + 2 * heads) + values * hidden
        return weights, 6 * heads * d_k * d_v + 2 * kernel * (2 * keys + values)
    if read.get("linear_num_heads") is not None:  # the same with low-rank gates
        heads, dim = read("linear_num_heads"), read("linear_head_dim")
        width = heads * dim
        weights = 4 * hidden * width + 2 * dim * (hidden + width) + hidden * heads
        return weights, 6 * width * dim + 2 * kernel * 3 * width
    state = read("mamba_d_state", "ssm_state_size", "state_size", default=0)
    heads = read("mamba_n_heads", "mamba_num_heads", default=0)
    if not heads and read.get("mamba_headdim") is not None:
        heads = read("n_mamba_heads", default=0)
    if state and heads:  # Mamba-2
        width = read("mamba_d_ssm", default=0) or heads * read("mamba_d_head", "mamba_head_dim", "mamba_headdim")
        group = 2 * read("mamba_n_groups", "n_groups", "mamba_ngroups", default=1) * state
        return hidden * (2 * width + group + heads) + width * hidden, 6 * width * state + 2 * kernel * (width + group)
    if state:  # Mamba
        width = read("mamba_expand", "expand", default=2) * hidden
        rank = read("mamba_dt_rank", "time_step_rank", default=-(-hidden // 16))
        weights = 3 * hidden * width + width * (2 * rank + 2 * state)
        return weights, 7 * width * state + 2 * kernel * width
    if read.get("conv_L_cache") is not None:  # a short convolution between two gates
        return 4 * hidden * hidden, 2 * (kernel + 1) * hidden
    block = read("block_size", default=0)  # lightning attention: q, k, v, gate and output
    return 5 * hidden * query, query * (4 * block + 4 * query // max(1, read("num_attention_heads")))


class _Reader:
    """Whole numbers of a config, each under the first of its names that is given."""

    def __init__(self, config: Any) -> None:
        text = getattr(config, "get_text_config", None)
        self._config = text() if callable(text) else self._field(config, "text_config") or config

    @staticmethod
    def _field(config: Any, name: str) -> Any:
        if isinstance(config, Mapping):
            return config.get(name)
        if name in (getattr(config, "per_layer_attributes", None) or ()):
            return tuple(getattr(layer, name) for layer in config.per_layer_config)
        return getattr(config, name, None)

    def get(self, name: str) -> Any:
        return self._field(self._config, name)

    def __call__(self, *names: str, default: int | None = None) -> int:
        """Of a list with an entry for each layer, the largest. Without a `default` one of the names must be given."""
        for name in names:
            if value := self.get(name):
                return int(max(value)) if isinstance(value, list | tuple) else int(value)
        if default is None:
            raise ValueError(f"config: no {names[0]}; give a causal language model's config or CostModel(linear=...)")
        return default


def _latent(read: _Reader) -> LatentSizes | None:
    if not read.get("kv_lora_rank"):
        return None
    return LatentSizes(
        query_rank=read("q_lora_rank", default=0),
        key_value_rank=read("kv_lora_rank"),
        rope=read("qk_rope_head_dim"),
        nope=read("qk_nope_head_dim"),
        value=read("v_head_dim"),
    )


def _layer_kinds(types: tuple[str, ...], layers: int, all_windowed: bool) -> tuple[int, int]:
    """How many layers attend in a sliding window, and how many to everything before."""
    if types:
        full = sum(kind in ATTENTION_TYPES for kind in types)
        windowed = types.count("sliding_attention")
        return windowed, full - windowed - types.count("chunked_attention")
    return (layers, 0) if all_windowed else (0, layers)
