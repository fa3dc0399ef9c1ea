"""docs/coming-from.md is true: its Python runs, and every name of padfree that it gives exists.

`a.b`            in the last column of a table, or in prose: a setting
`a.b=c`          it takes this value in at least one kind of run
`a.b = c`        a run refuses this line, in words that name the setting; every row without an equivalent has one
`f(x=...)`       a function or class of padfree with this argument
`padfree.a.b`    can be imported
`name`           in the first column of TRL's tables: a field of TRL's configs
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib
import inspect
import io
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import pytest

import padfree
import padfree.compat.hf
import padfree.losses
from padfree.config import Config, config_from_dict
from padfree.config.loss import TASKS
from padfree.data.fields import check_mapping
from padfree.data.formats import SFT_SCHEMA
from padfree.errors import UserError

PAGE = Path(__file__).parents[1] / "docs" / "coming-from.md"
PROJECTS = ("slime", "VeOmni", "TRL", "verl", "prime-rl")
NO_EQUIVALENT = "no equivalent"

CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
BLOCK = re.compile(r"^```python\n(.*?)^```$(?:\n+^```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
SETTING = re.compile(r"(?P<name>[a-z]+(?:\.[a-z_]+)+)(?:(?P<equals> = |=)(?P<value>.+))?")
CALL = re.compile(r"[A-Za-z_.]+\(.*\)")


class Row(NamedTuple):
    """A row of a table: the project, the header of the table, and its cells."""

    project: str
    header: list[str]
    cells: list[str]

    @property
    def ours(self) -> str:
        return self.cells[-1]


def text() -> str:
    return PAGE.read_text(encoding="utf-8")


@cache
def rows() -> list[Row]:
    found, project, header = [], "", []
    for line in FENCED.sub("", text()).splitlines():
        if line.startswith("## "):
            project = line.removeprefix("## ")
        if not line.startswith("|"):
            header = []
            continue
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if not header:
            header = cells
        elif set(line) - set("| -"):
            found.append(Row(project, header, cells))
    return found


def our_passages() -> Iterator[str]:
    """The last column of every table, and all other text."""
    yield from (row.ours for row in rows())
    yield from (line for line in FENCED.sub("", text()).splitlines() if not line.startswith("|"))


def our_codes() -> list[str]:
    return [code for passage in our_passages() for code in CODE.findall(passage)]


# Runs in which a setting may be given

MODEL = {"model": {"path": "model"}, "run": {"folder": "runs/x", "steps": 100}}
BASE: dict[str, Any] = {**MODEL, "data": {"path": ["a.jsonl"]}, "batch": {"samples": 8, "max_tokens": 8192}}
SERVED = {"engine": "vllm", "servers": ["http://127.0.0.1:8000"], "reward": "exact_match"}
RUNS: dict[str, list[dict[str, Any]]] = {
    "sft": [BASE],
    "dpo": [{**BASE, "loss": {"kind": "dpo"}}],
    "kto": [{**BASE, "loss": {"kind": "kto"}}],
    "reward": [{**BASE, "loss": {"kind": "reward"}}],
    "distill": [{**BASE, "loss": {"kind": "distill"}, "teacher": {"path": "teacher"}}],
    "rl": [
        {**BASE, "loss": {"kind": "clip"}},
        {**BASE, "loss": {"kind": "cispo"}},
        {**BASE, "loss": {"kind": "clip"}, "rollout": {"reward": "exact_match"}},
        {**BASE, "loss": {"kind": "clip"}, "rollout": SERVED},
        {**BASE, "loss": {"kind": "clip", "kl_coefficient": 0.1}, "reference": {"path": "model"}},
    ],
}
"""For every command, settings that load."""


def merged(values: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    """The nested `values` with one more setting."""
    first, _, rest = name.partition(".")
    inner = merged(values.get(first, {}), rest, value) if rest else value
    return {**values, first: inner}


def parsed(value: str) -> Any:
    try:
        return tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return value


def refusals(name: str, value: Any, commands: list[str]) -> list[str | None]:
    """For every run of these commands the message of the refusal; None: the setting is taken."""
    if name.startswith("data.columns."):  # checked when data is read
        try:
            check_mapping({name.removeprefix("data.columns."): value}, SFT_SCHEMA)
        except UserError as error:
            return [str(error)]
        return [None]
    found: list[str | None] = []
    for values in (values for command in commands for values in RUNS[command]):
        given = merged(values, name, value)
        if name == "batch.tokens":  # in place of samples
            given = merged(given, "batch.samples", None)
        if (name, value) == ("loss.aggregation", "constant"):  # which needs its divisor
            given = merged(given, "loss.constant", 4096.0)
        try:
            config_from_dict(given)
        except UserError as error:
            found.append(str(error))
        else:
            found.append(None)
    return found


def setting_names(kind: Any, prefix: str = "") -> set[str]:
    hints = get_type_hints(kind)
    names = set()
    for entry in dataclasses.fields(kind):
        names.add(prefix + entry.name)
        if dataclasses.is_dataclass(hints[entry.name]):
            names |= setting_names(hints[entry.name], f"{prefix}{entry.name}.")
    return names


NAMES = setting_names(Config)
SECTIONS = {name for name in NAMES if "." not in name}


def test_every_run_of_this_test_loads() -> None:
    assert set(RUNS) == set(TASKS)
    for command, runs in RUNS.items():
        assert {config_from_dict(values).loss.command for values in runs} == {command}


def test_every_project_has_its_tables() -> None:
    counts = {project: sum(row.project == project for row in rows()) for project in PROJECTS}
    assert min(counts.values()) >= 25, counts
    assert {row.project for row in rows()} == set(PROJECTS)


def test_settings_exist_and_take_the_values_that_are_shown() -> None:
    named = 0
    for code in our_codes():
        match = SETTING.fullmatch(code)
        if match is None or match["name"].partition(".")[0] not in SECTIONS or match["equals"] == " = ":
            continue
        name, value = match["name"], match["value"]
        assert name in NAMES, code
        if value is not None:
            messages = refusals(name, parsed(value), list(RUNS))
            assert None in messages, f"{code}: {messages[0]}"
        named += 1
    assert named > 250


def test_a_row_without_an_equivalent_names_a_refusal() -> None:
    without = 0
    for row in rows():
        settings = [match for code in CODE.findall(row.ours) if (match := SETTING.fullmatch(code))]
        refused = [match for match in settings if match["equals"] == " = "]
        assert bool(refused) == (NO_EQUIVALENT in row.ours), row
        commands = [code.removeprefix("padfree ") for code in CODE.findall(row.ours) if code.startswith("padfree ")]
        for match in refused:
            name, value = match["name"], parsed(match["value"])
            for message in refusals(name, value, commands or list(RUNS)):
                assert message is not None, f"{match[0]} is taken: {row}"
                assert name.removeprefix("data.columns.") in message, message
        without += bool(refused)
    assert without >= 20


def test_every_setting_that_is_refused_is_in_a_table() -> None:
    lines = [line for line in FENCED.sub("", text()).splitlines() if not line.startswith("|")]
    codes = [code for line in lines for code in CODE.findall(line)]
    assert not [code for code in codes if (match := SETTING.fullmatch(code)) and match["equals"] == " = "]


def test_calls_have_the_arguments_that_are_shown() -> None:
    places = (padfree, padfree.losses, padfree.compat.hf)
    calls = 0
    for code in our_codes():
        if CALL.fullmatch(code) is None:
            continue
        tree = ast.parse(code, mode="eval").body
        assert isinstance(tree, ast.Call), code
        path = ast.unparse(tree.func)
        if path.startswith("padfree."):
            function = imported(path)
        else:
            (function, *_) = [getattr(place, path) for place in places if hasattr(place, path)] or [None]
        assert callable(function), code
        arguments = inspect.signature(function).parameters
        for keyword in tree.keywords:
            assert keyword.arg in arguments, code
        calls += 1
    assert calls >= 8


def imported(path: str) -> Any:
    """The module, class or function of this dotted path."""
    module, _, name = path.rpartition(".")
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        return getattr(importlib.import_module(module), name)


def test_names_of_the_library_can_be_imported() -> None:
    paths = [code for code in our_codes() if re.fullmatch(r"padfree(\.\w+)+", code) and code != "padfree.something"]
    assert paths
    for path in paths:
        imported(path)
    classes = [code for code in our_codes() if re.fullmatch(r"[A-Z]\w+\.[a-z_]+", code)]
    assert classes
    for code in classes:
        owner, _, name = code.partition(".")
        assert hasattr(getattr(padfree, owner), name), code


def test_files_that_are_named_exist() -> None:
    for path in re.findall(r"`(tests/[\w/]+\.py)`", text()):
        assert (PAGE.parents[1] / path).is_file(), path


def test_python_runs_and_prints_what_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__docs__"}
    blocks = BLOCK.findall(text())
    assert len(blocks) >= 4
    for code, output in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, PAGE.name, "exec"), namespace)
        assert printed.getvalue() == output


def test_the_arguments_of_trl_exist() -> None:
    trl = pytest.importorskip("trl")
    if not trl.__version__.startswith("1.16."):
        pytest.skip(f"the page is about TRL 1.16, not {trl.__version__}")
    checked = 0
    for row in rows():
        kinds = [name for name in CODE.findall(row.header[0]) if name.endswith("Config")]
        if row.project != "TRL" or not kinds:
            continue
        known = {field.name for kind in kinds for field in dataclasses.fields(getattr(trl, kind))}
        for code in CODE.findall(row.cells[0]):
            assert code.partition("=")[0] in known, code
            checked += 1
    assert checked > 60
