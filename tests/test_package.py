"""What `import padfree` gives: every public name is listed, can be had, and costs nothing before it is used.

What must be seen in an interpreter that has nothing loaded is in `test_layers.py`.
"""

from __future__ import annotations

import importlib

import pytest

import padfree


@pytest.mark.parametrize("name", ["attention", "cp", "data", "head", "losses", "model", "packing", "compat.slime"])
def test_every_listed_name_exists(name: str) -> None:
    module = importlib.import_module(f"padfree.{name}")
    assert sorted(set(module.__all__)) == sorted(module.__all__)
    assert all(hasattr(module, listed) for listed in module.__all__)


def test_what_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'padfree' has no attribute 'packed'"):
        padfree.packed  # noqa: B018
    with pytest.raises(AttributeError, match=r"module 'padfree\.compat' has no attribute 'trl'"):
        padfree.compat.trl  # noqa: B018
