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

EVERYWHERE = {"choices", "errors"}
"""Every part may import it."""

MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "choices": set(),
    "warning": set(),
    "garbage_collection": set(),
    "host_memory": set(),
    "lazy": set(),
    "version": set(),
    "arrays": set(),
    "prefix_tree": {"arrays"},
    "images": {"arrays"},
    "kept_sets": {"arrays"},
    "routes": {"arrays"},
    "sample": {"arrays", "images", "kept_sets", "routes"},
    "segments": {"arrays", "prefix_tree"},
    "batch": {"arrays", "kept_sets", "sample", "segments"},
    "config/setting": set(),
    "optim/optimizer_settings": {"config/setting"},
    "config": {"optim/optimizer_settings"},
    "data": {"config", "images", "kept_sets", "lazy", "routes", "sample"},
    "distributed": {"config"},
    "stop_signals": set(),
    "attention": {"arrays", "batch", "prefix_tree", "segments"},
    "cp": {"arrays", "attention", "batch", "distributed", "kept_sets", "prefix_tree", "segments"},
    "model": {
        "attention",
        "batch",
        "config",
        "cp",
        "distributed",
        "images",
        "routes",
        "sample",
        "segments",
        "version",
        "warning",
    },
    "sizes": {"model"},
    "packing": {"arrays", "batch", "images", "kept_sets", "prefix_tree", "routes", "sample", "segments", "sizes"},
    "layers": {"warning"},
    "head": {"arrays", "batch", "kept_sets"},
    "losses": {"arrays", "batch", "config"},
    "optim": {"config", "distributed", "model"},
    "sharding": {"config", "distributed", "layers", "model", "optim"},
    "estimate": {"config", "head", "layers", "model", "optim", "packing", "sizes"},
    "checkpoint": {"distributed", "host_memory", "model"},
    "record": {"config", "distributed", "model", "routes", "sample", "version", "warning"},
    "rollout": {
        "arrays",
        "attention",
        "batch",
        "config",
        "cp",
        "data",
        "distributed",
        "head",
        "images",
        "kept_sets",
        "layers",
        "model",
        "optim",
        "packing",
        "record",
        "routes",
        "sample",
        "segments",
        "warning",
    },
    "tasks": {"batch", "config", "cp", "data", "head", "losses", "model", "optim", "rollout", "sample", "sharding"},
    "train": {
        "attention",
        "images",
        "batch",
        "checkpoint",
        "garbage_collection",
        "config",
        "cp",
        "data",
        "distributed",
        "estimate",
        "head",
        "host_memory",
        "kept_sets",
        "layers",
        "losses",
        "model",
        "optim",
        "packing",
        "record",
        "rollout",
        "sample",
        "sharding",
        "sizes",
        "stop_signals",
        "tasks",
        "version",
        "warning",
    },
    "tools/json_objects": set(),
    "tools/talk": {"config", "data", "model", "record", "rollout", "tasks", "tools/json_objects", "train"},
    "compat": {"arrays", "batch", "config", "lazy", "losses", "model", "packing", "sample", "segments"},
    "tools/benchmarks": {"cp", "head", "losses", "model", "packing", "sample", "tools/talk", "train"},
    "tools/page": set(),
    "tools/architectures": {"model"},
    "tools/reference_pages": {"attention", "config", "record", "tools/architectures"},
    "tools/report": {"config", "tools/json_objects", "tools/page", "record"},
    "tools/planner": {
        "arrays",
        "config",
        "cp",
        "data",
        "distributed",
        "estimate",
        "losses",
        "model",
        "optim",
        "packing",
        "sample",
        "segments",
        "tools/page",
        "sharding",
        "sizes",
        "train",
    },
    "tools/check": {
        "attention",
        "batch",
        "config",
        "cp",
        "data",
        "distributed",
        "head",
        "host_memory",
        "images",
        "layers",
        "losses",
        "model",
        "optim",
        "packing",
        "rollout",
        "sample",
        "sharding",
        "sizes",
        "tasks",
        "tools/json_objects",
        "train",
    },
    "tools/doctor": {
        "cp",
        "data",
        "model",
        "packing",
        "rollout",
        "sample",
        "tasks",
        "tools/check",
        "tools/talk",
        "train",
    },
    "api": {"garbage_collection", "config", "data", "record", "train"},
    "testing": {"batch", "config", "images", "model", "packing", "rollout", "sample"},
    "tools/demo": {
        "tools/check",
        "tools/json_objects",
        "config",
        "data",
        "model",
        "optim",
        "tools/planner",
        "record",
        "tools/report",
        "tools/talk",
        "testing",
        "train",
    },
    "cli": {
        "attention",
        "tools/benchmarks",
        "tools/check",
        "tools/doctor",
        "tools/json_objects",
        "garbage_collection",
        "config",
        "data",
        "estimate",
        "model",
        "packing",
        "tools/page",
        "tools/planner",
        "tools/report",
        "stop_signals",
        "tools/talk",
        "train",
        "warning",
    },
}
"""What each part may import, in the order of the data. A permission that nobody uses is an error.

A module of a part has a row of its own if others may import it and not the part: the settings of a part, of which
`config` is made.
"""

