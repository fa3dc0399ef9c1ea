"""Checks the README and the pages of docs/: code runs, commands parse, settings and links exist.

    ```python      is executed in order, with one namespace per page; a ```text block that follows is its output
    ```toml        is a recipe or a part of one, and loads
    ```json        parses; several records are parsed line by line
    ```sh          and indented blocks: `padfree` commands parse, their recipes load, `make` targets exist
    `a.b=c`        in docs/coming-from.md and the guides: the setting exists; in coming-from.md it accepts this value

Links point to pages and headings that exist, on a code host and in the built documentation.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import re
import shlex
import tomllib
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints
from unittest.mock import patch

import pytest

from padfree.attention.selection import BACKENDS
from padfree.cli.main import TRAINING, parsed, parser
from padfree.config import Config, config_from_dict, load_config
from padfree.config.mixture import DataSource
from padfree.config.recipe_files import shipped_recipes
from padfree.optim.optimizer_settings import ParameterGroup

ROOT = Path(__file__).parents[1]
GENERATED = ("api", "_build")  # written by `make docs`
DOCS = sorted(
    page for page in (ROOT / "docs").rglob("*.md") if page.relative_to(ROOT / "docs").parts[0] not in GENERATED
)
PAGES = [ROOT / "README.md", *DOCS]
FENCE = re.compile(r"^```(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PRINTED = re.compile(r"^```python\n(.*?)^```$(?:\n+^```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"^    (\S.*)$", re.MULTILINE)
INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
LINK = re.compile(r"\]\(([^)#:]*)(?:#([^)]*))?\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
NOT_SETTINGS = {"run.holder.json", "run.json", "run.lock", "batch.py", "rollout.advantages", "data.columns.context"}
LANGUAGES = {"python", "text", "toml", "json", "sh", "{toctree}"}


def page_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


every_page = pytest.mark.parametrize("page", PAGES, ids=page_name)


def blocks(page: Path, language: str) -> list[str]:
    return [body for found, body in FENCE.findall(page.read_text(encoding="utf-8")) if found == language]


def plain(page: Path) -> str:
    """The text of a page without fenced blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


@every_page
def test_every_block_has_a_language_that_is_checked(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert {language for language, _ in FENCE.findall(text)} <= LANGUAGES
    assert text.count("```") == 2 * len(FENCE.findall(text))


@every_page
def test_python_runs_and_prints_what_is_shown(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PADFREE_CACHE", str(tmp_path / "cache"))
    namespace: dict[str, object] = {"__name__": "__docs__"}
    with patch.dict(BACKENDS):  # a page registers a backend
        for code, output in PRINTED.findall(page.read_text(encoding="utf-8")):
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(code, page.name, "exec"), namespace)
            if output:
                assert printed.getvalue() == output


def commands(page: Path) -> list[list[str]]:
    """The words of every command line that begins with padfree, torchrun or make."""
    lines = [line for body in blocks(page, "sh") for line in body.replace("\\\n", " ").splitlines()]
    lines += INDENTED.findall(plain(page)) + INLINE.findall(plain(page))
    found = []
    for line in lines:
        if re.match(r"(\$ )?(padfree|torchrun|make|CUDA_VISIBLE_DEVICES=\S+ torchrun) +\S", line) and "..." not in line:
            words = shlex.split(line.removeprefix("$ "), comments=True)
            words = words[: words.index(">")] if ">" in words else words
            found.append([word for word in words if not re.match(r"[A-Z_]+=", word)])
    return found


@every_page
def test_commands_parse_and_their_recipes_load(page: Path) -> None:
    for words in commands(page):
        if words[0] == "make":
            makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
            assert re.search(rf"^{words[1]}:", makefile, re.MULTILINE), words
            continue
        if words[0] == "torchrun":
            assert words[words.index("-m") + 1] == "padfree", words
            words = words[words.index("-m") + 1 :]
        if len(words) == 2:  # only the name of a command
            with pytest.raises(SystemExit, match="0"):
                parser().parse_args([words[1], "--help"])
            continue
        settings = parsed(words[1:])
        if settings.command in TRAINING and settings.recipe in shipped_recipes():
            load_config(settings.recipe, settings.overrides)


def completed(values: dict[str, Any]) -> dict[str, Any]:
    """Add the required settings to a part of a recipe."""
    values = {section: dict(table) for section, table in values.items()}
    for section in ("model", "data", "batch", "run", "loss"):
        values.setdefault(section, {})
    values["model"].setdefault("path", "model")
    if "sources" not in values["data"]:
        values["data"].setdefault("path", ["train.jsonl"])
    values["run"] = {"folder": "runs/x", "steps": 100, **values["run"]}
    values["batch"].setdefault("max_tokens", 8192)
    if "tokens" not in values["batch"]:
        values["batch"].setdefault("samples", values.get("rollout", {}).get("samples_per_prompt", 8))
    if "rollout" in values or "reference" in values:
        values["loss"].setdefault("kind", "clip")
    if "reference" in values:
        values["loss"].setdefault("kl_coefficient", 0.1)
    return values


@every_page
def test_toml_and_json_load(page: Path) -> None:
    for body in blocks(page, "toml"):
        config_from_dict(completed(tomllib.loads(body)))
    for body in blocks(page, "json"):
        for record in [body] if body.startswith(("[\n", "{\n")) else body.splitlines():
            json.loads(record)


def setting_names(kind: Any, prefix: str = "") -> set[str]:
    hints = get_type_hints(kind)
    names: set[str] = set()
    for entry in fields(kind):
        names.add(prefix + entry.name)
        if is_dataclass(hints[entry.name]):
            names |= setting_names(hints[entry.name], f"{prefix}{entry.name}.")
    return names


def _parsed(text: str) -> Any:
    return json.loads(text) if text[0] in "[0123456789" else text


def anchors(page: Path) -> set[str]:
    """The anchors that a code host and MyST generate for the headings of a page."""
    headings = HEADING.findall(FENCE.sub("", page.read_text(encoding="utf-8")))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=page_name)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in LINK.findall(plain(page)):
        path = page.parent / target if target else page
        assert path.exists(), target
        assert page.parent == ROOT or ROOT / "docs" in path.resolve().parents, f"{target}: not in the built pages"
        if anchor:
            assert anchor in anchors(path), f"{target}#{anchor}"


