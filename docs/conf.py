"""Sphinx configuration: `make docs` builds docs/_build/html from the Markdown pages and the docstrings.

Docstrings are plain text with aligned pictures and code in single backticks. `docstring_lines` converts a docstring to
reStructuredText:

    Lay the samples end to end.          paragraph: `code` becomes ``code``, special characters are escaped

        samples   [1 2]  [7]             indented lines and aligned columns become a literal block
        packed     1 2    7

This file also writes the pages of the API reference into docs/api, which is not in git. There is one page per package:
the names that the package exports, then the docstrings of its modules. If a package exports nothing, the page lists the
names of its modules.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import re
import textwrap
from pathlib import Path
from typing import Any

import padfree

project = "padfree"
author = "the padfree authors"
version = release = padfree.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"padfree {version}"
html_copy_source = False
html_show_copyright = False
myst_heading_anchors = 4
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "undoc-members": True}
autodoc_type_aliases = {"ArrayLike": "ArrayLike"}
autodoc_mock_imports = [name for name in ("triton",) if importlib.util.find_spec(name) is None]
maximum_signature_line_length = 88

NO_PAGE = ("__main__", "cli", "page")
"""Modules without a public API."""

MARKED = re.compile(r"(?P<code>`[^`]+`)|(?P<emphasis>(?<!\w)\*\w+\*(?!\w))|[\\*|_<]")
ALIGNED = re.compile(r"\S {2,}\S")


def docstring_lines(text: str) -> list[str]:
    """Convert a plain docstring to reStructuredText."""
    lines: list[str] = []
    for block in _blocks(text.splitlines()):
        if _is_picture(block):
            picture = textwrap.dedent("\n".join(block)).splitlines()
            lines += [".. code-block:: text", "", *(f"   {line}" if line else "" for line in picture), ""]
        else:
            lines += [*_escaped("\n".join(block)).splitlines(), ""]
    return lines


def _blocks(lines: list[str]) -> list[list[str]]:
    """Split lines into paragraphs and indented blocks. An indented block may contain empty lines."""
    blocks: list[list[str]] = []
    gap = 0
    for line in lines:
        if not line.strip():
            gap += 1
            continue
        indented = line.startswith(" ")
        before = blocks[-1] if blocks else [""]
        if before[0].startswith(" ") and indented:
            before += [*[""] * gap, line]
        elif not gap and (before[0].startswith("- ") or (before[0][:1].strip() and not indented)):
            before.append(line)
        else:
            blocks.append([line])
        gap = 0
    return blocks


def _is_picture(block: list[str]) -> bool:
    return block[0].startswith(" ") or (len(block) > 1 and all(ALIGNED.search(line) for line in block))


def _escaped(text: str) -> str:
    """Turn `code` into ``code``, keep *emphasis*, and escape every other special character."""

    def replaced(found: re.Match[str]) -> str:
        if found["emphasis"]:
            return found[0]
        if not found["code"]:
            return "\\" + found[0]
        joined = text[found.end() : found.end() + 1].isalnum()  # `pack`s
        return f"`{found[0]}`" + ("\\ " if joined else "")

    return MARKED.sub(replaced, text)


def field_comment(owner: type[Any], name: str) -> str:
    """The comment after a dataclass field, such as `[n] token ids` in `tokens: ndarray  # [n] token ids`."""
    for kind in owner.__mro__[:-1]:
        source = inspect.getsource(kind) if kind.__module__.startswith("padfree") else ""
        if found := re.search(rf"^ +{name}: [^#\n]*# (.+)$", source, re.MULTILINE):
            return found[1]
    return ""


def _process(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    text = "\n".join(lines).rstrip()
    if what in ("attribute", "property") and not text:
        owner, _, field = name.rpartition(".")
        module, _, class_name = owner.rpartition(".")
        text = field_comment(getattr(importlib.import_module(module), class_name), field)
    lines[:] = docstring_lines(text)


def _skip(app: Any, what: str, name: str, thing: Any, skip: bool, options: Any) -> bool | None:
    return True if what == "class" and name.isupper() else None


def reference_pages() -> dict[str, str]:
    """The Markdown of every page of the API reference, by page name."""
    names = [module.name for module in pkgutil.iter_modules(padfree.__path__) if module.name not in NO_PAGE]
    pages = {f"padfree.{name}": _package_page(f"padfree.{name}") for name in names}
    rows = [(name, getattr(padfree, name).__module__) for name in padfree.__all__]
    table = [
        f"| {{py:obj}}`{name} <{_home(module)}.{name}>` | [{_home(module)}]({_home(module)}.md) |"
        for name, module in rows
    ]
    head = _module("padfree", members=False)
    return {"padfree": "\n".join(["# padfree", "", head, "", "| name | from |", "| --- | --- |", *table, ""]), **pages}


def _home(module: str) -> str:
    """The package whose page documents a module: `padfree.packing.fill` -> `padfree.packing`."""
    return ".".join(module.split(".")[:2])


def _package_page(name: str) -> str:
    package = importlib.import_module(name)
    exports = hasattr(package, "__all__") or not hasattr(package, "__path__")
    parts = [f"# {name}", _module(name, members=exports)]
    for module in pkgutil.iter_modules(getattr(package, "__path__", [])):
        if module.name != "__main__":
            inner = f"{name}.{module.name}"
            parts += [f"## {inner}", _module(inner, members=not exports)]
    return "\n\n".join(parts) + "\n"


def _module(name: str, *, members: bool) -> str:
    option = "" if members else "   :no-members:\n   :no-index:\n"  # some functions have the same name as their module
    return f"```{{eval-rst}}\n.. automodule:: {name}\n{option}```"


def _write_pages(app: Any) -> None:
    folder = Path(app.srcdir) / "api"
    folder.mkdir(exist_ok=True)
    pages = reference_pages()
    for path in folder.glob("*.md"):
        if path.stem not in pages:
            path.unlink()
    for name, text in pages.items():
        path = folder / f"{name}.md"
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def setup(app: Any) -> None:
    app.connect("builder-inited", _write_pages)
    app.connect("autodoc-process-docstring", _process)
    app.connect("autodoc-skip-member", _skip)
