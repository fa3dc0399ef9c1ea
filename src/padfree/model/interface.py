"""The attention function that a stock HF model calls, and the check of what reaches the model.

    HF attention layer      query [1, H, T, d]     key, value [1, Hkv, T, d]     **kwargs with attn_context
    cp.attend               q     [T, H, d]        k, v       [T, Hkv, d]        the AttnContext itself
    back to HF              output [1, T, H, dv], None

transformers looks an attention function up by the name in `config._attn_implementation`. Ours is registered as
`padfree`, or `padfree_<backend>` for a model that was attached to one backend. The name is all a model remembers; what
depends on data, the `AttnContext`, comes with every call. Nothing is kept between calls, so that recomputed activations
and a second model in the same process always see their own batch.

No mask function is registered under that name. transformers then hands `None` to its layers without looking at
`position_ids`, which costs nothing; with one it would compare positions on the device and wait for the answer.

A layer that asks for something padfree does not do is refused: every keyword argument that reaches the function is
used, or is known to say nothing about attention, or is an error.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from padfree.attention.operator import self_attention
from padfree.attention.prefix_attention import prefix_attention
from padfree.batch import AttnContext, Segments
from padfree.cp import attend
from padfree.errors import UserError

NAME = "padfree"

UNRELATED_ARGUMENTS = (
    "num_items_in_batch",
    "output_hidden_states",
    "output_router_logits",
    "position_ids",
    "use_cache",
)
"""Keyword arguments that HF passes down to attention and that say nothing about which key a query sees."""


def register(backend: str) -> str:
    """Make transformers know padfree's attention on this backend; the name to give to a model."""
    name = NAME if backend == "auto" else f"{NAME}_{backend}"
    AttentionInterface.register(name, partial(attention, backend=backend))
    return name


def is_attached(config: PreTrainedConfig) -> bool:
    """Whether models of this config call padfree's attention."""
    name = config._attn_implementation or ""
    return name == NAME or name.startswith(f"{NAME}_")


def need_attached(model: PreTrainedModel) -> None:
    """Refuse a model that `attach` has not prepared: its own attention would mix the samples of a row, or split them.

    The name of the implementation is not enough, because a model can be given it without having been probed.
    """
    if not is_attached(model.config) or check_inputs not in model._forward_pre_hooks.values():
        raise UserError("model", f"{type(model).__name__} is not attached", "call padfree.attach(model) first")


def attention(
    module: nn.Module,
    query: Tensor,  # [1, H, T, d]
    key: Tensor,  # [1, Hkv, T, d]
    value: Tensor,  # [1, Hkv, T, dv]
    attention_mask: Tensor | AttnContext | None,
    *,
    backend: str = "auto",
    attn_context: AttnContext | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,  # [H] attention sinks
    dropout: float = 0.0,
    is_causal: bool | None = None,
    output_attentions: bool | None = None,
    places: Tensor | None = None,  # [T] where each query was in the layer's row, if not here
    **others: Any,
) -> tuple[Tensor, None]:
    """[1, T, H, dv] and no attention weights. A backend named in the context wins over the model's own."""
    name = type(module).__name__
    if attn_context is None:
        raise UserError(
            "attn_context", f"did not reach {name}", "its model drops keyword arguments and cannot be trained packed"
        )
    if attention_mask is not None and attention_mask is not attn_context:  # a layer hands both kinds of mixers the same
        raise UserError(
            "attention_mask", f"{name} made one", "pass None, attn_context says which tokens belong together"
        )
    if is_causal is False or (is_causal is None and getattr(module, "is_causal", True) is False):
        raise UserError("is_causal", f"False in {name}", "only causal layers can be packed, use a decoder model")
    if dropout:
        raise UserError(
            "dropout", f"{dropout} in {name}", "set the config's attention dropout to 0, or call model.eval()"
        )
    if output_attentions:
        raise UserError("output_attentions", "True", "set it to False, attention weights are never formed")
    if sliding_window is not None and sliding_window < 1:
        raise UserError(
            "sliding_window", f"{sliding_window} in {name}", "set the config's window to None or 1 and more"
        )
    for argument, content in others.items():
        if content is not None and argument not in UNRELATED_ARGUMENTS:
            raise UserError(argument, f"reached {name} and padfree does not know it", "leave it out of the call")
    if query.shape[0] != 1:
        raise UserError(
            "input_ids", f"{query.shape[0]} rows", "lay the samples end to end in one row with padfree.pack"
        )
    if key.shape[2] != query.shape[2]:
        raise UserError(
            "past_key_values", f"{key.shape[2]} keys for {query.shape[2]} queries", "training needs no cache"
        )
    if attn_context.backend != "auto":
        backend = attn_context.backend
    # Views, and views going back as well: the gradient of `states[0]` would be written to memory anew.
    q, k, v = (states.transpose(1, 2).squeeze(0) for states in (query, key, value))
    chunk = chunk_of(module)
    if (chunk is not None or counts_positions(module)) and attn_context.segments.parents is not None:
        raise UserError(
            "share_prefixes", f"{name} counts positions through the row", "make the row with share_prefixes=False"
        )
    if counts_positions(module):
        q = _scaled_by_position(module, q, attn_context, places)
    if chunk is not None and attn_context.segments.max_seqlen > chunk:
        attn_context = _chunked(attn_context, chunk, name)
    if torch.compiler.is_compiling() and attn_context.layout is None and attn_context.prefix_keys is not None:
        output = prefix_attention(
            q, k, v, attn_context.segments, attn_context.prefix_keys, scale=scaling, window=sliding_window,
            softcap=softcap, sinks=s_aux, backend=backend,
        )  # fmt: skip
    elif torch.compiler.is_compiling() and attn_context.layout is None and chunk is None:
        output = self_attention(
            q, k, v, attn_context.segments, scale=scaling, window=sliding_window, softcap=softcap, sinks=s_aux,
            backend=backend,
        )  # fmt: skip
    else:
        output = _attend(
            q, k, v, attn_context, backend, scale=scaling, window=sliding_window, softcap=softcap, sinks=s_aux
        )
    return output.contiguous()[None], None  # HF's own functions return contiguous outputs, and some layers rely on it


