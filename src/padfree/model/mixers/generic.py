"""The kind of all mixers (modules that mix tokens without attention) for which there is no other kind, such as RWKV's
time shifts and RG-LRU. They run on each segment (sample) of a pack separately.
"""

from __future__ import annotations

from torch import nn

from padfree.model.mixers.mixer import MixerKind


def matches(module: nn.Module) -> bool:
    return True


def _width(module: nn.Module) -> int:
    """Return the largest dimension of the module's parameters, from which FLOPs and saved activations are estimated."""
    return max((max(parameter.shape) for parameter in module.parameters() if parameter.ndim), default=0)


def state_flops(module: nn.Module) -> int:
    return 10 * _width(module)


def state_width(module: nn.Module) -> int:
    return 4 * _width(module)


KIND = MixerKind(name="other", matches=matches, state_flops=state_flops, state_width=state_width)
