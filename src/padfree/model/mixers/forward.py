"""Run mixers (modules that mix tokens without attention: recurrences, convolutions) on packs.

`install` replaces the forward of each mixer by `packed_forward`, which keeps the segments (samples) of a pack apart:

1. If several ranks share the pack (context parallelism), move each segment as a whole to one rank.
2. Run the mixer on one segment at a time, or on all segments at once.
3. If segments were moved, move the results back.

`choose_forwards` chooses between the two ways of step 2, before the first batch on a device.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformers import PreTrainedConfig, PreTrainedModel

from padfree.batch import AttnContext
from padfree.cp import from_whole_segments, to_whole_segments
from padfree.errors import UserError
from padfree.model.interface import is_attached
from padfree.model.mixers.by_segment import by_segment
from padfree.model.mixers.mixer import Mixer, qualified_name
from padfree.model.mixers.own_forward import reference_forward
from padfree.model.mixers.varlen_kernel import VarlenKernel, own_kernels_are_right, tested_kernel
from padfree.model.outputs import base_of
from padfree.segments import Segments

STATE = "_padfree_mixer"
CHOSEN_FOR = "_padfree_mixers_chosen_for"
HALF_TYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MixerState:
    """The information about a mixer (a module that mixes tokens without attention) that `packed_forward` needs to run
    it on packs. No field depends on a batch.
    """

    mixer: Mixer
    config: PreTrainedConfig  # config of the model; shows whether the model is attached
    parameters: tuple[str, ...]  # parameters of the module's own forward, in order, without **kwargs
    order: Tensor | None = None  # [T] for the probe's shuffled packs: index i of the pack holds token order[i]
    fast: VarlenKernel | None = None
    own_kernels: bool = False  # if run segment by segment: use the kernels that transformers finds, not plain PyTorch


def install(model: PreTrainedModel, mixers: Sequence[Mixer], order: Tensor | None = None, *, fast: bool = False) -> int:
    """Replace the forward of a model's mixers (modules that mix tokens without attention). Returns the number of
    modules.

    `order` is the token order of the shuffled packs of `padfree.model.probe`. `fast`: run mixers on all segments at
    once if they pass a test.
    """
    by_class = {mixer.class_name: mixer for mixer in mixers}
    handing = {mixer.handed_by for mixer in mixers}
    count = 0
    for module in model.modules():
        name = qualified_name(type(module))
        if name in by_class:
            state = MixerState(
                mixer=by_class[name], config=model.config, parameters=_parameters(type(module)), order=order
            )
            object.__setattr__(module, STATE, state)
            object.__setattr__(module, "forward", MethodType(packed_forward, module))
            count += 1
        # If the base model passes its layers only the mask, the model with the head may pass the base model only the
        # mask.
        hands = name in handing or (module is model and qualified_name(type(base_of(model))) in handing)
        if hands and hand_context not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(hand_context, with_kwargs=True)
    for module in {model, base_of(model)}:
        module.__dict__.pop(CHOSEN_FOR, None)
        if fast and count and choose_forwards not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(choose_forwards, with_kwargs=True)
        elif not fast:
            _remove_hook(module)
    return count


def _parameters(module_class: type[nn.Module]) -> tuple[str, ...]:
    parameters = list(inspect.signature(module_class.forward).parameters.values())[1:]
    return tuple(each.name for each in parameters if each.kind is not inspect.Parameter.VAR_KEYWORD)


def _remove_hook(module: nn.Module) -> None:
    for key, hook in list(module._forward_pre_hooks.items()):
        if hook is choose_forwards:
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)


def choose_forwards(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook that chooses how each mixer runs, before the first batch on a device.

    A mixer runs on all segments at once if it passes a test, otherwise on one segment at a time.
    """
    given = args[0] if args else kwargs.get("input_ids")
    given = kwargs.get("inputs_embeds") if given is None else given
    if not isinstance(given, Tensor) or model.__dict__.get(CHOSEN_FOR) == given.device:
        return
    ways: dict[type[nn.Module], tuple[VarlenKernel | None, bool]] = {}
    for module in model.modules():
        state = module.__dict__.get(STATE)
        if isinstance(state, MixerState):
            if type(module) not in ways:
                config = _config_of(module, state)
                way = tested_kernel(module, state.mixer, config, given.device)
                own = way is None and own_kernels_are_right(module, state.mixer, config, given.device)
                ways[type(module)] = way, own
            fast, own = ways[type(module)]
            object.__setattr__(module, STATE, replace(state, fast=fast, own_kernels=own))
    object.__setattr__(model, CHOSEN_FOR, given.device)


def _config_of(module: nn.Module, state: MixerState) -> PreTrainedConfig:
    config = getattr(module, "config", None)
    return config if isinstance(config, PreTrainedConfig) else state.config


def installed(module: nn.Module) -> Mixer | None:
    """Return the `Mixer` that describes this module, if its forward was replaced by `install`, or None otherwise."""
    state = module.__dict__.get(STATE)
    return state.mixer if isinstance(state, MixerState) else None


