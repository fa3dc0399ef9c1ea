"""Whatever a user can get wrong is one line that names the setting and the cure, and the cure works.

    batch.samples: 0; give 1 or more
    ^^^^^^^^^^^^^     ^^^^^^^^^^^^^^
    name              cure, behind the last semicolon

The mistakes of `error_cases` are provoked for real, and then what the message advises is done: settings and flags that
stand in it are pasted, one alternative after the other, and the mistake must be gone. Then the source is read: every
`UserError` that is raised anywhere has such parts, and nothing raises a plain `ValueError`.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_type_hints

import pytest

from padfree.config import Config
from padfree.config.setting import resume_rules
from padfree.errors import UserError
from tests.error_cases import CASES, ROOT, CommandLine, Cure, Mistake

FLAT: list[tuple[str, str, Mistake, Cure | None]] = [
    (part, case[0], case[1], case[2] if len(case) == 3 else None) for part, cases in CASES.items() for case in cases
]
IDS = [f"{part}-{name}" for part, name, *_ in FLAT]


SETTINGS = resume_rules(Config, get_type_hints)
"""The names of all settings."""


def check(message: str, name: str) -> None:
    assert "\n" not in message, message
    assert message.startswith((f"{name}:", f"{name} ")), message
    _, semicolon, cure = message.rpartition(";")
    assert semicolon, message
    assert re.search(r"[a-z]{3}", cure), f"no cure behind the semicolon: {message}"


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("PADFREE_CACHE", str(tmp_path / "token-cache"))


SETTING = re.compile(r"--[a-z-]+(=\S+| [\w.]+)|[a-z_]+(\.[a-z_]+)+=('[^']*'|\S+)")


def pasted(message: str) -> list[tuple[str, ...]]:
    """The settings and flags in a message's cure: one entry for each of its alternatives."""
    cure = message.rpartition(";")[2]
    found = []
    for alternative in re.split(r",? or |, (?=set |as )", cure):
        words = [match[0] for match in SETTING.finditer(alternative)]
        # A shell takes the quotes away, and punctuation behind a setting is not part of it.
        split = [word for text in words for word in shlex.split(text.rstrip(",.:)"))]
        if split and not any(re.search(r"=[A-Z]+$", word) for word in split):
            found.append(tuple(split))
    return found


PHRASES: list[tuple[str, Callable[[str, re.Match[str]], str]]] = [
    (r"did you mean ([a-z_.]+)\?", lambda name, match: f"-{name}"),
    (r"did you mean '(\w+)'\?", lambda name, match: f"{name}={match[1]}"),
    (r"give one of (\w+)", lambda name, match: f"{name}={match[1]}"),
    (r"give (?:at most|a multiple of) (?:[\w.]+, )?(\d+)", lambda name, match: f"{name}={match[1]}"),
    (r"give (\d+) to \d+", lambda name, match: f"{name}={match[1]}"),
    (r"give 0 up to", lambda name, match: f"{name}=0.5"),
    (r"give (\d+)\b.* or more", lambda name, match: f"{name}={match[1]}"),
    (r"give more than (\d+)", lambda name, match: f"{name}={int(match[1]) + 1}"),
    (r"give a (whole )?number", lambda name, match: f"{name}=1"),
    (r"leave [\w.]+ out|choose another", lambda name, match: f"-{name}"),
]


def advised(message: str, cure: Cure | None) -> list[tuple[str, ...]]:
    """Words to add to a command, in every way that a message advises."""
    if isinstance(cure, (str, tuple)):
        return [(cure,) if isinstance(cure, str) else cure]
    if found := pasted(message):
        return found
    name, advice = re.match(r"[\w.-]+", message), message.rpartition(";")[2]
    assert name is not None
    for pattern, words in PHRASES:
        if match := re.search(pattern, advice):
            word = words(name[0], match)
            return [tuple(word.split("=")) if word.startswith("--") else (word,)]
    return []