def mark_chunked_layers(model: PreTrainedModel) -> None:
    """Let each attention layer know by itself that it attends inside chunks of positions, as most of Llama 4's do.

    The config says it by the layer's number. A compiled layer that asked for its number would be compiled for that
    number alone, and so would every other layer.
    """
    for module in model.modules():
        config, number = getattr(module, "config", None), getattr(module, "layer_idx", None)
        kinds = getattr(config, "layer_types", None) or ()
        if isinstance(number, int) and number < len(kinds) and kinds[number] == "chunked_attention":
            module._padfree_chunk_tokens = config.attention_chunk_size  # type: ignore[union-attr]


def chunk_of(module: nn.Module) -> int | None:
    """Tokens of a chunk where `mark_chunked_layers` has found that the layer attends by chunks."""
    return getattr(module, "_padfree_chunk_tokens", None)


@torch.compiler.disable(reason="AttnContext is host data")  # type: ignore[no-untyped-call, untyped-decorator]
def _chunked(context: AttnContext, chunk: int, name: str) -> AttnContext:
    """The same row in segments of at most `chunk` tokens; positions restart in each sample, so chunks begin with it."""
    if context.layout is not None:
        raise UserError(
            "attention_chunk_size",
            f"{chunk} in {name}, with a sample of {context.segments.max_seqlen} tokens over {context.world} context "
            "ranks",
            f"use samples of at most {chunk} tokens, or one context rank",
        )
    lengths: list[int] = []
    for length in context.segments.lengths.tolist():
        lengths += [chunk] * (length // chunk) + [length % chunk] * (length % chunk > 0)
    segments = Segments.from_lengths(lengths, device=context.segments.cu_seqlens.device)
    return replace(context, segments=segments)


def counts_positions(module: nn.Module) -> bool:
    """Whether the layer has scaled its queries by positions that it counted through the row, as Llama 4's do."""
    return bool(getattr(module, "attn_temperature_tuning", False)) and not getattr(module, "use_rope", True)


def _scaled_by_position(module: Any, q: Tensor, context: AttnContext, places: Tensor | None) -> Tensor:
    """The queries [T, H, d] as if each had been scaled by its position in its sample."""
    here = torch.arange(len(q), device=q.device)
    tokens = here if context.plan is None else context.plan.own
    places = here if places is None else places
    starts = context.segments.cu_seqlens
    positions = tokens - starts[torch.searchsorted(starts, tokens, right=True) - 1]

    def scales(numbers: Tensor) -> Tensor:
        found: Tensor = torch.log1p(torch.floor((numbers.float() + 1.0) / module.floor_scale)) * module.attn_scale + 1.0
        return found

    scaled: Tensor = q * (scales(positions) / scales(places))[:, None, None]
    return scaled.to(q.dtype)


@torch.compiler.disable(reason="AttnContext is host data")  # type: ignore[no-untyped-call, untyped-decorator]
def _attend(q: Tensor, k: Tensor, v: Tensor, context: AttnContext, backend: str, **options: Any) -> Tensor:
    _need_tokens(len(q), context)
    return attend(q, k, v, replace(context, backend=backend), **options)


def check_inputs(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A forward pre-hook: refuse what HF would accept and then quietly do wrong with a packed row.

    Does nothing while the model uses another attention implementation, so that `set_attn_implementation("sdpa")`
    gives the stock model back, for generation say.
    """
    config = model.config
    assert isinstance(config, PreTrainedConfig)
    if not is_attached(config):
        return
    name = type(model).__name__
    if len(args) > 1:
        raise UserError(name, f"{len(args)} positional arguments", "pass LocalBatch.model_inputs() as keywords")
    # A model without positions may hand its base nothing but a mask, in whose place mixers get their context.
    handed = isinstance(kwargs.get("attention_mask"), AttnContext)
    if handed:
        kwargs = {**kwargs, "attn_context": kwargs["attention_mask"], "attention_mask": None}
    context = kwargs.get("attn_context")
    if not isinstance(context, AttnContext):
        raise UserError("attn_context", f"missing in the call of {name}", "pass what LocalBatch.model_inputs() gives")
    _check_length(args, kwargs, context)
    if kwargs.get("position_ids") is None and not handed:
        raise UserError("position_ids", "missing, HF would count through the row", "pass LocalBatch.model_inputs()")
    for argument, cure in _REFUSED.items():
        if kwargs.get(argument) is not None:
            raise UserError(argument, f"given to {name}", cure)
    for argument in ("use_cache", "output_attentions"):
        chosen = kwargs.get(argument)
        if getattr(config, argument, False) if chosen is None else chosen:
            raise UserError(argument, f"True in the call of {name}", f"pass {argument}=False, a packed row has none")
    check_positions(position_limit(config), context.segments.num_positions)


def _check_length(args: tuple[Any, ...], kwargs: dict[str, Any], context: AttnContext) -> None:
    given = args[0] if args else kwargs.get("input_ids")
    given = kwargs.get("inputs_embeds") if given is None else given
    if isinstance(given, Tensor):
        _need_tokens(given.shape[1], context)


def _need_tokens(num_tokens: int, context: AttnContext) -> None:
    expected = context.segments.num_tokens // context.world
    if num_tokens != expected:
        raise UserError(
            "attn_context", f"made for {expected} tokens, input_ids has {num_tokens}", "pass both from one LocalBatch"
        )


_REFUSED = {
    "attention_mask": "leave it out, attn_context says which tokens belong together",
    "past_key_values": "leave it out, training needs no cache",
    "labels": "leave them out, HF would shift them across samples; use the batch's own labels with padfree.head",
}


def check_positions(limit: int | None, longest: int) -> None:
    """Refuse a row whose longest sample changes the rotary frequencies of the others; `limit` is `position_limit`."""
    if limit is not None and longest > limit:
        raise UserError(
            "rope_parameters",
            f"the frequencies of the whole row change when a sample is longer than {limit} tokens, and the longest "
            f"here has {longest}",
            f"keep samples and pad within {limit}",
        )


def position_limit(config: PreTrainedConfig) -> int | None:
    """The length up to which rotary frequencies do not depend on the longest sample of the row; None: always."""
    parameters = getattr(config, "rope_parameters", None)
    if not isinstance(parameters, dict):
        return None
    limits = []
    for entry in (parameters, *parameters.values()):  # one set for all layers, or one per layer type
        if not isinstance(entry, dict):
            continue
        kind = str(entry.get("rope_type", "default"))
        if kind == "longrope":
            limits.append(int(entry["original_max_position_embeddings"]))
        elif "dynamic" in kind:
            limits.append(int(config.max_position_embeddings))
    return min(limits, default=None)
