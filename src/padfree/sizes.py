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
        types = tuple(read.get("layer_types") or ())
        window = read("sliding_window", default=0)
        windowed, full = _layer_kinds(types, layers, window > 0 and read.get("use_sliding_window") is not False)
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
            sparse_layers=sum(sparse) if experts else 0,
            window=window,
            windowed_layers=windowed,
            full_layers=full,
            layer_types=types,
            dense_first=dense_first,
            dense_named=dense_named,
            sparse_every=sparse_every,
        )


class _Reader:
    """Whole numbers of a config, each under the first of its names that is given."""

    def __init__(self, config: Any) -> None:
        text = getattr(config, "get_text_config", None)
        self._config = text() if callable(text) else self._field(config, "text_config") or config

    @staticmethod
    def _field(config: Any, name: str) -> Any:
        return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)

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
        return types.count("sliding_attention"), types.count("full_attention")
    return (layers, 0) if all_windowed else (0, layers)