MUST_NOT_IMPORT: dict[str, set[str]] = {
    "api": {"torch", "transformers"},
    "errors": {"torch", "numpy"},
    "choices": {"torch", "numpy"},
    "arrays": {"torch"},
    "garbage_collection": {"torch"},
    "stop_signals": {"torch"},
    "lazy": {"torch"},
    "config": {"torch"},
    "optim/optimizer_settings": {"torch"},
    "data": {"torch.distributed"},
    "prefix_tree": {"torch"},
    "sample": {"torch"},
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
    names = path.relative_to(SOURCE).with_suffix("").parts
    alone = "/".join(names[:2])
    return alone if alone in MAY_IMPORT else names[0]


def module_name(path: Path) -> str:
    return ".".join(("padfree", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")


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
    own = part_of(path)
    found = set()
    for module in imports(path):
        if module.startswith("padfree."):
            names = module.split(".")[1:]
            alone = "/".join(names[:2])
            found.add(alone if names[0] == "tools" or alone in MAY_IMPORT.get(own, ()) else names[0])
    return found - {own} - EVERYWHERE


def test_every_permission_is_used() -> None:
    used: dict[str, set[str]] = {part: set() for part in MAY_IMPORT}
    for path in FILES:
        if part_of(path) in used:
            used[part_of(path)] |= parts_imported(path)
    unused = {part: sorted(allowed - used[part]) for part, allowed in MAY_IMPORT.items() if allowed - used[part]}
    assert not unused


def test_no_part_imports_one_further_down_the_table() -> None:
    places = {part: place for place, part in enumerate(MAY_IMPORT)}
    assert [(part, one) for part, found in MAY_IMPORT.items() for one in found if places[one] > places[part]] == []


def test_the_table_has_no_cycle() -> None:
    TopologicalSorter(MAY_IMPORT).prepare()


def test_no_files_import_each_other_in_a_circle() -> None:
    """Includes imports inside functions and under `TYPE_CHECKING`."""
    names = {module_name(path): path for path in FILES}

    def imported(module: str) -> str:
        while module not in names:
            module = module.rpartition(".")[0]
        return module

    TopologicalSorter(
        {
            name: {imported(module) for module in imports(path) if names_package(module, "padfree")} - {name}
            for name, path in names.items()
        }
    ).prepare()


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_follow_the_table(path: Path) -> None:
    part = part_of(path)
    if part in ("__init__", "__main__", "tools"):
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


def test_only_the_demo_imports_what_is_for_tests() -> None:
    """Tests, benchmarks and documentation import `padfree.testing`; of padfree itself `padfree demo` alone."""
    importers = {path.parent for path in FILES if "testing" in parts_imported(path)}
    assert importers == {SOURCE / "tools" / "demo"}


def test_the_command_line_alone_imports_tools() -> None:
    tools = {part for part in MAY_IMPORT if part.startswith("tools/")}
    assert {part for part, allowed in MAY_IMPORT.items() if allowed & tools} - tools == {"cli"}


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
        "mlflow",
        "gguf",
    ]
    modules = [
        module_name(path)
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


TAKE_SECTIONS = ("train", "tasks", "rollout", "tools", "estimate")
TAKE_CONFIG = {
    # They start, check, build or resume a whole run.
    "train/batcher.py",
    "train/disk.py",
    "train/finished.py",
    "train/preflight.py",
    "train/resolve_auto.py",
    "train/resume.py",
    "train/run.py",
    "train/run_notes.py",
    "train/setup.py",
    "train/start_run.py",
    "train/trainer.py",
    "train/training_data.py",
    # An engine is made by a function with the arguments of a user's own engine.
    "rollout/engines/__init__.py",
    "rollout/engines/in_process/sampler.py",
    "rollout/engines/servers/start.py",
    # They start or plan whole runs, or read more than four sections.
    "tools/demo/demo_folder.py",
    "tools/demo/stages.py",
    "tools/planner/calibrate.py",
    "tools/planner/memory_plan.py",
    "tools/planner/steps.py",
    "tools/planner/time_model.py",
    "estimate/memory.py",
}
"""Modules whose functions may take the whole `Config`. Add none: take the sections or the values that you read."""


def test_functions_and_classes_take_sections_of_the_settings() -> None:
    """A module that no longer takes the whole `Config` is removed from the list, so that the list only shrinks."""
    found = set()
    for part in TAKE_SECTIONS:
        for path in (SOURCE / part).rglob("*.py"):
            nodes = list(ast.walk(ast.parse(path.read_text())))
            fields = [each for node in nodes if isinstance(node, ast.ClassDef) for each in node.body]
            hints = [node.annotation for node in nodes if isinstance(node, ast.arg) and node.annotation is not None]
            hints += [each.annotation for each in fields if isinstance(each, ast.AnnAssign)]
            names = [node for hint in hints for node in ast.walk(hint)]
            if any(isinstance(node, ast.Name) and node.id == "Config" for node in names):
                found.add(str(path.relative_to(SOURCE)))
    assert found == TAKE_CONFIG


OWN_OBJECTS = ("train", "tasks", "rollout")
IO_CALLS = {
    *("open", "read_text", "write_text", "read_bytes", "write_bytes", "mkdir", "unlink", "touch", "rename", "glob"),
    *("iterdir", "exists", "stat", "urlopen", "Popen", "from_pretrained", "load_model", "load_reward", "save", "load"),
    *("broadcast_object_list", "all_gather_object", "barrier", "all_reduce"),
}
"""Names of functions and methods that read, write, load, start something or wait for other ranks."""

MAY_OPEN = {"rollout/engines/servers/server_processes.py"}
"""Files whose constructors may: a server process is started when its object is made."""

MAY_SET = {
    "train/determinism.py": {"torch.backends.cudnn.benchmark"},
    "train/engine.py": {"parameter.grad"},
    "rollout/loop_thread.py": {"task._log_destroy_pending"},
    "rollout/environment/gateway.py": {"episode.tree.failure"},
    "rollout/environment/episode_policy.py": {"self._branch.reward"},
}
"""Attributes of other packages' objects, and of the tree that an episode grows."""


@pytest.mark.parametrize("part", OWN_OBJECTS)
def test_constructors_do_no_io(part: str) -> None:
    """An object is complete when it is constructed, and whoever constructs it has read and opened what it needs."""
    found = []
    for path in (SOURCE / part).rglob("*.py"):
        name = str(path.relative_to(SOURCE))
        for function in ast.walk(ast.parse(path.read_text())):
            if not isinstance(function, ast.FunctionDef) or function.name not in ("__init__", "__post_init__"):
                continue
            calls = [node for node in ast.walk(function) if isinstance(node, ast.Call) and _called(node) in IO_CALLS]
            found += [f"{name}:{call.lineno} {ast.unparse(call)}" for call in calls if name not in MAY_OPEN]
    assert found == []


@pytest.mark.parametrize("part", OWN_OBJECTS)
def test_attributes_are_set_by_their_own_file(part: str) -> None:
    """`other.attribute = ...` is for classes of the same file; another file calls a method, or constructs with it."""
    found = []
    for path in (SOURCE / part).rglob("*.py"):
        name, tree = str(path.relative_to(SOURCE)), ast.parse(path.read_text())
        own = _attributes(tree)
        for node in ast.walk(tree):
            for target in _targets(node):
                if isinstance(target, ast.Attribute) and not _is_self(target.value):
                    text = ast.unparse(target)
                    root = text.partition(".")[0]
                    foreign = root == "options" and name.endswith("buckets.py")  # of torch's process groups
                    if target.attr not in own and not foreign and text not in MAY_SET.get(name, set()):
                        found.append(f"{name}:{target.lineno} {text}")
    assert found == []


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _is_self(value: ast.expr) -> bool:
    return isinstance(value, ast.Name) and value.id in ("self", "cls", "ctx")


def _targets(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return [each for target in node.targets for each in getattr(target, "elts", [target])]
    return [node.target] if isinstance(node, (ast.AugAssign, ast.AnnAssign)) else []


def _attributes(tree: ast.Module) -> set[str]:
    """Of the classes of a file: fields, and what `self` is given."""
    found: set[str] = set()
    for kind in ast.walk(tree):
        if isinstance(kind, ast.ClassDef):
            found |= {
                each.target.id
                for each in kind.body
                if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
            }
            for node in ast.walk(kind):
                found |= {
                    each.attr for each in _targets(node) if isinstance(each, ast.Attribute) and _is_self(each.value)
                }
    return found
