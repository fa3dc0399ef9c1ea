"""What `import padfree` gives: every public name is listed, can be had, and costs nothing before it is used."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import padfree

PROGRAM = """
import sys
import padfree
listed = [name for name in dir(padfree) if not name.startswith("__")]
assert set(padfree.__all__) <= set(listed), sorted(set(padfree.__all__) - set(listed))
assert "transformers" not in sys.modules, "import padfree loads transformers"
for name in listed:
    getattr(padfree, name)
assert padfree.losses.gae and padfree.compat.hf.PackedCollator and padfree.compat.slime.pack_sequences
assert [name for name in dir(padfree) if not name.startswith("__") and name not in listed] == []
"""


def test_dir_is_complete_before_anything_is_loaded() -> None:
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


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