@pytest.mark.parametrize(("part", "name", "mistake", "cure"), FLAT, ids=IDS)
def test_a_mistake_is_one_line_whose_cure_works(
    part: str, name: str, mistake: Mistake, cure: Cure | None, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as caught:
        mistake(new_folder(tmp_path, "mistake"))
    message = str(caught.value)
    check(message, name)
    assert caught.value.setting == name or name not in SETTINGS, caught.value.setting
    attempts: list[Mistake] = [cure] if callable(cure) else []
    if isinstance(mistake, CommandLine) and not attempts:
        attempts = [mistake.with_words(*words) for words in advised(message, cure)]
    assert attempts, f"nothing in it can be pasted, and the case brings no cure: {message}"
    for number, attempt in enumerate(attempts):
        now = ""
        try:
            attempt(new_folder(tmp_path, f"cure-{number}"))
        except UserError as error:  # something else may be wrong as well
            now = str(error)
        assert not same_mistake(now, message), f"after {message}\nthe cure gave {now}"


def new_folder(parent: Path, name: str) -> Path:
    (parent / name).mkdir()
    return parent / name


def same_mistake(now: str, before: str) -> bool:
    """Whether a message is about the same setting, or about the same row, as another."""
    return re.split(r"[:;]", now)[0] == re.split(r"[:;]", before)[0]


def test_there_are_many_cases() -> None:
    assert len(FLAT) >= 300
    assert set(CASES) >= {"config", "packing", "data", "attention", "cp", "model", "head", "losses", "compat", "cli"}


def raised(path: Path) -> Iterator[ast.Call]:
    """Calls that make an exception for a user, and plain ValueErrors."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("UserError", "CheckpointError", "VersionError"):
            yield node
        elif (
            isinstance(node, ast.Raise)
            and isinstance(node.exc, ast.Call)
            and ast.unparse(node.exc.func) == "ValueError"
        ):
            yield node.exc


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
def test_every_error_in_the_source_is_one_line_with_a_fix(path: Path) -> None:
    if path.name == "errors.py":
        return
    for call in raised(path):
        assert ast.unparse(call.func) != "ValueError", f"line {call.lineno}: a mistake of the user is a UserError"
        assert len(call.args) in (3, 4), f"line {call.lineno}: UserError(setting, problem, fix, value)"
        setting, problem, fix = (fixed_text(argument) for argument in call.args[:3])
        assert setting != "", f"line {call.lineno}: no setting"
        assert fix != "", f"line {call.lineno}: no fix"
        assert "\n" not in f"{setting}{problem}{fix}", f"line {call.lineno}: more than one line"
        shown = problem != "" or len(call.args) == 4 or any(word.arg == "value" for word in call.keywords)
        assert shown, f"line {call.lineno}: neither a value nor a problem"


TABLES = {name.rpartition(".")[0] for name in SETTINGS} - {""}
SECTIONS = "|".join(sorted({name.partition(".")[0] for name in SETTINGS}))
NAMED = re.compile(rf"(?<![\w./-])(?:{SECTIONS})(?:\.[a-z_]+)+(?![\w(/*-])")
OTHER_NAMES = re.compile(
    r".*\.(?:safetensors|json|html|lock)$|model\.(?:layers|visual|embed_tokens|norm)\b.*|batch\.segments|data\.name"
)
"""File names, names of a model's modules, an attribute in advice for Python code, and a placeholder in help texts."""


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """The strings of a source file that are sentences, without docstrings: (line, text)."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    apart = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        text = node.value if isinstance(node, ast.Constant) and id(node) not in apart else None
        if isinstance(text, str) and " " in text.strip():
            yield node.lineno, text


def exists(name: str) -> bool:
    """Whether a name is that of a setting, of a table, or of an entry of a setting such as `data.columns`."""
    return name in SETTINGS or name in TABLES or any(name.startswith(f"{one}.") for one in SETTINGS)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT / "src" / "padfree")))
def test_every_setting_that_a_message_names_exists(path: Path) -> None:
    for line, text in texts(path):
        for name in NAMED.findall(text):
            assert exists(name) or OTHER_NAMES.match(name), f"line {line}: {name} is not a setting, in {text!r}"


def test_a_setting_that_does_not_exist_is_found() -> None:
    assert NAMED.findall("set data.split, or change data.template_arguments") == [
        "data.split",
        "data.template_arguments",
    ]
    assert not exists("data.template_arguments")
    assert exists("data.split")
    assert exists("data.columns.question")
