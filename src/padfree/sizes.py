"""Sizes of a Hugging Face causal language model, from which padfree estimates FLOPs and memory.

    Qwen3-0.6B   hidden 1024   heads 16 of 128   query 2048   key, value 1024   mlp 3072   layers 28   vocabulary 151936

transformers builds the model on the meta device, and the sizes are read from its modules. A new architecture therefore
needs no code here. Only heads, windows, and the number of experts per token are read from the config.

A config may also be a dict, or another object with the fields in `NEEDED`. For a multimodal model, only the language
model is measured.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from padfree.errors import UserError
from padfree.model.mixers import kind_of
from padfree.model.structure import auto_class, layers_of
from padfree.model.vision.families import language_part
from padfree.model.wrapper import language_config

NEEDED = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k")


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSizes:
    """The widths of one layer's attention. Widths of queries, keys, values and outputs are summed over all heads."""

    head: int  # size of one head of queries and keys
    query: int
    gate: int  # width of the output gate; 0 if there is none
    key: int
    value: int
    output: int  # width of attention's output before the output projection


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSizes:
    """The sizes of a model: widths, and numbers of layers, heads and experts.

    If layers differ in a width, the value is the largest width.
    """

    hidden: int
    layers: int
    vocabulary: int
    heads: int
    attention: AttentionSizes  # of layers with full attention
    # attention of layers with a sliding window, which have narrower heads in a few models
    windowed_attention: AttentionSizes
    latent: bool  # whether queries, keys and values come from low-rank projections
    mlp: int
    experts: int  # experts per layer; 0 if the model is not a mixture of experts
    experts_per_token: int
    expert_mlp: int
    shared_mlp: int  # width of the experts that process every token
    sparse: tuple[bool, ...]  # which layers have experts
    window: int
    windowed_layers: int
    full_layers: int
    layer_types: tuple[str, ...]  # empty if the config names none
    mixer_layers: int  # layers with a recurrent state, instead of attention or in addition to it
    weights: float  # number of matmul weights that process one token, including the head
    state_flops: int  # forward FLOPs per token of the state updates of all mixers, without their matmuls

    @staticmethod
    def of(config: Any) -> ModelSizes:
        """Return the sizes of a model from its config. Raise `UserError` if the config lacks the sizes of a decoder."""
        if not isinstance(config, PreTrainedConfig):
            config = _from_dict(_fields(config))
        config = language_config(config) or config
        return _counted(_SizeKey(config))

    @property
    def head(self) -> int:
        """Return the size of an attention head. If full and windowed attention have different head sizes, the result is
        the larger one.

        The properties `query`, `key`, `value` and `output` also return the larger of the sizes of full and windowed
        attention.
        """
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


def attends(layer: nn.Module) -> bool:
    """Return whether a layer on the meta device has attention, even if it also has a mixer (recurrence or
    convolution).
    """
    return bool(_attentions(layer))


def mixers_of(layer: nn.Module) -> list[nn.Module]:
    """Return the mixers (recurrences, convolutions) of a layer on the meta device, recognised by their parameters."""
    return [module for module in layer.modules() if kind_of(module).name != "other"]


def _fields(config: Any) -> Mapping[str, Any]:
    return config if isinstance(config, Mapping) else getattr(config, "__dict__", {})


def _from_dict(values: Mapping[str, Any]) -> PreTrainedConfig:
    fields = _fields(values.get("text_config") or values)
    other: Mapping[str, str] = {}
    for name in NEEDED:
        if not fields.get(name) and not fields.get(other.get(name, name)):
            raise UserError(
                "config", f"has no {name}", "give the config of a causal language model, or pass CostModel(linear=...)"
            )
        if fields["model_type"] not in CONFIG_MAPPING:
            raise UserError(
                "config", f"has unknown model_type {fields['model_type']!r}", "give a type that transformers supports"
            )
        other = CONFIG_MAPPING[fields["model_type"]].attribute_map
    config: PreTrainedConfig = AutoConfig.for_model(**fields)
    return config


class _SizeKey:
    """A key of the cache of model sizes. Configs with equal values have equal keys."""

    def __init__(self, config: PreTrainedConfig) -> None:
        self.config, self._text = config, f"{type(config)}{config.to_json_string(use_diff=False)}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _SizeKey) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)


