"""The list of all kinds of mixers. `kind_of` returns the first kind that matches a module."""

from __future__ import annotations

from torch import nn

from padfree.model.mixers import gated_delta, generic, lightning, mamba1, mamba2, short_convolution
from padfree.model.mixers.mixer import MixerKind

KINDS: dict[str, MixerKind] = {
    each.KIND.name: each.KIND for each in (gated_delta, mamba2, mamba1, lightning, short_convolution, generic)
}


def kind_of(module: nn.Module) -> MixerKind:
    return next(kind for kind in KINDS.values() if kind.matches(module))
