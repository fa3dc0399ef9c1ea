"""docs/bugs-elsewhere.md: every row links an issue or a pull request, and names a test that exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "bugs-elsewhere.md"
LINK = re.compile(r"\[(?P<project>[\w.-]+) #(?P<number>\d+)\]\((?P<url>\S+)\)")
URL = re.compile(r"https://github\.com/[\w.-]+/(?P<project>[\w.-]+)/(issues|pull)/(?P<number>\d+)")
TEST = re.compile(r"`(?P<file>tests/[\w/]+\.py)::(?P<function>test_\w+)(?:\[(?P<id>[^\]]+)\])?`")


class Row(NamedTuple):
    """The three cells of a row."""

    issue: str
    wrong: str
    test: str


def rows() -> list[Row]:
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| [")]
    return [Row(*(cell.strip() for cell in line.strip("|").split("|"))) for line in lines]


def of_row(row: Row) -> str:
    return row.issue.partition("]")[0].strip("[")


def test_there_are_at_least_twenty() -> None:
    assert len(rows()) >= 20
    urls = [row.issue for row in rows()]
    assert len(set(urls)) == len(urls), "each once"
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    assert len(rows()) == len(lines) - 2 * lines.count("| --- | --- | --- |"), "every row begins with a link"


@pytest.mark.parametrize("row", rows(), ids=of_row)
def test_a_row_links_an_issue_and_says_in_one_line_what_went_wrong(row: Row) -> None:
    link = LINK.fullmatch(row.issue)
    assert link is not None
    url = URL.fullmatch(link["url"])
    assert url is not None, link["url"]
    assert (url["project"], url["number"]) == (link["project"], link["number"])
    assert row.wrong.endswith(".")
    assert 40 < len(row.wrong) < 180


@pytest.mark.parametrize("row", rows(), ids=of_row)
def test_the_test_of_a_row_exists(row: Row) -> None:
    test = TEST.fullmatch(row.test)
    assert test is not None, row.test
    file = ROOT / test["file"]
    assert test["function"] in functions(file), row.test
    if test["id"] is not None:
        assert test["id"] in parameter_ids(file, test["function"]), row.test


# Ids of parameters, read from the source: importing the tests of models takes many seconds


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def functions(file: Path) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in ast.walk(parsed(file)) if isinstance(node, ast.FunctionDef)}


def parameter_ids(file: Path, function: str) -> set[str]:
    """The ids of a test whose parameters are text, or lists and keys of dicts of it."""
    names = []
    for decorator in reversed(functions(file)[function].decorator_list):
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.parametrize":
            assert not decorator.keywords, "ids of its own"
            names.append(texts(decorator.args[1], file))
    return {"-".join(chosen) for chosen in product(*names)}


def texts(node: ast.expr, file: Path) -> list[str]:
    """The strings of a literal; names are looked up in the file, and in what it imports."""
    if isinstance(node, ast.Constant):
        return [str(node.value)]
    if isinstance(node, ast.Starred):
        return texts(node.value, file)
    if isinstance(node, ast.List | ast.Tuple):
        return [text for entry in node.elts for text in texts(entry, file)]
    if isinstance(node, ast.Dict):
        entries = zip(node.keys, node.values, strict=True)
        return [text for key, value in entries for text in texts(value if key is None else key, file)]
    assert isinstance(node, ast.Name), ast.unparse(node)
    found: list[str] = []
    for statement in parsed(file).body:
        if isinstance(statement, ast.ImportFrom) and any(alias.name == node.id for alias in statement.names):
            return texts(node, source_of(str(statement.module)))
        if isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign) and statement.value is not None:
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            if any(isinstance(target, ast.Name) and target.id == node.id for target in targets):
                found += texts(statement.value, file)
    assert found, f"{node.id} is not in {file}"
    return found


def source_of(module: str) -> Path:
    path = Path(*module.split(".")).with_suffix(".py")
    return ROOT / path if module.startswith("tests.") else ROOT / "src" / path


@pytest.mark.parametrize("case", ["a", "b"])
@pytest.mark.parametrize("other", ["one", *("two", "three")])
def test_ids_are_those_of_pytest(case: str, other: str, request: pytest.FixtureRequest) -> None:
    ids = parameter_ids(Path(__file__), "test_ids_are_those_of_pytest")
    assert request.node.name.partition("[")[2].rstrip("]") in ids
    assert len(ids) == 6
