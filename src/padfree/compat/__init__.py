"""padfree under the interfaces of other projects: `padfree.compat.hf` and `padfree.compat.slime`."""

from __future__ import annotations

import importlib
from types import ModuleType

_PARTS = ("hf", "slime")


def __dir__() -> list[str]:
    return sorted({*_PARTS, *(name for name in globals() if name.startswith("__"))})


def __getattr__(name: str) -> ModuleType:
    if name in _PARTS:
        return importlib.import_module(f"padfree.compat.{name}")
    raise AttributeError(f"module 'padfree.compat' has no attribute {name!r}")
