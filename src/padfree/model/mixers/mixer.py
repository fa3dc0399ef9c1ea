"""Describe mixers: modules that mix tokens without softmax attention, such as recurrences, convolutions and shifts.

`MixerKind` describes a kind of mixer, such as Mamba-2: how to recognise it and what it costs. `Mixer` describes one
module class: its kind and the arguments of its forward. `padfree.model.mixers.find_mixers` finds the mixers of a model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

Carrier = Literal["attn_context", "attention_mask"]
"""The argument in which a mixer (a module that mixes tokens without attention) receives the `AttnContext`.

It is `attention_mask` if the calling layer or the base model passes on the mask, but no other keyword arguments.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixer:
    """A class of mixers (modules that mix tokens without softmax attention) and the arguments of its forward.

    The fields name the arguments that hold the hidden states, other tensors with one value per token, and the
    `AttnContext`.
    """

    class_name: str  # from `qualified_name`
    kind: str
    carrier: Carrier
    hidden: str  # the parameter of the module's forward that takes the hidden states [1, T, D]
    # other parameters of forward that affect the result and take values per token: [1, T, ...], or tuples of these
    token_arguments: tuple[str, ...]
    handed_by: str  # class of the layer or base model that passes the context as the mask; "" if there is none


@dataclass(frozen=True, kw_only=True, slots=True)
class MixerKind:
    """A kind of mixer (a module that mixes tokens without softmax attention), such as Mamba-2.

    The fields say how to recognise such a mixer, how many FLOPs it takes, and how many activations it keeps for
    backward.
    """

    name: str
    matches: Callable[[nn.Module], bool]
    state_flops: Callable[[nn.Module], int]
    """The FLOPs per token of a forward pass for state updates and convolutions, without linear layers."""
    state_width: Callable[[nn.Module], int]
    """The number of values per token saved for backward, besides the inputs of linear layers."""
    functions: Callable[[torch.device], dict[str, Callable[..., Any]] | str] | None = None
    """For a device, returns a dict of functions that respect segment (sample) boundaries. Each key is the name of the
    transformers function to replace. If there are no functions for the device, returns the reason as a string.
    """
    dtypes: Callable[[torch.device], tuple[torch.dtype, ...]] = lambda device: (torch.float32,)
    """For a device, returns the dtypes of hidden states that `functions` support. Before `functions` are used, their
    results are tested in the first of these dtypes.
    """


def qualified_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def decay_of(module: nn.Module) -> Tensor | None:
    """Return the log decay of a recurrence: the parameter `A_log` of the module or of one of its submodules.

    Returns None if there is no such parameter. All models use this name.
    """
    return next((tensor for name, tensor in module.named_parameters() if name.split(".")[-1] == "A_log"), None)


def depthwise_convolutions(module: nn.Module) -> list[nn.Conv1d]:
    """Return the depthwise convolutions along the sequence that are direct children of the module."""
    return [child for child in module.children() if isinstance(child, nn.Conv1d) and child.groups == child.in_channels]


def convolution_flops(module: nn.Module) -> int:
    """Return the FLOPs per token of the module's depthwise convolutions."""
    return sum(2 * each.in_channels * each.kernel_size[0] for each in depthwise_convolutions(module))


def convolution_width(module: nn.Module) -> int:
    return sum(each.in_channels for each in depthwise_convolutions(module))
