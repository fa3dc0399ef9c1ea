"""Every path that a user gives: `~` is expanded, and a path that cannot be right is refused in one line."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import padfree
from padfree.cli.flags import setting_names
from padfree.cli.main import COMMANDS, main, parser
from padfree.config import Config, config_from_dict, load_config
from padfree.config.inputs import PathWord
from padfree.data.store import default_cache_folder
from padfree.errors import UserError
from padfree.testing.models import save_with_tokenizer
from padfree.testing.tokenizers import TEMPLATES
from tests.refused import refused

PATHS = ("FILE", "DIR", "PATH", "FOLDER", "MODEL", "RUN", "RECIPE|MODEL")
NOT_PATHS = {"output", "folder", "recipe", "real", "model", "base"}
"""Names of arguments that are paths although their metavar does not say so."""

IMPOSSIBLE = ["~nobody-of-this-name/x", "~nobody-of-this-name", "", " ", "a\0b"]


def arguments(command: str) -> Iterator[argparse.Action]:
    (found,) = (action for action in parser()._actions if isinstance(action, argparse._SubParsersAction))
    yield from found.choices[command]._actions


def is_path(action: argparse.Action) -> bool:
    takes_value = action.nargs != 0 and action.choices is None and action.type in (None, str)
    named = action.metavar in PATHS or action.dest in NOT_PATHS
    return getattr(action.type, "__qualname__", "").startswith("path_word") or (takes_value and named)


CASES = [(command, action) for command in COMMANDS for action in arguments(command) if is_path(action)]


def line_of(command: str, action: argparse.Action, path: str) -> list[str]:
    """A command line with this value, and with a value for every other argument that is required."""
    words, given = [command], False
    for each in arguments(command):
        if each.dest == action.dest:
            words += [f"{each.option_strings[-1]}={path}"] if each.option_strings else [path]
            given = True
        elif not each.option_strings and each.nargs in (None, "+"):
            words.append("show" if each.dest == "action" else "x.gguf")
        elif each.required and each.option_strings:
            words.append(f"{each.option_strings[-1]}=x")
    if command == "doctor" and action.dest != "rollouts":
        words.append("--rollouts=x")
    assert given
    return words


@pytest.mark.parametrize("path", IMPOSSIBLE)
@pytest.mark.parametrize(("command", "action"), CASES, ids=lambda one: getattr(one, "dest", one))
def test_every_option(command: str, action: argparse.Action, path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line_of(command, action, path)) == 1
    line = capsys.readouterr().err
    label = action.option_strings[-1] if action.option_strings else action.metavar or action.dest
    assert line.count("\n") == 1
    assert line.startswith((f"padfree {command}: {label}: ", f"padfree {command}: {action.dest}: ")), line


def test_many_options_are_paths() -> None:
    assert len(CASES) > 40
    assert all(getattr(action.type, "__qualname__", "").startswith("path_word") for _, action in CASES)
    assert issubclass(PathWord, str)


# Folders in place of files, and files in place of folders


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_with_tokenizer(tmp_path_factory.mktemp("model") / "m")
    (path / "chat_template.jinja").write_text(TEMPLATES["chatml"])
    return path


KINDS = [
    "data show sft model.path=MODEL data.path=ROWS --page BAD",
    "plan --data ROWS --model MODEL --max-tokens 512 --html BAD",
    "plan --lengths BAD --max-tokens 512",
    "plan --data BAD --model MODEL --max-tokens 512",
    "report BAD",
    "report RUN --output BAD",
    "generate MODEL --prompts BAD",
    "generate MODEL hi --chat-template BAD",
    "generate BAD hi",
    "generate MODEL hi --base BAD",
    "export MODEL BAD",
    "export BAD out.gguf",
    "check --model MODEL --json BAD",
    "check --model MODEL --data BAD",
    "check --model BAD",
    "eval sft model.path=MODEL eval.path=ROWS --json BAD",
    "doctor MODEL --rollouts BAD",
    "doctor MODEL --rollouts ROWS --chat-template BAD",
    "sft BAD",
    "sft model.path=MODEL data.path=ROWS data.chat_template=BAD --dry-run",
    "sft model.path=MODEL data.path=BAD --dry-run",
    "sft model.path=MODEL data.path=ROWS batch.cost=BAD --dry-run",
    "launch --slurm BAD --nodes 1 --processes 1 -- sft sft model.path=MODEL data.path=ROWS",
    "demo --folder BAD",
    "demo --real MODEL --data BAD",
]


WRONG = (".", "/", "/dev/null/x", "empty", "binary", "n" * 300)
FINE = {
    ("plan --data BAD --model MODEL --max-tokens 512", "."),  # a folder with data
    ("check --model MODEL --data BAD", "."),
    ("eval sft model.path=MODEL eval.path=ROWS --json BAD", "binary"),  # replaced
    ("demo --folder BAD", "empty"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("line", "bad"), [case for case in product(KINDS, WRONG) if case not in FINE])
def test_a_path_of_the_wrong_kind(
    line: str,
    bad: str,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PADFREE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "response": "2"}\n' * 64)
    (tmp_path / "empty").mkdir()
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    (tmp_path / "run").mkdir()
    names = {"MODEL": str(model), "ROWS": "rows.jsonl", "RUN": "run", "BAD": bad}
    words = [_replaced(part, names) for part in line.split()]
    try:
        code: Any = main(words)
    except SystemExit as end:
        code = end.code
    said = capsys.readouterr().err
    assert code in (1, 2), (code, said)
    assert "Traceback" not in said
    assert said.startswith(f"padfree {words[0]}: "), said


def _replaced(word: str, names: dict[str, str]) -> str:
    head, equals, value = word.rpartition("=")
    return f"{head}{equals}{names.get(value, value)}"


# Settings and Python

SETTINGS = [
    name for name in setting_names(Config) if name.rpartition(".")[2] in ("path", "folder", "tokenizer", "cost")
]
SETTINGS += ["data.chat_template", "data.image_folder", "rollout.transfer_folder"]
NEEDED = {
    "model": {"path": "m"},
    "data": {"path": "d"},
    "batch": {"samples": 8, "max_tokens": 64},
    "run": {"folder": "r"},
}


@pytest.mark.parametrize("path", IMPOSSIBLE)
@pytest.mark.parametrize("name", [name for name in SETTINGS if "sources" not in name])
def test_every_setting(name: str, path: str) -> None:
    section, _, own = name.partition(".")
    values: dict[str, Any] = {**NEEDED, section: {**NEEDED.get(section, {}), own: path}}
    with pytest.raises(UserError) as caught:
        config_from_dict(values)
    assert caught.value.setting == name


@pytest.mark.parametrize("name", [name for name in SETTINGS if "sources" not in name])
def test_home_is_expanded(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    overrides = [f"{a}.{b}={value}" for a, table in NEEDED.items() for b, value in table.items()]
    extra = {
        "data.image_folder": ["model.vision=true"],
        "teacher.path": ["loss.kind=distill"],
        "reference.path": ["loss.kind=dpo"],
        "critic.path": ["loss.kind=clip", "loss.advantage=gae"],
    }
    config: Any = load_config(None, [*overrides, "run.steps=9", *extra.get(name, []), f"{name}=~/x"])
    for part in name.split("."):
        config = getattr(config, part)
    assert config in (str(tmp_path / "x"), (str(tmp_path / "x"),))


@pytest.mark.parametrize("path", ["~nobody-of-this-name/x", "a\0b", "."])
def test_recipes_in_python(path: str) -> None:
    with refused("config"):
        padfree.sft(recipe=path, model="m", data="d")


@pytest.mark.parametrize("variable", ["PADFREE_CACHE", "XDG_CACHE_HOME"])
def test_the_cache_folder(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PADFREE_CACHE", raising=False)
    monkeypatch.setenv(variable, "~nobody-of-this-name/x")
    with refused(variable):
        default_cache_folder()
