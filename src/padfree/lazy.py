"""Let a package import its names on first use, so that a light command does not wait for the import of torch.

__getattr__, __dir__ = load_when_used(__name__, {"load_sft": "padfree.data.prepare"}, parts=("prepare",))
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def load_when_used(
    package: str, names: Mapping[str, str], *, parts: Sequence[str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the functions `__getattr__` and `__dir__` of a package.

    `names` maps each exported name to the module that defines it. `parts` are the submodules of the package.
    """

    def find(name: str) -> Any:
        if name in names:
            return getattr(importlib.import_module(names[name]), name)
        if name in parts:
            return importlib.import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def listed() -> list[str]:
        own = (name for name in vars(sys.modules[package]) if name.startswith("__"))
        return sorted({*names, *parts, *own})

    return find, listed
