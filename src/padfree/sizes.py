"""Sizes of a Hugging Face causal language model, read from its config under whatever names it has for them.

    Qwen3-0.6B   hidden 1024   heads 16 of 128   query 2048   key, value 1024   mlp 3072   layers 28   vocabulary 151936

FLOPs (`padfree.packing.cost`), memory (`padfree.estimate`) and calibration (`padfree.planner`) all read sizes here. A
config is an object of transformers, another object with the same fields, or a dict; a multimodal one is read for its
text part. A size that is missing, None or 0 counts as not given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from padfree.errors import UserError

MIXER_TYPES = ("linear_attention", "mamba", "conv", "recurrent", "hybrid")
ATTENTION_TYPES = ("full_attention", "sliding_attention", "chunked_attention", "attention", "hybrid")
MLP_TYPES = ("mlp", "moe")
"""Kinds of layers as HF configs name them; a hybrid one has a mixer and attention."""

GATED_ATTENTION = ("afmoe", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
"""Model types whose attention has a gate for its output, as wide as the queries. Their configs do not say so."""

UNGATED_MLP = (
    "apertus", "arcee", "biogpt", "ctrl", "gpt2", "gpt_bigcode", "gpt_neox", "jais2", "nemotron_h", "opt", "persimmon",
    "phi", "starcoder2",
)  # fmt: skip
"""Model types whose MLPs are two matrices. Nor do these configs say so."""

WITHOUT_MLP = ("falcon_mamba", "mamba", "mamba2")
"""Model types whose layers are mixers and nothing else."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentSizes:
    """Multi-head latent attention: queries, keys and values come out of low-rank projections."""

    query_rank: int  # 0: queries are projected at once
    key_value_rank: int
    rope: int  # of a head
    nope: int
    value: int


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSizes:
    """Of one layer; widths of queries, keys, values and outputs are those of all heads together."""

    head: int  # of a query and a key
    query: int
    gate: int  # of the output; 0: there is none
    key: int
    value: int
    output: int  # before its projection


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSizes:
    """Widths and counts."""

    hidden: int
    layers: int
    vocabulary: int
    heads: int
    attention: AttentionSizes  # of layers that attend to everything before
    windowed_attention: AttentionSizes  # of those with a window, whose heads are narrower in few models
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
    other_weights: int  # of linear layers besides the usual ones, in all layers; below 0 where some lack usual ones
    dense_first: int  # layers before the first with experts
    dense_named: tuple[int, ...]  # layers without experts
    sparse_every: int  # each so many layers one has experts

    @staticmethod
    def of(config: Any) -> ModelSizes:
        """Refuses a config that has not even the sizes of a decoder."""
        read = _Reader(config)
        hidden, layers = read("hidden_size", "n_embd"), read("num_hidden_layers", "n_layer")
        heads = read("num_attention_heads", "n_head")
        types = tuple(read.get("layer_types") or read.get("layers_block_type") or ())
        latent = _latent(read)
        slides = [kind == "sliding_attention" for kind in types]
        attention = _attention(read, hidden, heads, latent, [not each for each in slides])
        windowed_attention = _attention(read, hidden, heads, latent, slides)
        experts = read("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", default=0)
        mlp = _mlp(read, hidden, experts)
        expert_mlp = read("moe_intermediate_size", "intermediate_size", default=mlp)
        sparse = _sparse(read, layers)
        explicit = any(read.get(name) is not None for name in ("mlp_layer_types", "moe_layers"))
        dense_first = read("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", default=0)
        window = read("sliding_window", default=0)
        windowed, full = _layer_kinds(types, layers, window > 0 and read.get("use_sliding_window") is not False)
        chunk = read("attention_chunk_size", default=0)
        if types.count("chunked_attention"):
            window, windowed = chunk // 2, windowed + types.count("chunked_attention")  # a chunk's mean of keys
        mixers = sum(kind in MIXER_TYPES for kind in types)
        attending = sum(kind in ATTENTION_TYPES for kind in types) if types else layers
        bare = sum(kind in MLP_TYPES for kind in types)  # layers that are nothing else, where layers are one thing each
        mixer_weights, mixer_flops = _mixer(read, hidden, attention.query) if mixers else (0, 0)
        sparse_layers = (types.count("moe") if bare else sum(sparse)) if experts else 0
        sizes = ModelSizes(
            hidden=hidden,
            layers=layers,
            vocabulary=read("vocab_size"),
            heads=heads,
            attention=attention,
            windowed_attention=windowed_attention,
            latent=latent,
            mlp=mlp,
            mlp_matrices=2 if read.get("model_type") in UNGATED_MLP or read.get("n_embd") is not None else 3,
            experts=experts,
            experts_per_token=read(
                "num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k", default=None if experts else 0
            ),
            expert_mlp=expert_mlp,
            shared_mlp=_shared_mlp(read, expert_mlp, mlp) if experts else 0,
            sparse_layers=sparse_layers,
            window=window,
            windowed_layers=windowed,
            full_layers=full,
            layer_types=types,
            mixer_layers=mixers,
            attention_layers=attending,
            mlp_layers=0 if read.get("model_type") in WITHOUT_MLP else bare or layers,
            mixer_weights=mixer_weights,
            mixer_flops=mixer_flops,
            other_weights=0,
            dense_first=next((layer for layer in range(layers) if sparse[layer]), 0) if explicit else dense_first,
            dense_named=() if explicit else tuple(read.get("mlp_only_layers") or ()),
            sparse_every=read(*_SPARSE_EVERY, default=1),
        )
        return replace(sizes, other_weights=_other_weights(read, sizes))

    @property
    def head(self) -> int:
        """The widest; so are the others."""
        return max(self.attention.head, self.windowed_attention.head)

    @property
    def query(self) -> int:
        return max(self.attention.query, self.windowed_attention.query)

    @property
    def key(self) -> int:
        return max(self.attention.key, self.windowed_attention.key)

    @property
    def value(self) -> int:
        return max(self.attention.value, self.windowed_attention.value)

    @property
    def output(self) -> int:
        return max(self.attention.output, self.windowed_attention.output)


