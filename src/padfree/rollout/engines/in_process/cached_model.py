"""An HF model whose attention keeps its keys and values in a `KVCache`: prompts go in packed, tokens one per lane.

    prefill    tokens [T] of prompts end to end    ->  keys and values at `places` [T]            no logits
    decode     one token for each of L lanes [L]   ->  hidden states [L, D]                       see decode_attention

Both are one row to the model, `[1, T]` and `[1, L]`, with the positions of its tokens: everything but attention treats
tokens one by one, which is what `padfree.model.probe` has made sure of. What attention needs comes as an argument of
the forward, never as a global. On its way into a layer the argument is narrowed to that layer, outside of what is
compiled: so all layers share one compiled graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from padfree.batch import AttnContext, LmHead, Segments
from padfree.model.interface import NAME, attention, position_limit
from padfree.model.outputs import base_of, described_head
from padfree.rollout.engines.in_process.decode_attention import decode_attention
from padfree.rollout.engines.in_process.kv_cache import KVCache, LayerShape

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names of the number of experts in HF configs."""


@dataclass(frozen=True, slots=True, eq=False)
class _DecodeLayer:
    """What the attention of one layer is given for a decode step."""

    keys: Tensor  # [M, Hkv, d]
    values: Tensor  # [M, Hkv, dv]
    slots: Tensor  # [rows, L]
    longest: int  # keys of a lane, at most


@dataclass(frozen=True, slots=True, eq=False)
class _PrefillLayer:
    """The same for a row of prompts."""

    keys: Tensor
    values: Tensor
    places: Tensor  # [T]
    packed: AttnContext


@dataclass(frozen=True, slots=True, eq=False)
class _ShapeOfLayer:
    """Asks the attention of a layer what it would store."""

    shapes: list[LayerShape]
    packed: AttnContext


@dataclass(frozen=True, slots=True, eq=False)
class _Context:
    """What travels through the model's forward; `of_layer` is what each layer gets of it."""

    of_layer: Callable[[int], _DecodeLayer | _PrefillLayer | _ShapeOfLayer]


def unsupported_reason(model: PreTrainedModel) -> str | None:
    """Why this model cannot be decoded with a cache of ours; None if it can."""
    if position_limit(model.config) is not None:
        return "its rotary frequencies depend on the longest response beside"
    if _layers(model) is None:
        return "it has no list of its layers"
    return None


def can_be_captured(model: PreTrainedModel) -> bool:
    """Whether a step has the same kernels whatever its tokens are. Experts that get no token are left out."""
    return not any(getattr(model.config, name, None) for name in EXPERTS)


class CachedModel:
    """A whole model in evaluation mode, and how it is called."""

    def __init__(self, model: PreTrainedModel, *, backend: str = "auto", compiled: bool = False) -> None:
        layers = _layers(model)
        assert layers is not None
        assert not model.training
        self.model, self.device = model, model.device
        name = f"{NAME}_rollout_{backend}"
        AttentionInterface.register(name, partial(_cached_attention, backend=backend))
        model.set_attn_implementation(name)
        run = torch.compile(_run_layer) if compiled else _run_layer
        for index, layer in enumerate(layers):
            # What `nn.Module.compile` uses as well: calls of the layer come here, its own forward stays as it is.
            object.__setattr__(layer, "_compiled_call_impl", partial(_call_layer, layer, index, run))

    def head(self) -> LmHead:
        """As it is at this moment."""
        found = described_head(self.model)
        assert found is not None
        return found

    @torch.no_grad()
    def layer_shapes(self) -> list[LayerShape]:
        """What a token takes in each layer, asked with a row of one token."""
        shapes: list[LayerShape] = []
        packed = AttnContext(segments=Segments.from_lengths([1], device=self.device))
        one = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._forward(one, one, _Context(lambda _: _ShapeOfLayer(shapes, packed)))
        return shapes

    @torch.no_grad()
    def prefill(
        self, tokens: Tensor, positions: Tensor, places: Tensor, lengths: Sequence[int], cache: KVCache
    ) -> None:
        """Keys and values of prompts of these lengths, end to end: all arguments [T], places on the cache's axis."""
        packed = AttnContext(segments=Segments.from_lengths(lengths, device=self.device))
        self._forward(
            tokens,
            positions,
            _Context(lambda layer: _PrefillLayer(cache.keys[layer], cache.values[layer], places, packed)),
        )

    @torch.no_grad()
    def decode(self, tokens: Tensor, positions: Tensor, slots: Tensor, cache: KVCache, longest: int) -> Tensor:
        """[L, D] last hidden states of one token for each lane [L], none of which sees more than `longest` before."""
        return self._forward(
            tokens,
            positions,
            _Context(lambda layer: _DecodeLayer(cache.keys[layer], cache.values[layer], slots, longest)),
        )

    def _forward(self, tokens: Tensor, positions: Tensor, context: _Context) -> Tensor:
        output: Any = base_of(self.model)(
            input_ids=tokens[None],
            position_ids=positions[None],
            attention_mask=None,
            use_cache=False,
            attn_context=context,
        )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden


