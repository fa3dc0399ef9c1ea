"""The fallback kind, for mixers (modules that mix tokens without attention) that match no other kind, such as RG-LRU.

These mixers run on each segment (sample) of a pack separately.
"""

from __future__ import annotations

from torch import nn

from padfree.model.mixers.mixer import MixerKind


def matches(module: nn.Module) -> bool:
    return True


def _width(module: nn.Module) -> int:
    """Return the largest size in the shapes of the module's parameters, a rough estimate of the module's width."""
    return max((max(parameter.shape) for parameter in module.parameters() if parameter.ndim), default=0)


def state_flops(module: nn.Module) -> int:
    return 10 * _width(module)


def state_width(module: nn.Module) -> int:
    return 4 * _width(module)


KIND = MixerKind(name="other", matches=matches, state_flops=state_flops, state_width=state_width)
