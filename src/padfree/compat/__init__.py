"""Adapters that offer padfree through the interfaces of other projects: `padfree.compat.hf` and
`padfree.compat.slime`.
"""

from __future__ import annotations

from padfree.lazy import load_when_used

__getattr__, __dir__ = load_when_used(__name__, {}, parts=("hf", "slime"))
