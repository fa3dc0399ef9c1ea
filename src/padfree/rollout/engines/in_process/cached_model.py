"""An HF model whose attention uses a `KVCache`: packed prefill of prompts, and decode steps with one token per slot.

    prefill    a pack of T tokens of prompts        ->  keys and values at cache indices [T], no logits
    decode     one token for each of L slots [L]    ->  hidden states [L, D]

A slot holds one response that is being sampled. The model sees all tokens as one sequence. This works because all
layers but attention treat tokens independently.

With `exact=True`, the results are bitwise equal to those of the trainer (`rollout.exact`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from padfree.batch import AttnContext, LmHead, LocalBatch
from padfree.layers.compile import layer_compiler
from padfree.model.grouped_matmuls import use_exact_matmuls
from padfree.model.interface import NAME, attention, mark_image_layers, position_limit, text_config
from padfree.model.outputs import base_of, described_head
from padfree.model.route_replay import RouteRecorder
from padfree.model.vision.families import family_of, language_part
from padfree.model.vision.features import embedded
from padfree.rollout.engines.in_process.decode_attention import decode_attention
from padfree.rollout.engines.in_process.decode_experts import all_stacked, use_decode_experts
from padfree.rollout.engines.in_process.exact_attention import exact_decode_attention, store_keys
from padfree.rollout.engines.in_process.kv_cache import KVCache, LayerShape
from padfree.segments import Segments

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Fields of HF configs that can hold the number of experts."""


@dataclass(frozen=True, slots=True, eq=False)
class _DecodeLayer:
    """What attention needs in one layer of a decode step: the layer's cached keys and values, and the slots.

    A slot describes one response that is being sampled.
    """

    keys: Tensor  # [M, Hkv, d]
    values: Tensor  # [M, Hkv, dv]
    slots: Tensor  # [F, L]: F fields of L slots
    longest: int  # maximum number of keys of a slot
    exact: bool  # whether attention has the bits of the trainer


@dataclass(frozen=True, slots=True, eq=False)
class _PrefillLayer:
    """What attention needs in one layer to prefill a pack of prompts: the layer's cache, and where to store keys."""

    keys: Tensor
    values: Tensor
    indices: Tensor  # [T] cache indices
    packed: AttnContext


@dataclass(frozen=True, slots=True, eq=False)
class _ShapeOfLayer:
    """Used by a trial forward pass, in which each layer appends the shape of its keys and values to `shapes`."""

    shapes: list[LayerShape]
    packed: AttnContext


@dataclass(frozen=True, slots=True, eq=False)
class _Context:
    """The attention context of a forward pass of the model. `of_layer` returns the context of one layer."""

    exact: bool
    of_layer: Callable[[int], _DecodeLayer | _PrefillLayer | _ShapeOfLayer]


def unsupported_reason(model: PreTrainedModel) -> str | None:
    """Return the reason why this model cannot be decoded with padfree's KV cache, or None if it can."""
    if position_limit(text_config(model.config)) is not None:
        return "the model's rotary frequencies depend on the longest response in the batch"
    if layers_of_model(model) is None:
        return "the model's layers are not in a ModuleList"
    return None


def can_be_captured(model: PreTrainedModel) -> bool:
    """Return whether a CUDA graph can capture a decode step, i.e. whether every step launches the same kernels.

    Experts whose weights are not stacked into one tensor cannot be captured, because a step skips the experts that no
    token has chosen.
    """
    config = text_config(model.config)
    return not any(getattr(config, name, None) for name in EXPERTS) or all_stacked(model)


