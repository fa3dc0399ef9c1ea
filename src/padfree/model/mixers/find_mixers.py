"""Find the mixers of a model: modules that mix tokens without attention (recurrences, convolutions).

A small copy of the model (few layers, random weights) runs once. Each module is then run again with one token changed.
The module is a mixer if its outputs for other tokens change, and if it does not call transformers' attention.

If mixers contain mixers, `find_mixers` returns two alternatives: the innermost modules and the outermost modules.
`padfree.model.probe` uses the first alternative that gives correct results.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from transformers import AttentionInterface, PreTrainedModel

from padfree.batch import AttnContext
from padfree.model.interface import NAME, attention
from padfree.model.mixers.mixer import Carrier, Mixer, qualified_name
from padfree.model.mixers.registry import kind_of
from padfree.model.outputs import base_of
from padfree.model.structure import layers_of
from padfree.segments import Segments

LISTENER = f"{NAME}_listener"
NUM_TOKENS = 11
CHANGED = 3
TOLERANCE = 1e-5
"""A module mixes tokens if changing one token changes the output of another by more than this fraction of the largest
output. The fraction is not 0, because in a mixture of experts a changed token can change how other tokens are rounded.
"""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _MixerCall:
    arguments: dict[str, Any]  # by parameter, without **kwargs
    others: dict[str, Any]  # **kwargs
    output: Any


def find_mixers(model: PreTrainedModel) -> list[tuple[Mixer, ...]]:
    """Find the mixers of a model: modules that mix tokens without attention.

    Returns up to two alternatives: the innermost mixers, then the outermost mixers. Each alternative has one `Mixer`
    per module class. The list is empty if the model has no mixer.
    """
    layers = list(layers_of(model))
    calls, attending = _calls(model, layers)
    mixing = {
        module
        for module in calls.keys() - set(layers)
        if not _attends(module, attending) and _mixes(module, calls[module])
    }
    inner = [module for module in mixing if not any(part in mixing for part in module.modules() if part is not module)]
    below = {part for module in mixing for part in module.modules() if part is not module}
    outer = [module for module in mixing if module not in below]
    choices = []
    # Inner modules have simpler arguments. The outer modules are for tokens that are also mixed around the inner ones.
    for modules in (inner, outer):
        mixers = {_described(module, calls, layers, base_of(model)) for module in modules}
        chosen = tuple(sorted(mixers, key=lambda mixer: (mixer.class_name, mixer.handed_by)))
        if chosen and chosen not in choices:
            choices.append(chosen)
    return choices


def _calls(model: PreTrainedModel, layers: list[nn.Module]) -> tuple[dict[nn.Module, _MixerCall], set[nn.Module]]:
    """Run the model and record how its modules are called.

    Returns the first call of every layer and of every module below a layer, and the set of modules that call attention.
    """
    calls: dict[nn.Module, _MixerCall] = {}
    attending: set[nn.Module] = set()

    def listen(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        attending.add(module)
        return attention(module, *args, **kwargs)

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if module not in calls:
            arguments, others = bound(module, args, kwargs)
            calls[module] = _MixerCall(arguments=arguments, others=others, output=output)

    AttentionInterface.register(LISTENER, listen)
    hooks = [
        module.register_forward_hook(keep, with_kwargs=True)
        for layer in layers
        for module in layer.modules()
        if not type(module).__module__.startswith("torch.")
    ]
    before = model.config._attn_implementation
    model.set_attn_implementation(LISTENER)
    try:
        with torch.no_grad():
            model(
                input_ids=torch.randint(0, model.config.vocab_size, (1, NUM_TOKENS)),
                position_ids=torch.arange(NUM_TOKENS)[None],
                attention_mask=None,
                use_cache=False,
                attn_context=AttnContext(segments=Segments.from_lengths([NUM_TOKENS])),
            )
    finally:
        for hook in hooks:
            hook.remove()
        model.set_attn_implementation(before)
    return calls, attending


def bound(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Bind the arguments of a call to the parameters of the module's forward.

    Returns the arguments by parameter name, and the **kwargs.
    """
    signature = inspect.signature(type(module).forward)
    arguments = dict(signature.bind_partial(module, *args, **kwargs).arguments)
    parameters = list(signature.parameters.values())
    arguments.pop(parameters[0].name)
    others: dict[str, Any] = {}
    for parameter in parameters:
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            others = dict(arguments.pop(parameter.name, {}))
    return arguments, others


