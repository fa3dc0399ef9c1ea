"""Mixers of a model on packed rows: the forward that their modules then have.

    layer                    mixer(hidden [1, T, D], attn_context=..., ...)
    packed_forward           whole segments of the row, on one rank each       padfree.cp over context ranks
                             the module's own forward on each of them          padfree.model.mixers.by_segment
                             back to the places of the tokens

The module keeps its class, its weights and its own forward; the instance has another one in front of it, which does
nothing while the model uses an attention implementation of transformers. The AttnContext comes with the call: as an
argument of its own, or in the place of the mask where the layer passes nothing else on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformers import PreTrainedConfig, PreTrainedModel

from padfree.batch import AttnContext
from padfree.cp import from_whole_segments, to_whole_segments
from padfree.model.interface import is_attached
from padfree.model.mixers.by_segment import by_segment
from padfree.model.mixers.find import bound
from padfree.model.mixers.mixer import Mixer, qualified_name
from padfree.model.outputs import base_of

STATE = "_padfree_mixer"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MixerState:
    """What an installed module remembers: nothing that depends on data."""

    mixer: Mixer
    config: PreTrainedConfig  # of the model, which says whether it is attached
    order: Tensor | None = None  # [T] the probe's: place i of the row holds token order[i]


def install(model: PreTrainedModel, mixers: Sequence[Mixer], order: Tensor | None = None) -> int:
    """Run these mixers of the model on whole segments; how many modules that are. Again: as if for the first time."""
    by_class = {mixer.class_name: mixer for mixer in mixers}
    handing = {mixer.handed_by for mixer in mixers}
    count = 0
    for module in model.modules():
        name = qualified_name(type(module))
        if name in by_class:
            state = MixerState(mixer=by_class[name], config=model.config, order=order)
            object.__setattr__(module, STATE, state)
            object.__setattr__(module, "forward", MethodType(packed_forward, module))
            count += 1
        # a model that hands it to its base passes the mask on, too, and perhaps nothing else
        hands = name in handing or (module is model and qualified_name(type(base_of(model))) in handing)
        if hands and hand_context not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(hand_context, with_kwargs=True)
    return count


def installed(module: nn.Module) -> Mixer | None:
    """What this module is as a mixer, if it was installed as one."""
    state = module.__dict__.get(STATE)
    return state.mixer if isinstance(state, MixerState) else None


def hand_context(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """A forward pre-hook of what passes a mask on and drops keyword arguments: the context takes the mask's place."""
    context = kwargs.get("attn_context")
    if not isinstance(context, AttnContext) or kwargs.get("attention_mask") is not None:
        return None
    return args, {**kwargs, "attention_mask": context}


def packed_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of an installed mixer: its own, segment by segment."""
    state = module.__dict__[STATE]
    if not is_attached(state.config):
        return type(module).forward(module, *args, **kwargs)
    arguments, others = bound(module, args, kwargs)
    context = others.get("attn_context", arguments.get("attn_context"))
    if state.mixer.carrier == "attention_mask":
        context = arguments.get("attention_mask")
    if not isinstance(context, AttnContext):
        raise ValueError(
            f"attn_context: did not reach {type(module).__name__}; its model drops keyword arguments and cannot be "
            "trained packed"
        )
    return _mixed(module, state, arguments, context)


@torch.compiler.disable(reason="AttnContext is host data")  # type: ignore[no-untyped-call, untyped-decorator]
def _mixed(module: nn.Module, state: MixerState, arguments: dict[str, Any], context: AttnContext) -> Any:
    mixer = state.mixer
    name = type(module).__name__
    if context.segments.parents is not None:
        raise ValueError(
            f"share_prefixes: {name} carries a state along the sequence, which does not fork where samples branch; "
            "make the row with share_prefixes=False"
        )
    if any(argument.startswith(("past", "cache")) and value is not None for argument, value in arguments.items()):
        raise ValueError(f"past_key_values: given to {name}; training needs no cache")
    if context.segments.parents is not None:
        raise ValueError(f"batch.share_prefixes: samples share them, but {name} carries a state; set it to false")
    tokens = {argument: arguments[argument] for argument in (mixer.hidden, *mixer.token_arguments)}
    leaves, shape = tree_flatten(tokens)
    rows = [leaf.squeeze(0) for leaf in leaves]
    needed = context.segments.num_tokens // context.world
    if any(len(row) != needed for row in rows):
        raise ValueError(
            f"attn_context: made for {needed} tokens, {name} has {len(rows[0])}; pass both from one LocalBatch"
        )
    # What the module ignores is not cut into segments, and so must not be there at all.
    rest = {argument: None if _holds_tensors(value) else value for argument, value in arguments.items()}
    rest.pop("attn_context", None)
    if mixer.carrier == "attention_mask":
        rest["attention_mask"] = None
    form: list[Any] = []

    def call(values: list[Tensor]) -> Tensor:
        output = type(module).forward(module, **{**rest, **tree_unflatten(values, shape)})
        form.append(output)
        return output[0] if isinstance(output, tuple) else output  # type: ignore[no-any-return]

    result = _on_whole_segments(call, rows, context, state.order)[None]
    return (result, *(None for _ in form[0][1:])) if isinstance(form[0], tuple) else result


def _holds_tensors(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in tree_flatten(value)[0])


def _on_whole_segments(call: Any, rows: list[Tensor], context: AttnContext, order: Tensor | None) -> Tensor:
    """[T/world, ...] of each -> [T/world, D']; the pad gives zeros."""
    segments = context.segments
    if context.layout is not None:
        moved = [to_whole_segments(row, context) for row in rows]
        return from_whole_segments(by_segment(call, [row for row, _ in moved], moved[0][1]), context)
    if order is not None:
        inverse = torch.argsort(order)
        rows = [row.index_select(0, inverse) for row in rows]
    lengths = segments.lengths[: segments.num_samples].tolist()
    real = sum(lengths)
    result = by_segment(call, [row[:real] for row in rows], lengths)
    result = nn.functional.pad(result, (0, 0, 0, segments.num_tokens - real))
    return result if order is None else result.index_select(0, order)
