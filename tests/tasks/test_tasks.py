"""Every task is complete: settings, file, command, API function, recipe and line in the docs."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import padfree
from padfree.cli.flags import TAKE_SETTINGS
from padfree.cli.launch import LAUNCHED
from padfree.cli.main import COMMANDS
from padfree.config import load_config
from padfree.config.loss import TASKS, LossConfig
from padfree.record.metric_table import unknown_metrics
from padfree.tasks import Task, task_of

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "padfree"


@pytest.mark.parametrize("name", TASKS)
def test_a_task_is_whole(name: str) -> None:
    task = TASKS[name]
    assert task.command == name
    assert isinstance(task_of(name), Task)
    assert LossConfig(kind=task.kind).task is task
    assert COMMANDS[name] == ("padfree.cli.train", task.help)
    assert name in TAKE_SETTINGS
    assert name in LAUNCHED
    assert name in padfree.__all__
    assert task.help.lower() in getattr(padfree, name).__doc__.lower()
    assert load_config(name).loss.command == name


@pytest.mark.parametrize("name", TASKS)
def test_the_docs_know_it(name: str) -> None:
    training = (ROOT / "docs" / "guides" / "runs.md").read_text()
    assert f"| `{name}` |" in training
    assert f"`padfree.{name}`" in training
    assert unknown_metrics(f"eval/{metric}" for metric in TASKS[name].eval_metrics) == []


def test_nothing_else_is_chosen_by_the_name_of_a_command() -> None:
    """Someone who adds a task would have to find every dict or comparison by command."""
    found = []
    for path in SOURCE.rglob("*.py"):
        name = str(path.relative_to(SOURCE))
        if name.startswith(("tasks/", "config/loss", "check/", "tools/")):  # `padfree check` has its own losses
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            text = ast.unparse(node) if isinstance(node, (ast.Compare, ast.Subscript)) else ""
            if re.search(r"loss\.command (==|!=|in|not in) ['\"(]|\[config\.loss\.command\]", text):
                found.append(f"{name}:{node.lineno} {text}")  # type: ignore[attr-defined]
    assert found == []


def test_help_needs_no_torch() -> None:
    program = (
        "import sys; from padfree.cli.main import parser; parser(()).format_help(); assert 'torch' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