@lru_cache(maxsize=64)
def _counted(key: _SizeKey) -> ModelSizes:
    config = key.config
    from_hub = type(config).__module__.startswith("transformers_modules.")  # its code ran when it was loaded
    with torch.device("meta"):
        model = auto_class(config).from_config(config, trust_remote_code=from_hub)
    return count(model)


def count(model: PreTrainedModel) -> ModelSizes:
    """Return the widths and the numbers of layers, heads and experts of an unsharded model without adapters."""
    config, layers = model.config.get_text_config(), list(layers_of(model))
    heads, hidden = int(getattr(config, "num_attention_heads", 0)), int(config.hidden_size)
    types = tuple(getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ())
    slides = [kind == "sliding_attention" for kind in types] or [False] * len(layers)
    window, windowed, full = _windows(config, types, len(layers))
    found = [(_attention(config, layer), slide) for layer, slide in zip(layers, slides, strict=True)]
    attention = _widest([sizes for sizes, slide in found if sizes and not slide] or [each for each, _ in found if each])
    windowed_attention = _widest([sizes for sizes, slide in found if sizes and slide]) if any(slides) else attention
    experts = [_experts(layer, hidden) for layer in layers]
    sparse = tuple(number > 0 for number, _ in experts)
    per_token = next((int(k) for name in EXPERTS_PER_TOKEN if (k := getattr(config, name, None))), 0)
    mlps = [_mlp(layer, hidden) for layer in layers]
    mixers = [mixer for layer in layers for mixer in mixers_of(layer)]
    number = max(number for number, _ in experts)
    return ModelSizes(
        hidden=hidden,
        layers=len(layers),
        vocabulary=int(config.vocab_size),
        heads=heads,
        attention=attention,
        windowed_attention=windowed_attention,
        latent=bool(getattr(config, "kv_lora_rank", None)),
        mlp=max((width for width, mixture in zip(mlps, sparse, strict=True) if not mixture), default=0) or max(mlps),
        experts=number,
        experts_per_token=per_token if number else 0,
        expert_mlp=max(width for _, width in experts),
        shared_mlp=max((width for width, mixture in zip(mlps, sparse, strict=True) if mixture), default=0),
        sparse=sparse,
        window=window,
        windowed_layers=windowed,
        full_layers=full,
        layer_types=types,
        mixer_layers=len(mixers),
        weights=_met_weights(model, per_token / number if number else 0.0),
        state_flops=sum(kind_of(mixer).state_flops(mixer) for mixer in mixers),
    )


def _windows(config: PreTrainedConfig, types: tuple[str, ...], layers: int) -> tuple[int, int, int]:
    """Return the window size, the number of layers with windowed attention, and the number with full attention."""
    window = int(getattr(config, "sliding_window", None) or 0)
    chunked = types.count("chunked_attention")
    if chunked:
        window = int(getattr(config, "attention_chunk_size", 0)) // 2  # half a chunk: the mean number of keys
    if not types:
        everywhere = window > 0 and getattr(config, "use_sliding_window", None) is not False
        return window, layers if everywhere else 0, 0 if everywhere else layers
    full = sum(kind in ("full_attention", "attention", "hybrid") for kind in types)
    return window, types.count("sliding_attention") + chunked, full


def _attentions(layer: nn.Module) -> list[nn.Module]:
    """Return the attention modules of a layer, except those inside a mixer (a recurrence or convolution)."""
    inside = {part for mixer in mixers_of(layer) for part in mixer.modules()}
    return [each for each in layer.modules() if type(each).__name__.endswith("Attention") and each not in inside]