def test_the_index_lists_every_page() -> None:
    """Experiments have an index of their own."""
    listed = {target for target, _ in LINK.findall(plain(ROOT / "docs" / "index.md"))}
    pages = {str(page.relative_to(ROOT / "docs")) for page in DOCS}
    assert listed == {page for page in pages if not page.startswith("experiments/")} - {"index.md"} | {
        "experiments/index.md"
    }


def test_settings_that_the_pages_name_exist() -> None:
    """A word in code such as `parallel.context` that begins with a section is a setting, or a table of settings."""
    names = setting_names(Config) | setting_names(DataSource, "data.sources.")
    names |= setting_names(ParameterGroup, "optimizer.groups.")
    sections = {name for name in names if "." not in name}
    named = {
        (page_name(page), name)
        for page in PAGES
        if page.name != "coming-from.md" and page.parent.name not in ("experiments", "reference")  # former settings
        for code in INLINE.findall(plain(page))
        for name in re.findall(r"^[a-z]+(?:\.[a-z_]+)+(?==|$)", code)
        if name.partition(".")[0] in sections
    }
    assert len(named) > 200
    assert {each for each in named if each[1] not in names | NOT_SETTINGS} == set()


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def help_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit, match="0"):
        parser().parse_args([*arguments, "--help"])
    return capsys.readouterr().out


def test_help_is_one_screen_with_an_example(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    overview = help_of([], capsys)
    names = re.findall(r"^    (\w+) {2,}\S", overview, re.MULTILINE)
    assert {"demo", "sft", "rl"} <= set(names)
    for text in (overview, *(help_of([name], capsys) for name in names)):
        assert len(text.splitlines()) <= 40, text
        assert max(map(len, text.splitlines())) <= 100, text
        assert re.search(r"^examples?:? *\n? *.*padfree", text, re.MULTILINE), text


def module_of(name: str) -> ModuleType:
    """docs/<name>.py, which is not in the package."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_picture_of_the_layouts_is_current() -> None:
    assert (ROOT / "docs" / "layouts.svg").read_text(encoding="utf-8") == module_of("pictures").picture()


DOCSTRING = """A *piece* of `pack`s: 2*3 of a_b |x|, and
`a *b*`.

    row    0 1
             2

    last   3
Then text.

- one `x`
  more

settings    plain data
types       inputs and outputs
"""
SHOWN = r"""A *piece* of ``pack``\ s: 2\*3 of a\_b \|x\|, and
``a *b*``.

.. code-block:: text

   row    0 1
            2

   last   3

Then text.

- one ``x``
  more

.. code-block:: text

   settings    plain data
   types       inputs and outputs
"""


def test_docstrings_become_restructured_text() -> None:
    conf = module_of("conf")
    assert conf.docstring_lines(DOCSTRING) == [*SHOWN.splitlines(), ""]
    from padfree.sample import Sample

    assert conf.field_comment(Sample, "logprobs").startswith("[n] ")
    assert conf.field_comment(Sample, "reward") == ""