def _layers(model: PreTrainedModel) -> nn.ModuleList | None:
    wanted = int(model.config.num_hidden_layers)
    lists = (module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == wanted)
    return next(lists, None)


def _call_layer(layer: nn.Module, index: int, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    context = kwargs["attn_context"]
    assert isinstance(context, _Context), "a layer was called by someone else"
    narrowed = context.of_layer(index)
    kwargs = {**kwargs, "attn_context": narrowed}
    if not isinstance(narrowed, _DecodeLayer):
        return _run_layer(layer, *args, **kwargs)
    if run is not _run_layer:
        _mark_variable((*args, *kwargs.values(), narrowed.slots))
    return run(layer, *args, **kwargs)


def _run_layer(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return layer.forward(*args, **kwargs)


def _mark_variable(inputs: Sequence[Any]) -> None:
    """The number of lanes is a variable to the compiler: hidden states [1, L, D], positions [1, L], lanes [rows, L]."""
    for each in inputs:
        if isinstance(each, Tensor) and each.ndim >= 2:
            if not hasattr(each, "_dynamo_weak_dynamic_indices"):
                torch._dynamo.maybe_mark_dynamic(each, 1)
        elif isinstance(each, tuple):
            _mark_variable(each)


def _cached_attention(
    module: nn.Module,
    query: Tensor,  # [1, H, T, d]
    key: Tensor,  # [1, Hkv, T, d]
    value: Tensor,  # [1, Hkv, T, dv]
    attention_mask: Tensor | None,
    *,
    backend: str,
    attn_context: _DecodeLayer | _PrefillLayer | _ShapeOfLayer,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """[1, T, H, dv] and no attention weights, as HF's attention layers call it.

    What `padfree.model.interface.attention` refuses is refused where prompts go through it; a decode step is the same
    layers with the same arguments.
    """
    context = attn_context
    if isinstance(context, _DecodeLayer):
        q, k, v = (states.transpose(1, 2).squeeze(0).contiguous() for states in (query, key, value))
        scale = q.shape[2] ** -0.5 if scaling is None else scaling
        out = decode_attention(
            q, k, v, context.keys, context.values, context.slots, s_aux, scale, sliding_window, softcap, context.longest
        )
        return out[None], None
    k, v = (states.transpose(1, 2).squeeze(0) for states in (key, value))
    if isinstance(context, _PrefillLayer):
        context.keys.index_copy_(0, context.places, k)
        context.values.index_copy_(0, context.places, v)
    else:
        context.shapes.append(LayerShape(heads=k.shape[1], key_size=k.shape[2], value_size=v.shape[2], dtype=k.dtype))
    return attention(
        module,
        query,
        key,
        value,
        attention_mask,
        backend=backend,
        attn_context=context.packed,
        scaling=scaling,
        sliding_window=sliding_window,
        softcap=softcap,
        s_aux=s_aux,
        **others,
    )
