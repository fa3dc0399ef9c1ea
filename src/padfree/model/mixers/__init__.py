"""Mixers: modules that mix tokens without softmax attention (recurrences, convolutions). In a pack, they must mix only
tokens of the same sample.

A segment is a stretch of consecutive tokens of a pack that belong to one sample.

mixer              `Mixer` and `MixerKind`
find_mixers        find the mixers of a model by running a small copy of it
by_segment         the reference: run the module's own forward on each segment
varlen_kernel      the fast alternative: run all segments at once, if a test on this machine shows that this is correct
own_forward        a copy of the module's own forward that calls given functions in place of transformers' functions
convolution        a short convolution that stops at segment boundaries, in plain PyTorch
fla_kernels        recurrences with segment boundaries, from flash-linear-attention
forward            install by_segment or varlen_kernel in place of the module's forward
registry           the list of the kinds of mixers, one file each: gated_delta, mamba2, mamba1, short_convolution,
                   lightning, generic
"""

from padfree.model.mixers.find_mixers import find_mixers
from padfree.model.mixers.forward import install, installed
from padfree.model.mixers.mixer import Mixer, MixerKind
from padfree.model.mixers.registry import KINDS, kind_of

__all__ = ["KINDS", "Mixer", "MixerKind", "find_mixers", "install", "installed", "kind_of"]