def _attends(module: nn.Module, attending: set[nn.Module]) -> bool:
    return any(part in attending for part in module.modules())


def _first_tensor(output: Any) -> Tensor | None:
    """Return the output [1, T, D'] of a module: its result, or the first element if the result is a tuple. Returns None
    for any other result.
    """
    if isinstance(output, tuple) and output:
        output = output[0]
    if isinstance(output, Tensor) and output.ndim == 3 and output.shape[:2] == (1, NUM_TOKENS):
        return output
    return None


def _hidden_parameter(call: _MixerCall) -> str | None:
    """Return the name of the argument that holds the hidden states: the first argument of shape [1, T, D].

    Returns None if the call has no such argument.
    """
    for name, value in call.arguments.items():
        if isinstance(value, Tensor) and value.ndim == 3 and value.shape[:2] == (1, NUM_TOKENS):
            return name
    return None


def _mixes(module: nn.Module, call: _MixerCall) -> bool:
    """Return whether a change of one token changes the module's outputs for other tokens."""
    name, output = _hidden_parameter(call), _first_tensor(call.output)
    if name is None or output is None:
        return False
    changed = call.arguments[name].clone()
    changed[:, CHANGED] += torch.randn_like(changed[:, CHANGED])
    again = _result(module, call, {name: changed})
    apart = (again - output).abs()
    apart[:, CHANGED] = 0
    return bool(apart.max() > TOLERANCE * output.abs().max())


def _result(module: nn.Module, call: _MixerCall, changes: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        output = _first_tensor(module.forward(**{**call.arguments, **changes}, **call.others))
    assert output is not None, "the same call returned a tensor before"
    return output


def _described(
    module: nn.Module, calls: dict[nn.Module, _MixerCall], layers: list[nn.Module], base: PreTrainedModel
) -> Mixer:
    layer = next(layer for layer in layers if module in set(layer.modules()))
    call = calls[module]
    hidden = _hidden_parameter(call)
    assert hidden is not None
    carrier: Carrier = "attn_context" if _has_context(call) else "attention_mask"
    handed_by = ""
    if carrier == "attention_mask":
        handed_by = qualified_name(type(layer) if _has_context(calls[layer]) else type(base))
    return Mixer(
        class_name=qualified_name(type(module)),
        kind=kind_of(module).name,
        carrier=carrier,
        hidden=hidden,
        token_arguments=tuple(_read_token_arguments(module, call, hidden)),
        handed_by=handed_by,
    )


def _has_context(call: _MixerCall) -> bool:
    return "attn_context" in call.others or "attn_context" in call.arguments


def _read_token_arguments(module: nn.Module, call: _MixerCall, hidden: str) -> Iterator[str]:
    """Return the parameters of forward, besides `hidden`, that hold one value per token and affect the result.

    Each argument is reversed along the tokens to see whether the output changes, because modules also get many
    arguments that they do not use.
    """
    output = _first_tensor(call.output)
    assert output is not None
    for name, value in call.arguments.items():
        leaves = tree_leaves(value)
        if name == hidden or not leaves or not all(_belongs_to_tokens(leaf) for leaf in leaves):
            continue
        other = tree_map(lambda leaf: leaf.flip(1), value)
        if not torch.equal(_result(module, call, {name: other}), output):
            yield name


def _belongs_to_tokens(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim >= 2 and value.shape[:2] == (1, NUM_TOKENS)
