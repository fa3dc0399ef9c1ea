"""What layers do along the sequence besides softmax attention, kept inside each sample.

mixer              what is known of a mixer, and what a kind is
find               which modules are mixers, found on the probe's small copy
by_segment         the way that is right everywhere: the module's own forward on each segment
fast_way           on all segments at once, where that was found right on the machine at hand
own_forward        the module's own forward with other functions than transformers'
convolution        a short convolution that stops at boundaries, in plain PyTorch
fla_kernels        recurrences with boundaries, by flash-linear-attention
forward            one of the two ways in front of the module's own forward
kinds              gated_delta, mamba2, mamba1, short_convolution, lightning, other: one file each
"""

from padfree.model.mixers.find_mixers import find_mixers
from padfree.model.mixers.forward import install, installed
from padfree.model.mixers.mixer import Mixer, MixerKind
from padfree.model.mixers.registry import KINDS, kind_of

__all__ = ["KINDS", "Mixer", "MixerKind", "find_mixers", "install", "installed", "kind_of"]