def hand_context(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Forward pre-hook that passes the `AttnContext` (the samples of the pack) in place of the attention mask.

    The hook is for modules that pass a mask to their submodules but drop other keyword arguments, such as
    `attn_context`.
    """
    context = kwargs.get("attn_context")
    if not isinstance(context, AttnContext) or kwargs.get("attention_mask") is not None:
        return None
    return args, {**kwargs, "attention_mask": context}


def packed_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run a mixer (a recurrence or convolution) on a pack, segment by segment or on all segments at once.

    This function replaces the forward of the mixer. A segment holds the tokens of one sample.
    """
    state = module.__dict__[STATE]
    if not is_attached(state.config):  # the user switched back to an attention implementation of transformers
        return type(module).forward(module, *args, **kwargs)
    given = {**dict(zip(state.parameters, args, strict=False)), **kwargs}
    context = given.pop("attn_context", None)
    if state.mixer.carrier == "attention_mask":
        context = given.pop("attention_mask", None)
    if not isinstance(context, AttnContext):
        raise UserError(
            "attn_context",
            f"did not reach {type(module).__name__}, because the model drops keyword arguments",
            "train this model with padding",
        )
    arguments = {name: value for name, value in given.items() if name in state.parameters}
    _check(module, arguments, context)
    fast = state.fast
    hidden = arguments[state.mixer.hidden]
    if fast is not None and hidden.dtype in fast.dtypes:
        if context.layout is not None:
            return _moved(fast, module, state, hidden, context)
        # This call is part of a compiled layer's graph; `_moved` and `_mixed` are graph breaks.
        return fast.forward(module, **{state.mixer.hidden: hidden, fast.boundaries: context.segments})
    return _mixed(module, state, arguments, context)


def _check(module: nn.Module, arguments: dict[str, Any], context: AttnContext) -> None:
    name = type(module).__name__
    if context.segments.parents is not None:
        raise UserError(
            "share_prefixes",
            f"is not supported by {name}, whose recurrent state cannot branch",
            "pack with share_prefixes=False",
        )
    if any(argument.startswith(("past", "cache")) and value is not None for argument, value in arguments.items()):
        raise UserError("past_key_values", f"was passed to {name}", "remove it: training uses no cache")


@torch.compiler.disable(reason="AttnContext is host data")  # type: ignore[no-untyped-call, untyped-decorator]
def _moved(fast: VarlenKernel, module: nn.Module, state: MixerState, hidden: Tensor, context: AttnContext) -> Any:
    """Run a mixer (a module that mixes tokens without attention) on a pack that is divided over context ranks.

    Each rank receives whole samples, runs the mixer on them in one call, and sends the results back.
    """
    states, lengths = to_whole_segments(hidden.squeeze(0), context)
    assert context.plan is not None
    segments = context.plan.prepared(
        "segments of mixers", lambda: Segments.from_lengths(lengths or [1], device=hidden.device)
    )
    if not lengths:  # run it even without tokens, because all ranks of a sharded model must use the same parameters
        states = states.sum(0, dtype=states.dtype, keepdim=True)
    output = fast.forward(module, **{state.mixer.hidden: states[None], fast.boundaries: segments})
    first, *others = output if isinstance(output, tuple) else (output,)
    result = first.squeeze(0)
    result = from_whole_segments(result if lengths else result[:0] + result.sum() * 0, context)[None]
    return (result, *(None for _ in others)) if isinstance(output, tuple) else result


@torch.compiler.disable(reason="AttnContext is host data")  # type: ignore[no-untyped-call, untyped-decorator]
def _mixed(module: nn.Module, state: MixerState, arguments: dict[str, Any], context: AttnContext) -> Any:
    mixer = state.mixer
    name = type(module).__name__
    tokens = {argument: arguments[argument] for argument in (mixer.hidden, *mixer.token_arguments)}
    leaves, shape = tree_flatten(tokens)
    values_of_tokens = [leaf.squeeze(0) for leaf in leaves]
    needed = context.segments.num_tokens // context.world
    if any(len(values) != needed for values in values_of_tokens):
        raise UserError(
            "attn_context",
            f"is for {needed} tokens, but {name} has {len(values_of_tokens[0])}",
            "take all arguments of the model from the same LocalBatch",
        )
    # Tensor arguments that the module ignores are not split into segments, so None is passed instead of them.
    rest = {argument: None if _holds_tensors(value) else value for argument, value in arguments.items()}
    if mixer.carrier == "attention_mask":
        rest["attention_mask"] = None
    own = state.own_kernels and leaves[0].dtype in HALF_TYPES
    plain = None if own else reference_forward(type(module))  # type: ignore[arg-type]
    forward = plain or type(module).forward
    form: list[Any] = []

    def call(values: list[Tensor]) -> Tensor:
        output = forward(module, **{**rest, **tree_unflatten(values, shape)})
        form.append(output)
        return output[0] if isinstance(output, tuple) else output  # type: ignore[no-any-return]

    result = _on_whole_segments(call, values_of_tokens, context, state.order)[None]
    return (result, *(None for _ in form[0][1:])) if isinstance(form[0], tuple) else result


def _holds_tensors(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in tree_flatten(value)[0])


def _on_whole_segments(call: Any, tokens: list[Tensor], context: AttnContext, order: Tensor | None) -> Tensor:
    """Apply `call` to each segment (sample) of a pack separately, even if the pack is divided over context ranks.

    `tokens` and the result have one row per token of this rank. The rows of padding tokens are zero in the result.
    """
    segments = context.segments
    if context.layout is not None:
        moved = [to_whole_segments(values, context) for values in tokens]
        return from_whole_segments(by_segment(call, [values for values, _ in moved], moved[0][1]), context)
    if order is not None:  # the pack is not divided over ranks, but shuffled: row i belongs to token order[i]
        inverse = torch.argsort(order)
        tokens = [values.index_select(0, inverse) for values in tokens]
    lengths = segments.lengths[: segments.num_samples].tolist()
    real = sum(lengths)
    result = by_segment(call, [values[:real] for values in tokens], lengths)
    result = nn.functional.pad(result, (0, 0, 0, segments.num_tokens - real))
    return result if order is None else result.index_select(0, order)