class CachedModel:
    """Runs an unsharded model in evaluation mode with a KV cache."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        backend: str = "auto",
        compiled: bool = False,
        exact: bool = False,
        recorder: RouteRecorder | None = None,
    ) -> None:
        """`recorder`: records the routes (the experts that each token uses) of each pass; None: nothing is recorded."""
        layers = layers_of_model(model)
        assert layers is not None
        assert not model.training
        self.model, self.device, self.backend, self.compiled, self.exact = model, model.device, backend, compiled, exact
        self.recorder = recorder
        self._base, self._family, self._language = base_of(model), family_of(model), base_of(model)
        name = f"{NAME}_rollout_{backend}"
        AttentionInterface.register(name, partial(_cached_attention, backend=backend))
        if self._family is None:
            model.set_attn_implementation(name)
        else:  # the vision tower keeps its own attention
            model.set_attn_implementation({"": name, "text_config": name})
            self._language = getattr(self._base, self._family.language)
            if self._family.whole_images:
                mark_image_layers(self._language)
        if exact:
            use_exact_matmuls(model, self.device)
        else:
            use_decode_experts(model)
        run = _run_layer
        if compiled:
            compiler = layer_compiler("inductor", "none", operators=True, exact=True) if exact else "inductor"
            run = torch.compile(_run_layer, backend=compiler)
        for index, layer in enumerate(layers):
            # `layer(...)` calls this attribute, but `layer.forward(...)` does not. `nn.Module.compile` sets it too.
            object.__setattr__(layer, "_compiled_call_impl", partial(_call_layer, layer, index, run))

    def head(self) -> LmHead:
        """Return the LM head with its current weights."""
        head = described_head(self.model)
        assert head is not None
        return head

    @torch.no_grad()
    def layer_shapes(self) -> list[LayerShape]:
        """Return the shapes of the keys and values of each layer. A forward pass of one token finds them."""
        shapes: list[LayerShape] = []
        packed = AttnContext(segments=Segments.from_lengths([1], device=self.device))
        one = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        self._forward(_Context(self.exact, lambda _: _ShapeOfLayer(shapes, packed)), one, input_ids=one)
        return shapes

    @torch.no_grad()
    def prefill(self, pack: LocalBatch, indices: Tensor, cache: KVCache) -> None:
        """Store the keys and values of a pack of prompts in the cache. `indices` [T]: the cache index of each token."""
        context = _Context(
            self.exact, lambda layer: _PrefillLayer(cache.keys[layer], cache.values[layer], indices, pack.context)
        )
        inputs = {"input_ids": pack.input_ids[None]}
        if self._family is not None and pack.images is not None:
            inputs = embedded(self._base, self._family, pack.input_ids, pack.images)
        self._forward(context, pack.positions, **inputs)

    @torch.no_grad()
    def decode(self, tokens: Tensor, positions: Tensor, slots: Tensor, cache: KVCache, longest: int) -> Tensor:
        """Run one decode step. Return the last hidden states [L, D] of one new token in each of L slots.

        `tokens`, `positions`: [L]. `slots` [F, L]: fields of each slot (see `decode_attention`). `longest`: maximum
        number of earlier keys of a slot.
        """
        context = _Context(
            self.exact, lambda layer: _DecodeLayer(cache.keys[layer], cache.values[layer], slots, longest, self.exact)
        )
        return self._forward(context, positions[None], input_ids=tokens[None])

    def _forward(self, context: _Context, positions: Tensor, **inputs: Any) -> Tensor:
        """Run the language model. `positions` are [1, T], or [P, 1, T] for rotary positions in P dimensions."""
        if self.recorder is not None:
            self.recorder.clear()
        output: Any = self._language(
            **inputs, position_ids=positions, attention_mask=None, use_cache=False, attn_context=context
        )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden


def layers_of_model(model: PreTrainedModel) -> nn.ModuleList | None:
    language = language_part(model)
    wanted = int(language.config.num_hidden_layers)
    lists = (module for module in language.modules() if isinstance(module, nn.ModuleList) and len(module) == wanted)
    return next(lists, None)


def _call_layer(layer: nn.Module, index: int, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    context = kwargs["attn_context"]
    assert isinstance(context, _Context), "a layer was called outside of CachedModel"
    narrowed = context.of_layer(index)  # outside of compiled code, so that all layers share one compiled graph
    kwargs = {**kwargs, "attn_context": narrowed}
    if isinstance(narrowed, _ShapeOfLayer) or (isinstance(narrowed, _PrefillLayer) and not context.exact):
        return _run_layer(layer, *args, **kwargs)
    if run is not _run_layer:
        _mark_variable((*args, *kwargs.values()))
        if isinstance(narrowed, _DecodeLayer):
            _mark(narrowed.slots, 1)
        else:
            _mark(narrowed.indices, 0)
            _mark(narrowed.packed.segments.cu_seqlens, 0)
    return run(layer, *args, **kwargs)


def _run_layer(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return layer.forward(*args, **kwargs)


def _mark_variable(inputs: Sequence[Any]) -> None:
    """Tell the compiler that the number of slots L varies, so that it does not compile once for each number.

    `inputs` have L as a dimension: hidden states [1, L, D], positions [1, L].
    """
    for each in inputs:
        if isinstance(each, Tensor) and each.ndim >= 2:
            _mark(each, 1)
        elif isinstance(each, tuple):
            _mark_variable(each)


def _mark(tensor: Tensor, dim: int) -> None:
    if not hasattr(tensor, "_dynamo_weak_dynamic_indices"):
        torch._dynamo.maybe_mark_dynamic(tensor, dim)


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
    """Compute attention with padfree's KV cache, for HF's attention interface: return output [1, T, H, dv] and None.

    Unsupported arguments are rejected by `padfree.model.interface.attention` during prefill, so that decode steps need
    no check.
    """
    context = attn_context
    if isinstance(context, _DecodeLayer):
        q, k, v = (states.transpose(1, 2).squeeze(0).contiguous() for states in (query, key, value))
        scale = q.shape[2] ** -0.5 if scaling is None else scaling
        arguments = (
            q, k, v, context.keys, context.values, context.slots, s_aux, scale, sliding_window, softcap, context.longest
        )  # fmt: skip
        out = exact_decode_attention(*arguments, backend) if context.exact else decode_attention(*arguments)
        return out[None], None
    k, v = (states.transpose(1, 2).squeeze(0) for states in (key, value))
    if isinstance(context, _PrefillLayer):
        store_keys(context.keys, context.values, context.indices, k, v)
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
