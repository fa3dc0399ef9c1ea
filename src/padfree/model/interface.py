"""The attention function that padfree registers in transformers, and the check of the model's inputs.

After `padfree.attach(model)`, transformers calls this function in every attention layer. Its name in transformers is
`padfree`, or `padfree_<backend>` if a backend was chosen.

Every call of the model gets an `AttnContext`, which describes the samples of the pack. No state is kept between calls.
A keyword argument that padfree does not know raises an error.
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
from padfree.batch import AttnContext
from padfree.cp import attend
from padfree.errors import UserError
from padfree.segments import Segments

NAME = "padfree"

UNRELATED_ARGUMENTS = (
    "num_items_in_batch",
    "output_hidden_states",
    "output_router_logits",
    "position_ids",
    "use_cache",
)
"""Keyword arguments that Hugging Face models pass to attention and that do not affect which keys a query sees."""


def register(backend: str) -> str:
    """Register padfree's attention with this backend in transformers.

    Returns the name of the attention implementation.
    """
    name = NAME if backend == "auto" else f"{NAME}_{backend}"
    # No mask function is registered: transformers would compare `position_ids` on the device and synchronise.
    AttentionInterface.register(name, partial(attention, backend=backend))
    return name


def is_attached(config: PreTrainedConfig) -> bool:
    """Return whether models with this config call padfree's attention."""
    name = config._attn_implementation or ""
    return name == NAME or name.startswith(f"{NAME}_")


def need_attached(model: PreTrainedModel) -> None:
    """Raise `UserError` if `attach` was not called on the model, because the model's own attention would mix the
    samples of a pack.

    The name of the attention implementation does not prove that `attach` was called, because users can set it directly.
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
    layer_positions: Tensor | None = None,  # [T] index of each query in the layer's input, if the input was reordered
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute the attention of one layer for T packed tokens. Returns the output [1, T, H, dv], and None in place of
    the attention weights.

    H and Hkv are the numbers of query and key heads. A backend named in `attn_context` overrides `backend`.
    """
    name = type(module).__name__
    if attn_context is None:
        raise UserError(
            "attn_context",
            f"did not reach {name}, because the model drops keyword arguments",
            "train this model with padding",
        )
    if attention_mask is not None and attention_mask is not attn_context:  # some layers pass the context as the mask
        raise UserError(
            "attention_mask", f"is not None in {name}", "pass None: attn_context already describes the samples"
        )
    if is_causal is False or (is_causal is None and getattr(module, "is_causal", True) is False):
        raise UserError("is_causal", f"is False in {name}", "use a decoder model: only causal layers can be packed")
    if dropout:
        raise UserError(
            "dropout",
            f"is {dropout} in {name}, but packs do not support attention dropout",
            "set the config's attention dropout to 0, or call model.eval()",
        )
    if output_attentions:
        raise UserError("output_attentions", "is True, but attention weights are never computed", "set it to False")
    if sliding_window is not None and sliding_window < 1:
        raise UserError(
            "sliding_window",
            f"is {sliding_window} in {name}, which is not a valid window",
            "set the config's window to None, or to 1 or more",
        )
    for argument, content in others.items():
        if content is not None and argument not in UNRELATED_ARGUMENTS:
            raise UserError(
                argument,
                f"was passed to {name}, but padfree's attention does not support this argument",
                "remove the argument from the call",
            )
    if query.shape[0] != 1:
        raise UserError(
            "input_ids", f"has a batch size of {query.shape[0]}, not 1", "pack the samples with padfree.pack"
        )
    if key.shape[2] != query.shape[2]:
        raise UserError(
            "past_key_values",
            f"gives {key.shape[2]} keys for {query.shape[2]} queries",
            "remove it: training uses no KV cache",
        )
    if attn_context.backend != "auto":
        backend = attn_context.backend
    # `squeeze(0)` returns a view in forward and backward, whereas the gradient of `states[0]` would need a copy.
    q, k, v = (states.transpose(1, 2).squeeze(0) for states in (query, key, value))
    chunk = chunk_of(module)
    if (chunk is not None or counts_positions(module)) and attn_context.segments.parents is not None:
        raise UserError(
            "share_prefixes",
            f"is not supported by {name}, which counts positions along the whole pack",
            "pack with share_prefixes=False",
        )
    if counts_positions(module):
        q = _scaled_by_position(module, q, attn_context, layer_positions)
    if chunk is not None and attn_context.segments.max_seqlen > chunk:
        attn_context = _chunked(attn_context, chunk, name)
    image_blocks = sees_whole_images(module) and attn_context.image_blocks is not None
    # Outside the compiled graph (context parallelism, image blocks), attention is a graph break.
    in_graph = torch.compiler.is_compiling() and attn_context.layout is None and not image_blocks
    if in_graph and attn_context.prefix_keys is not None:
        output = prefix_attention(
            q, k, v, attn_context.segments, attn_context.prefix_keys, scale=scaling, window=sliding_window,
            softcap=softcap, sinks=s_aux, backend=backend,
        )  # fmt: skip
    elif in_graph and chunk is None:
        output = self_attention(
            q, k, v, attn_context.segments, scale=scaling, window=sliding_window, softcap=softcap, sinks=s_aux,
            backend=backend,
        )  # fmt: skip
    else:
        output = _attend(
            q, k, v, attn_context, backend, scale=scaling, window=sliding_window, softcap=softcap, sinks=s_aux,
            image_blocks=image_blocks,
        )  # fmt: skip
    return output.contiguous()[None], None  # some HF layers rely on contiguous outputs


