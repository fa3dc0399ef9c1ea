"""Mixers: modules that mix tokens without softmax attention (recurrences, convolutions). In a pack, a mixer must mix
only tokens of the same segment (usually a sample).

These are the main modules:

find_mixers        find the mixers of a model by running a small copy of it
by_segment         run the module's own forward on each segment (the reference)
varlen_kernel      run all segments at once, if a test on this machine shows that this is correct
forward            install by_segment or varlen_kernel in place of the module's forward
registry           the list of the kinds of mixers, one file each
"""

from padfree.model.mixers.find_mixers import find_mixers
from padfree.model.mixers.forward import install, installed
from padfree.model.mixers.mixer import Mixer, MixerKind
from padfree.model.mixers.registry import KINDS, kind_of

__all__ = ["KINDS", "Mixer", "MixerKind", "find_mixers", "install", "installed", "kind_of"]
