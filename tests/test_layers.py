"""Imports point one way only, and importing a training step's modules needs four packages and no more."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "padfree"

EVERYWHERE = {"errors"}
"""Every part may import it."""

MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "warning": set(),
    "collector": set(),
    "lazy": set(),
    "arrays": set(),
    "sizes": set(),
    "nodes": {"arrays"},
    "batch": {"arrays", "config", "nodes"},
    "config": set(),
    "data": {"batch", "config", "lazy"},
    "packing": {"arrays", "batch", "config", "nodes", "sizes"},
    "distributed": {"config"},
    "stop_signals": set(),
    "attention": {"arrays", "batch", "nodes", "warning"},
    "cp": {"arrays", "attention", "batch", "config", "distributed", "nodes"},
    "model": {"attention", "batch", "config", "cp", "distributed", "warning"},
    "layers": {"config", "warning"},
    "head": {"arrays", "batch", "config"},
    "losses": {"arrays", "batch", "config"},
    "estimate": {"config", "head", "layers", "model", "packing", "sizes"},
    "checkpoint": {"distributed", "model"},
    "record": {"batch", "config", "distributed", "model"},
    "rollout": {"arrays", "batch", "config", "data", "distributed", "model", "record", "warning"},
    "train": {
        "attention",
        "batch",
        "checkpoint",
        "collector",
        "config",
        "cp",
        "data",
        "distributed",
        "estimate",
        "head",
        "layers",
        "losses",
        "model",
        "packing",
        "record",
        "rollout",
        "sizes",
        "stop_signals",
        "warning",
    },
    "talk": {"config", "data", "model", "record", "rollout", "train"},
    "compat": {"arrays", "batch", "config", "lazy", "losses", "model", "packing"},
    "page": set(),
    "report": {"config", "page", "record"},
    "planner": {
        "arrays",
        "batch",
        "config",
        "cp",
        "data",
        "distributed",
        "estimate",
        "losses",
        "model",
        "packing",
        "page",
        "sizes",
        "train",
    },
    "check": {"batch", "config", "cp", "data", "distributed", "losses", "model", "packing", "sizes", "train"},
    "api": {"collector", "config", "record", "train"},
    "cli": {
        "check",
        "collector",
        "config",
        "data",
        "estimate",
        "model",
        "packing",
        "page",
        "planner",
        "record",
        "report",
        "stop_signals",
        "talk",
        "train",
        "warning",
    },
}
"""What each part may import, in the order of the data. A permission that nobody uses is an error."""

MUST_NOT_IMPORT: dict[str, set[str]] = {
    "api": {"torch", "transformers"},
    "errors": {"torch", "numpy"},
    "arrays": {"torch"},
    "collector": {"torch"},
    "stop_signals": {"torch"},
    "lazy": {"torch"},
    "sizes": {"torch", "transformers"},
    "config": {"torch"},
    "data": {"torch.distributed"},
    "nodes": {"torch"},
    "packing/fill": {"torch"},
    "packing/balance": {"torch"},
    "packing/step_plan": {"torch"},
    "packing/cost": {"torch"},
    "packing/prefixes": {"torch"},
    "attention": {"torch.distributed", "transformers"},
    "cp": {"transformers"},
    "layers": {"torch.distributed"},
    "head": {"torch.distributed", "transformers"},
    "losses": {"torch.distributed", "transformers"},
    "train": {"argparse", "tyro"},
}
CORE = {"torch", "numpy", "transformers", "safetensors", "padfree"}
FILES = sorted(SOURCE.rglob("*.py"))


def part_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


@cache
def imports(path: Path) -> frozenset[str]:
    """Every module named in an import statement of a file, with the names taken from it appended."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(found)


def names_package(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def parts_imported(path: Path) -> set[str]:
    """The parts of padfree that a file imports from, without its own and those that every part may import."""
    return (
        {module.split(".")[1] for module in imports(path) if module.startswith("padfree.")}
        - {part_of(path)}
        - EVERYWHERE
    )


def test_every_permission_is_used() -> None:
    used: dict[str, set[str]] = {part: set() for part in MAY_IMPORT}
    for path in FILES:
        if part_of(path) in used:
            used[part_of(path)] |= parts_imported(path)
    unused = {part: sorted(allowed - used[part]) for part, allowed in MAY_IMPORT.items() if allowed - used[part]}
    assert not unused


def test_the_table_has_no_cycle() -> None:
    TopologicalSorter(MAY_IMPORT).prepare()


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_follow_the_table(path: Path) -> None:
    part = part_of(path)
    if part in ("__init__", "__main__"):
        return
    assert part in MAY_IMPORT, f"{part} has no row in the import table"
    modules = imports(path)
    used = parts_imported(path)
    assert used <= MAY_IMPORT[part], f"{path.name} imports {sorted(used - MAY_IMPORT[part])}"
    stem = str(path.relative_to(SOURCE)).removesuffix(".py")
    for row, forbidden in MUST_NOT_IMPORT.items():
        if stem == row or stem.startswith(row + "/"):
            for package in forbidden:
                assert not [m for m in modules if names_package(m, package)], f"{stem} must not import {package}"


def test_losses_never_wait_for_the_device() -> None:
    for path in (SOURCE / "losses").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            assert not (isinstance(node, ast.Attribute) and node.attr in ("item", "tolist")), (
                f"{path.name}:{node.lineno}"
            )


def test_what_imports_bring() -> None:
    """In a fresh interpreter, one for all of this, `import padfree` loads no transformers and lists all that there is.
    Attention brings no compiler and no kernels. Every module needs torch, numpy, transformers and safetensors alone."""
    optional = [
        "rich",
        "datasets",
        "tyro",
        "triton",
        "plotly",
        "trl",
        "peft",
        "flash_attn",
        "quack",
        "liger_kernel",
        "matplotlib",
        "tensorboard",
        "wandb",
        "trackio",
    ]
    modules = [
        ".".join(("padfree", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")
        for path in FILES
        if path.name not in ("__main__.py", "kernels.py") and not path.name.startswith(("triton_", "quack_matmul"))
    ]
    program = f"""
import sys, importlib
import padfree

listed = [name for name in dir(padfree) if not name.startswith("__")]
assert set(padfree.__all__) <= set(listed), sorted(set(padfree.__all__) - set(listed))
assert "transformers" not in sys.modules, "import padfree loads transformers"

import torch, numpy
before = set(sys.modules)
import padfree.attention
heavy = ("flash_attn", "triton", "torch._dynamo", "torch._inductor", "transformers")
new = [name for name in set(sys.modules) - before if name.startswith(heavy)]
assert not new, f"padfree.attention loads {{new}}"

import safetensors.torch
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel  # transformers' own needs are not ours
loaded = set(sys.modules)
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {optional!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Refuse())
for name in listed:
    getattr(padfree, name)
assert padfree.losses.gae and padfree.compat.hf.PackedCollator and padfree.compat.slime.pack_sequences
assert [name for name in dir(padfree) if not name.startswith("__") and name not in listed] == []
for name in {modules!r}:
    importlib.import_module(name)
    brought = {{m.partition(".")[0] for m in set(sys.modules) - loaded}} & set({optional!r})
    assert not brought, f"{{name}} imported {{brought}}"
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