def mark_image_layers(language: PreTrainedModel) -> None:
    """Mark all layers of a language model, so that its attention lets the tokens of an image attend to each other
    (Gemma 3).
    """
    for module in language.modules():
        module._padfree_whole_images = True  # type: ignore[assignment]


def sees_whole_images(module: nn.Module) -> bool:
    """Return whether `mark_image_layers` marked this layer, so that the tokens of an image attend to each other."""
    return getattr(module, "_padfree_whole_images", False)


def mark_chunked_layers(model: PreTrainedModel) -> None:
    """Store the chunk size in each layer that attends inside chunks of positions, as most layers of Llama 4 do."""
    for module in model.modules():
        config, number = getattr(module, "config", None), getattr(module, "layer_idx", None)
        kinds = getattr(config, "layer_types", None) or ()
        # If a layer read its own index while it runs, the compiler would compile every layer separately.
        if isinstance(number, int) and number < len(kinds) and kinds[number] == "chunked_attention":
            module._padfree_chunk_tokens = config.attention_chunk_size  # type: ignore[union-attr]


def chunk_of(module: nn.Module) -> int | None:
    """Return the chunk size in tokens of a layer with chunked attention, or None for any other layer."""
    return getattr(module, "_padfree_chunk_tokens", None)


@torch.compiler.disable(reason="AttnContext is host data")  # type: ignore[no-untyped-call, untyped-decorator]
def _chunked(context: AttnContext, chunk: int, name: str) -> AttnContext:
    """Return a copy of `context` in which each sample is cut into segments of `chunk` tokens. Tokens attend only within
    their segment.

    `name` is the class name of the layer, for error messages.
    """
    if context.layout is not None:
        raise UserError(
            "attention_chunk_size",
            f"{chunk} of {name} is not supported for a sample of {context.segments.max_seqlen} tokens on "
            f"{context.world} context ranks",
            f"use samples of at most {chunk} tokens, or one context rank",
        )
    lengths: list[int] = []
    for length in context.segments.lengths.tolist():
        lengths += [chunk] * (length // chunk) + [length % chunk] * (length % chunk > 0)
    segments = Segments.from_lengths(lengths, device=context.segments.cu_seqlens.device)
    return replace(context, segments=segments)


def counts_positions(module: nn.Module) -> bool:
    """Return whether the layer scales its queries by positions that it counts along the whole pack, as in Llama 4."""
    return bool(getattr(module, "attn_temperature_tuning", False)) and not getattr(module, "use_rope", True)


def _scaled_by_position(module: Any, q: Tensor, context: AttnContext, layer_positions: Tensor | None) -> Tensor:
    """Correct the factors by which a layer (of Llama 4) scaled its queries q [T, H, d].

    The layer used positions in the pack instead of positions in the sample. `layer_positions` [T] are the positions
    that the layer used; None means 0, 1, 2, ...
    """
    here = torch.arange(len(q), device=q.device)
    tokens = here if context.plan is None else context.plan.own
    counted = here if layer_positions is None else layer_positions
    starts = context.segments.cu_seqlens
    positions = tokens - starts[torch.searchsorted(starts, tokens, right=True) - 1]

    def scales(numbers: Tensor) -> Tensor:
        found: Tensor = torch.log1p(torch.floor((numbers.float() + 1.0) / module.floor_scale)) * module.attn_scale + 1.0
        return found

    scaled: Tensor = q * (scales(positions) / scales(counted))[:, None, None]
    return scaled.to(q.dtype)


@torch.compiler.disable(reason="AttnContext is host data")  # type: ignore[no-untyped-call, untyped-decorator]
def _attend(q: Tensor, k: Tensor, v: Tensor, context: AttnContext, backend: str, **options: Any) -> Tensor:
    _need_tokens(len(q), context)
    return attend(q, k, v, replace(context, backend=backend), **options)


def check_inputs(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook that raises `UserError` for arguments with which a pack would silently give wrong results.

    The hook does nothing while the model uses another attention implementation, so that
    `set_attn_implementation("sdpa")` restores the stock model, for example for generation.
    """
    config = model.config
    assert isinstance(config, PreTrainedConfig)
    if not is_attached(config):
        return
    name = type(model).__name__
    if len(args) > 1:
        raise UserError(
            name, f"was called with {len(args)} positional arguments", "call it with **LocalBatch.model_inputs()"
        )
    # A model without positions may pass only a mask to its base model. In that case the mask argument holds the
    # context.
    handed = isinstance(kwargs.get("attention_mask"), AttnContext)
    if handed:
        kwargs = {**kwargs, "attn_context": kwargs["attention_mask"], "attention_mask": None}
    context = kwargs.get("attn_context")
    if not isinstance(context, AttnContext):
        raise UserError("attn_context", f"is missing in the call of {name}", "call it with **LocalBatch.model_inputs()")
    _check_length(args, kwargs, context)
    if kwargs.get("position_ids") is None and not handed:
        raise UserError(
            "position_ids",
            "is missing, so HF would count positions along the whole pack",
            "call the model with **LocalBatch.model_inputs()",
        )
    for argument, cure in _REFUSED.items():
        passed = kwargs.get(argument)
        if isinstance(passed, dict) and not any(mask is not None for mask in passed.values()):
            continue  # one mask per layer type, and all are None
        if passed is not None:
            raise UserError(argument, f"was passed to {name}, but packs do not support it", cure)
    for argument in ("use_cache", "output_attentions"):
        chosen = kwargs.get(argument)
        if getattr(config, argument, False) if chosen is None else chosen:
            raise UserError(
                argument, f"is True in the call of {name}, but packs do not support it", f"pass {argument}=False"
            )
    check_positions(position_limit(text_config(config)), context.segments.num_positions)


def _check_length(args: tuple[Any, ...], kwargs: dict[str, Any], context: AttnContext) -> None:
    given = args[0] if args else kwargs.get("input_ids")
    given = kwargs.get("inputs_embeds") if given is None else given
    if isinstance(given, Tensor):
        _need_tokens(given.shape[1], context)


def _need_tokens(num_tokens: int, context: AttnContext) -> None:
    expected = context.segments.num_tokens // context.world
    if num_tokens != expected:
        raise UserError(
            "attn_context",
            f"is for {expected} tokens, but the input has {num_tokens}",
            "take all arguments of the model from the same LocalBatch",
        )


_REFUSED = {
    "attention_mask": "remove it: attn_context already describes the samples",
    "past_key_values": "remove it: training uses no KV cache",
    "labels": "remove the labels, because HF would shift them across samples; use the batch's labels with padfree.head",
}


def check_positions(limit: int | None, longest: int) -> None:
    """Raise `UserError` if the longest sample has more tokens than `limit`, the result of `position_limit`.

    Some types of RoPE (dynamic, longrope) would then use other frequencies for the whole pack.
    """
    if limit is not None and longest > limit:
        raise UserError(
            "rope_parameters",
            f"the longest sample (or the padding) has {longest} tokens, but more than {limit} tokens change the rotary "
            "frequencies of the pack",
            f"shorten samples and padding to {limit} tokens each",
        )


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the config of a vision-language model's language model. A config of any other model is returned
    unchanged.
    """
    return config.get_text_config(decoder=True) if "vision_config" in config.sub_configs else config


def position_limit(config: PreTrainedConfig) -> int | None:
    """Return the maximum length of a sample in tokens, or None if there is no limit.

    With dynamic RoPE and longrope, a longer sample would change the rotary frequencies of the whole pack.
    """
    parameters = getattr(config, "rope_parameters", None)
    if not isinstance(parameters, dict):
        return None
    limits = []
    # a config has one set of parameters for all layers, or one per layer type
    for entry in (parameters, *parameters.values()):
        if not isinstance(entry, dict):
            continue
        kind = str(entry.get("rope_type", "default"))
        if kind == "longrope":
            limits.append(int(entry["original_max_position_embeddings"]))
        elif "dynamic" in kind:
            limits.append(int(config.max_position_embeddings))
    return min(limits, default=None)