def _attention(config: PreTrainedConfig, layer: nn.Module) -> AttentionSizes | None:
    """Return the widths of a layer's attention projections, or None if the layer has no attention.

    A projection that computes q, k and v together has keys and values of equal width: (its output width − width of the
    queries) / 2.
    """
    modules = [each for each in _attentions(layer) if _linear(each)]
    if not modules:
        return None
    module, heads, hidden = modules[-1], int(config.num_attention_heads), int(config.hidden_size)
    projections = _linear(module)
    back = [each for each in projections if each[3] == hidden and each[0][0] not in "qkvg"]
    (_, out, output, _) = (back or projections)[-1]
    inputs = [each for each in projections if each[1] is not out]
    if getattr(config, "kv_lora_rank", None):  # every head has keys and values of its own
        head = int(config.qk_rope_head_dim) + int(config.qk_nope_head_dim)
        return AttentionSizes(head=head, query=heads * head, gate=0, key=heads * head, value=output, output=output)
    written = sum(width for _, _, _, width in inputs)
    keys = [width for name, _, _, width in inputs if name in ("k_proj", "key")]
    key = keys[0] if keys else (written - output) // 2
    head = int(getattr(module, "head_dim", None) or output // heads)
    gate = output if written >= 2 * output + 2 * key and key else 0
    return AttentionSizes(head=head, query=output, gate=gate, key=key, value=key, output=output)


def _widest(found: list[AttentionSizes]) -> AttentionSizes:
    """Return the attention sizes of the layer with the widest queries and, among such layers, the widest keys.

    A layer that reuses the keys of another layer has key width 0.
    """
    return max(found, key=lambda sizes: (sizes.query, sizes.key), default=_NOTHING)


_NOTHING = AttentionSizes(head=1, query=0, gate=0, key=0, value=0, output=0)


def _linear(module: nn.Module) -> list[tuple[str, nn.Module, int, int]]:
    """Return a tuple for each linear layer in a module, in order.

    Each tuple is (last part of the layer's name, the layer, its input width, its output width).
    """
    found: list[tuple[str, nn.Module, int, int]] = []
    for name, each in module.named_modules():
        last = name.rpartition(".")[2]
        if isinstance(each, nn.Linear):
            found.append((last, each, each.in_features, each.out_features))
        elif isinstance(each, Conv1D):
            found.append((last, each, int(each.nx), int(each.nf)))
    return found


def _mlp(layer: nn.Module, hidden: int) -> int:
    """Return the width of a layer's MLP or shared experts: the input width of the projection back to `hidden`."""
    outside = {part for each in (*_attentions(layer), *mixers_of(layer)) for part in each.modules()}
    outside |= {part for name, each in layer.named_modules() if _is_experts(name) for part in each.modules()}
    last: dict[str, int] = {}  # by parent module: the input width of its last layer with output width `hidden`
    for name, each in layer.named_modules():
        for _, linear, read, written in _linear(each) if isinstance(each, nn.Linear | Conv1D) else ():
            if written == hidden and linear not in outside:
                last[name.rpartition(".")[0]] = read
    return max(last.values(), default=0)


def _is_experts(name: str) -> bool:
    return name.rpartition(".")[2] == "experts"


def _experts(layer: nn.Module, hidden: int) -> tuple[int, int]:
    """Return the number of experts in a layer, and the width of one expert.

    The width is computed from the expert's smallest matrix. If the layer has no experts, both numbers are 0.
    """
    for name, module in layer.named_modules():
        if _is_experts(name):
            matrices = [each for each in module.parameters() if each.ndim >= 2]
            whole = [each for each in matrices if each.ndim == 3]
            number = whole[0].shape[0] if whole else len(list(module.children()))
            smallest = min(each.numel() for each in whole) // number if whole else min(e.numel() for e in matrices)
            return number, smallest // hidden
    return 0, 0


def _language_modules(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a model. For a vision-language model, yield only its language model and its head."""
    language = language_part(model)
    yield from language.named_modules(remove_duplicate=False)
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if language is not model and head is not None:
        yield "lm_head", head


def _met_weights(model: PreTrainedModel, met: float) -> float:
    """Return the number of weights in the matmuls that process one token.

    `met` is the fraction of the experts that a token is routed to: only this fraction of the weights of routed experts
    counts. The tower of a vision-language model does not count.
    """
    found = 0.0
    for name, module in _language_modules(model):
        if isinstance(module, nn.Linear | Conv1D):
            found += module.weight.numel() * (met if re.search(r"experts\.\d", name) else 1)
        elif _is_experts(name):
            found += met * sum(each.numel() for each in module.parameters(recurse=False) if each.ndim == 3)
        elif re.search(r"(router|gate)$", name):  # routers that are not linear layers
            found += sum(each.numel() for each in module.parameters(recurse=False) if each.ndim == 2)
    return found