def _attention(
    read: _Reader, hidden: int, heads: int, latent: LatentSizes | None, among: Sequence[bool]
) -> AttentionSizes:
    """Of the layers `among` all, where the config gives sizes for each layer."""
    if latent is None:
        head = read("head_dim", default=hidden // heads, among=among)
        query = output = heads * head
        key = value = read("num_key_value_heads", default=heads, among=among) * head
    else:  # every head has keys and values of its own
        head = latent.rope + latent.nope
        query = key = heads * head
        value = output = heads * latent.value
    gate = query if read.get("model_type") in GATED_ATTENTION else 0
    return AttentionSizes(head=head, query=query, gate=gate, key=key, value=value, output=output)


_SPARSE_EVERY = ("decoder_sparse_step", "moe_layer_interval", "interleave_moe_layer_step", "expert_layer_period")


def _sparse(read: _Reader, layers: int) -> list[bool]:
    """Which layers have experts, if the model has any."""
    if kinds := read.get("mlp_layer_types"):
        return [kind == "sparse" for kind in kinds]
    if (named := read.get("moe_layers")) is not None:
        return [layer in named for layer in range(layers)]
    if period := read("expert_layer_period", default=0):
        return [layer % period == read("expert_layer_offset", default=0) for layer in range(layers)]
    first = read("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", default=0)
    dense, every = read.get("mlp_only_layers") or (), read(*_SPARSE_EVERY, default=1)
    return [layer >= first and layer not in dense and (layer + 1) % every == 0 for layer in range(layers)]


_SHARED_MLP = ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size")


def _mlp(read: _Reader, hidden: int, experts: int) -> int:
    """The width of layers without experts."""
    if not experts and read.get("shared_intermediate_size"):  # Granite 4: what is left where there are none
        return read("shared_intermediate_size")
    # Llama 4 gives its dense layers a width of their own.
    width = read("intermediate_size_mlp", "intermediate_size", "ffn_dim", "n_inner", default=4 * hidden)
    if read.get("block_auto_adjust_ff_dim"):  # LFM2
        width = int(2 * width / 3)
        if (factor := read.get("block_ffn_dim_multiplier")) is not None:
            multiple = read("block_multiple_of")
            width = -(-int(factor * width) // multiple) * multiple
    return width


def _shared_mlp(read: _Reader, expert_mlp: int, mlp: int) -> int:
    """What every token meets beside the experts."""
    if read.get("intermediate_size_mlp") is not None:  # Llama 4 has one expert for all
        return expert_mlp
    if read.get("enable_moe_block") or read.get("model_type") == "hunyuan_v1_moe":  # experts beside the usual MLP
        return mlp
    shared = read("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", default=0)
    return read(*_SHARED_MLP, default=expert_mlp * shared)


def _other_weights(read: _Reader, sizes: ModelSizes) -> int:
    """Gates of shared experts; embeddings of each layer, streams and keys of other layers, of Gemma 3n and 4."""
    hidden = sizes.hidden
    found = 2 * sizes.layers * hidden * read("laurel_rank", default=0)
    if streams := read("altup_num_inputs", default=0):
        found += sizes.layers * streams * (streams**2 + streams + hidden) + 2 * (streams - 1) * hidden**2
    if read.get("model_type") == "bailing_hybrid":  # a gate for each head
        found += sizes.attention_layers * hidden * sizes.heads
    found += sizes.sparse_layers * hidden if read.get("shared_expert_intermediate_size") else 0
    found += 3 * sizes.layers * hidden * read("hidden_size_per_layer_input", default=0)
    without_keys = sizes.layers - read("num_kv_shared_layers", default=0)
    for layer, kind in enumerate(sizes.layer_types):
        attention = sizes.windowed_attention if kind == "sliding_attention" else sizes.attention
        if layer >= without_keys:
            found -= hidden * (attention.key + attention.value)
            if read.get("use_double_wide_mlp"):
                found += sizes.mlp_matrices * hidden * sizes.mlp
        elif read.get("attention_k_eq_v") and kind != "sliding_attention":
            found -= hidden * attention.value
    return found


def _mixer(read: _Reader, hidden: int, query: int) -> tuple[int, int]:
    """Weights of the linear layers of one mixer, and a token's other FLOPs in it, by the fields that its kind has."""
    kernel = read("linear_conv_kernel_dim", "mamba_d_conv", "conv_kernel", "conv_L_cache", default=4)
    if read.get("linear_num_value_heads") is not None:  # gated delta net: q, k, v, the gate, and two numbers a head
        heads, d_k, d_v = (read(f"linear_{name}") for name in ("num_value_heads", "key_head_dim", "value_head_dim"))
        keys, values = read("linear_num_key_heads") * d_k, heads * d_v
        weights = hidden * (2 * keys + 2 * values + 2 * heads) + values * hidden
        return weights, 6 * heads * d_k * d_v + 2 * kernel * (2 * keys + values)
    if read.get("linear_num_heads") is not None:  # the same with gates of low rank, or not
        heads, dim = read("linear_num_heads"), read("linear_head_dim")
        width = heads * dim
        gates = 2 * hidden * width if read.get("model_type") == "bailing_hybrid" else 2 * dim * (hidden + width)
        weights = 4 * hidden * width + gates + hidden * heads
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
        if read.get("model_type") in WITHOUT_MLP:
            width = read("intermediate_size", default=width)
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

    def __call__(self, *names: str, default: int | None = None, among: Sequence[bool] = ()) -> int:
        """Of a list with an entry for each layer, the largest, `among` these layers if any of them is.

        Without a `default` one of the names must be given.
        """
        for name in names:
            if value := self.get(name):
                if not isinstance(value, list | tuple):
                    return int(value)
                chosen = [each for each, counts in zip(value, among, strict=True) if counts] if any(among) else []
                return int(max(chosen or value))
        if default is None:
            raise UserError(
                "config", f"no {names[0]}", "give a causal language model's config or CostModel(linear=...)"
            )
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
