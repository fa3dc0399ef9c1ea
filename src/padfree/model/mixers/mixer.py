"""What is known of a mixer, and the kinds there are.

A mixer is what a layer does along the sequence besides softmax attention: a recurrence, a convolution, a shift. Its
module is found on the small copy of the probe (`padfree.model.mixers.find_mixers`) by what it does. The kind
is read from its parameters and says what it costs; a mixer of no known kind is run segment by segment like any other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

Carrier = Literal["attn_context", "attention_mask"]
"""The argument by which a mixer gets the AttnContext. A layer that drops keyword arguments still passes a mask on, and
so does a base model that does not even pass them to its layers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixer:
    """How modules of one class are called."""

    class_name: str  # with its module, as `qualified_name` gives it
    kind: str
    carrier: Carrier
    hidden: str  # the parameter of its forward that takes the hidden states [1, T, D]
    token_arguments: tuple[str, ...]  # other parameters [1, T, ...], or tuples of such, that its result depends on
    handed_by: str  # class of the layer or base model that puts the context into the place of the mask; "" for none


@dataclass(frozen=True, kw_only=True, slots=True)
class MixerKind:
    """A kind of mixer: how to recognise it and what it costs."""

    name: str
    matches: Callable[[nn.Module], bool]
    state_flops: Callable[[nn.Module], int]
    """FLOPs a token of a forward pass besides those of linear layers: state updates and convolutions."""
    state_width: Callable[[nn.Module], int]
    """Values a token that a backward pass needs, besides what goes into its linear layers."""
    functions: Callable[[torch.device], dict[str, Callable[..., Any]] | str] | None = None
    """Functions that know segments, by the names of those of transformers that they replace; or why there are none."""
    dtypes: Callable[[torch.device], tuple[torch.dtype, ...]] = lambda device: (torch.float32,)
    """Of the hidden states that these functions take; the first is the one that is tried."""


def qualified_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def decay_of(module: nn.Module) -> Tensor | None:
    """The logarithm of the decay of a recurrence, which all call alike, in the module or in a part of it."""
    return next((tensor for name, tensor in module.named_parameters() if name.split(".")[-1] == "A_log"), None)


def depthwise_convolutions(module: nn.Module) -> list[nn.Conv1d]:
    """The convolutions of the module itself that run along the sequence, each channel by itself."""
    return [child for child in module.children() if isinstance(child, nn.Conv1d) and child.groups == child.in_channels]


def convolution_flops(module: nn.Module) -> int:
    """A token's part of the depthwise convolutions."""
    return sum(2 * each.in_channels * each.kernel_size[0] for each in depthwise_convolutions(module))


def convolution_width(module: nn.Module) -> int:
    return sum(each.in_channels for each in depthwise_convolutions(module))
