"""Attention over packs. A pack is several samples concatenated to one sequence, and each token sees only its own
sample. Each call uses the fastest kernel that supports it.
"""

from padfree.attention.backend import AttentionBackend, AttentionNeeds, Capabilities
from padfree.attention.function import varlen_attention, varlen_backward, varlen_forward
from padfree.attention.selection import BACKENDS, choose_backend, register_backend
from padfree.attention.sinks import apply_sinks, sinks_gradient
from padfree.attention.spec import AttentionSpec

__all__ = [
    "BACKENDS",
    "AttentionBackend",
    "AttentionNeeds",
    "AttentionSpec",
    "Capabilities",
    "apply_sinks",
    "choose_backend",
    "register_backend",
    "sinks_gradient",
    "varlen_attention",
    "varlen_backward",
    "varlen_forward",
]
