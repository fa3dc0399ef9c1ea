"""Whatever a user can get wrong is one line that names the setting and the cure.

    batch.samples: 0; give 1 or more
    ^^^^^^^^^^^^^     ^^^^^^^^^^^^^^
    name              cure, behind the last semicolon

The mistakes of `error_cases` are provoked for real. Then the source is read: every ValueError that is raised anywhere
has such a message.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from error_cases import CASES, ROOT, Mistake

FLAT = [(part, name, mistake) for part, cases in CASES.items() for name, mistake in cases]


def check(message: str, name: str) -> None:
    assert "\n" not in message, message
    assert message.startswith((f"{name}:", f"{name} ")), message
    _, semicolon, cure = message.rpartition(";")
    assert semicolon, message
    assert re.search(r"[a-z]{3}", cure), f"no cure behind the semicolon: {message}"


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.mark.parametrize(("part", "name", "mistake"), FLAT, ids=[f"{part}-{name}" for part, name, _ in FLAT])
def test_a_mistake_is_one_line_with_its_name_and_cure(part: str, name: str, mistake: Mistake, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as caught:
        mistake(tmp_path)
    check(str(caught.value), name)


def test_there_are_many_cases() -> None:
    assert len(FLAT) >= 200
    assert set(CASES) >= {"config", "packing", "data", "attention", "cp", "model", "head", "losses", "compat", "cli"}


ERRORS = {"ValueError", "CheckpointError", "RowError", "NonFiniteError"}
"""Exceptions whose text reaches a user."""


def raised(path: Path) -> Iterator[ast.Call]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        call = node.exc if isinstance(node, ast.Raise) else None
        if isinstance(call, ast.Call) and ast.unparse(call.func) in ERRORS:
            yield call


def fixed_text(message: ast.expr) -> str | None:
    """What stands in the source of a message; None where it was made elsewhere and is handed on."""
    if isinstance(message, ast.Constant):
        return str(message.value)
    if isinstance(message, ast.JoinedStr):
        return "".join(fixed_text(part) or "{}" for part in message.values)
    if isinstance(message, ast.BinOp):
        return (fixed_text(message.left) or "{}") + (fixed_text(message.right) or "{}")
    return None


SOURCES = sorted((ROOT / "src").rglob("*.py"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT / "src" / "padfree")))
def test_every_message_in_the_source_is_one_line_with_a_cure(path: Path) -> None:
    for call in raised(path):
        assert call.args, f"line {call.lineno}: no message"
        text = fixed_text(call.args[0])
        if text is not None:
            assert "\n" not in text, f"line {call.lineno}: {text}"
            assert re.search(r";\s*\S", text), f"line {call.lineno}: no cure behind a semicolon: {text}"
