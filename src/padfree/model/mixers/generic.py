"""Mixers of other kinds (RWKV's time shifts, RG-LRU): found by their behaviour, and run segment by segment."""

from __future__ import annotations

from torch import nn

from padfree.model.mixers.mixer import MixerKind


def matches(module: nn.Module) -> bool:
    return True


def _width(module: nn.Module) -> int:
    """Return an estimate of the number of values per token saved for backward: the largest dimension of any weight."""
    return max((max(parameter.shape) for parameter in module.parameters() if parameter.ndim), default=0)


def state_flops(module: nn.Module) -> int:
    return 10 * _width(module)


def state_width(module: nn.Module) -> int:
    return 4 * _width(module)


KIND = MixerKind(name="other", matches=matches, state_flops=state_flops, state_width=state_width)
