"""Build a page from top to bottom and write it as one HTML file.

    page = Page("A run", "100 steps")
    page.add_figure("Loss", {"data": [{"y": [2.0, 1.5]}], "layout": {"xaxis": {"title": {"text": "step"}}}})
    page.add_table("Settings", ["name", "value"], [["lr", 1e-5]])
    page.write("run.html")

The page contains everything that it needs, and makes no network requests. All text is escaped, but plotly interprets
some HTML in the texts of a figure, such as `<br>`. Pass names that come from users through `plain`.
"""

from __future__ import annotations

import contextlib
import html
import json
import math
import os
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from padfree.errors import UserError
from padfree.tools.page.theme import FONTS, THEMES, template

Cell = str | int | float

EMPTY = ("", "–")
"""Texts that a table may have in place of a missing number, so that the column still counts as a column of numbers."""

TEMPLATES = Environment(
    loader=PackageLoader("padfree.tools.page"),
    autoescape=select_autoescape(("html",)),  # CSS and JavaScript are not escaped, because they have no HTML escapes
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)

BEGINNING = TEMPLATES.get_template("beginning.html").render()
"""The first lines of every page; they identify a file as a page of padfree."""


def refuse_foreign(path: Path, setting: str = "output") -> None:
    """Raise a `UserError` if `path` is an existing file that is not an HTML page written by padfree.

    `setting`: the name of the option that holds the path, for the error message.
    """
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            head = file.read(len(BEGINNING))
    except OSError:
        return  # the file does not exist, or writing it will raise a more specific error
    if head and head != BEGINNING:
        raise UserError(
            setting,
            f"{path} exists and was not written by padfree",
            "give another file name, or remove the file",
        )


class Page:
    """A page of texts, tables and figures, which are shown in the order in which they are added."""

    def __init__(self, title: str, subtitle: str = "") -> None:
        self.title, self.subtitle = title, subtitle
        self._blocks: list[dict[str, Any]] = []  # rendered by templates/page.html according to "kind"
        self._figures: list[Any] = []

    def add_text(self, text: str) -> None:
        self._blocks.append({"kind": "text", "text": text})

    def add_heading(self, text: str) -> None:
        self._blocks.append({"kind": "heading", "text": text})

    def add_table(self, caption: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """Add a table. Integers get thousands separators, floats four significant digits. Numbers are right-aligned."""
        wrong = [row for row in rows if len(row) != len(columns)]
        assert not wrong, f"{len(columns)} columns, but a row has {len(wrong[0])}"
        numeric = [
            any(not isinstance(row[i], str) for row in rows)
            and all(not isinstance(row[i], str) or row[i] in EMPTY for row in rows)
            for i in range(len(columns))
        ]
        head, *body = ([_cell(*pair) for pair in zip(row, numeric, strict=True)] for row in (columns, *rows))
        self._blocks.append({"kind": "table", "caption": caption, "head": head, "rows": body})

    def add_figure(self, caption: str, figure: Mapping[str, Any], *, wide: bool = False) -> None:
        """Add a plotly figure: `{"data": [...], "layout": {...}}`, of plain values or numpy arrays. NaN is a gap.

        `wide`: take the full width of the page. Other consecutive figures are shown side by side in pairs.
        """
        extra = set(figure) - {"data", "layout"}
        assert not extra, f"a figure has data and layout, not {sorted(extra)}"
        layout = _jsonable(figure.get("layout", {}))
        height = f"{float(layout['height']):.0f}" if "height" in layout else None
        self._blocks.append(
            {"kind": "figure", "caption": caption, "wide": wide, "height": height, "number": len(self._figures)}
        )
        self._figures.append({"data": _jsonable(figure["data"]), "layout": layout})

    def add_records(self, caption: str, columns: Sequence[str], rows: Sequence[Sequence[Cell | None]]) -> None:
        """Add a table that the reader can search, sort, and filter by the values of the first column.

        Numbers are right-aligned. Long texts are cut to a few lines until the reader clicks on their row of the table.
        """
        wrong = [row for row in rows if len(row) != len(columns)]
        assert not wrong, f"{len(columns)} columns, but a row has {len(wrong[0])}"
        described = [{"name": name, "kind": _kind([row[i] for row in rows])} for i, name in enumerate(columns)]
        shown = {"columns": described, "rows": _jsonable(rows)}
        data = json.dumps(shown, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
        self._blocks.append({"kind": "records", "caption": caption, "data": Markup(data)})

    def add_details(self, summary: str, text: str) -> None:
        """Add preformatted text that is collapsed until the reader opens it."""
        self._blocks.append({"kind": "details", "summary": summary, "text": text})

    def add_marked(self, caption: str, pieces: Sequence[tuple[str, bool]]) -> None:
        """Add preformatted text. `pieces`: pairs of a text and whether it is highlighted."""
        shown = [{"text": text, "marked": marked} for text, marked in pieces]
        self._blocks.append({"kind": "marked", "caption": caption, "pieces": shown})

    def write(self, path: str | Path) -> None:
        """Write the page to a file atomically, so that a reader sees either the old page or the new one."""
        path = Path(path)
        refuse_foreign(path)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.writing")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(self.html(), encoding="utf-8", errors="replace")  # texts may hold lone surrogates
            temporary.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise UserError(
                "output", f"{path} cannot be written ({error.strerror})", "give another file name"
            ) from error

    def html(self) -> str:
        """Return the HTML of the page."""
        groups = groupby(self._blocks, key=lambda block: block["kind"] == "figure")
        shown = {"figures": self._figures, "templates": {theme: template(theme) for theme in THEMES}}
        figures = json.dumps(shown, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
        return TEMPLATES.get_template("page.html").render(
            title=self.title,
            subtitle=self.subtitle,
            groups=[(is_figures, list(blocks)) for is_figures, blocks in groups],
            has_figures=bool(self._figures),
            has_records=any(block["kind"] == "records" for block in self._blocks),
            figures=Markup(figures),
            plotly=Markup(_plotly() if self._figures else ""),
            fonts=FONTS,
            **THEMES,
        )


def plain(text: str) -> str:
    """Escape a text of a figure, such as the name of a trace or a label, so that plotly shows it unchanged."""
    return html.escape(text, quote=False)


def _plotly() -> str:
    """Return plotly's script. It cannot contain `</script`, which would end the HTML element that holds it."""
    from plotly.offline import get_plotlyjs

    script: str = get_plotlyjs()
    assert "</script" not in script
    assert "<!--" not in script
    return script


def _cell(cell: Cell, right: bool) -> dict[str, str]:
    if isinstance(cell, str):
        shown = cell
    elif isinstance(cell, float):
        shown = f"{cell:,.0f}" if 1e4 <= abs(cell) < 1e15 else f"{cell:.4g}"
    else:
        shown = f"{cell:,}"
    # CSS by length: short texts are on one line, long texts keep a minimum width. A table that is too wide scrolls.
    kind = "number" if right else "short" if len(shown) <= 26 else "long" if len(shown) > 60 else "text"
    return {"kind": kind, "text": shown}


def _kind(column: Sequence[Cell | None]) -> str:
    """Return how a column of records is shown: "number", "short" or "long".

    "number" is right-aligned, "short" is on one line, and "long" is cut to a few lines.
    """
    values = [value for value in column if value is not None]
    if values and not any(isinstance(value, str) for value in values):
        return "number"
    return "long" if any(len(str(value)) > 40 or "\n" in str(value) for value in values) else "short"


def _jsonable(value: Any) -> Any:
    """Return the value as plain lists, dicts and numbers. NaN and infinity become null: a gap in the plot."""
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, str) or value is None or isinstance(value, int):
        return value
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple | range):
        return [_jsonable(item) for item in value]
    assert hasattr(value, "tolist"), f"a figure holds plain values and arrays, not {type(value).__name__}"
    return _jsonable(value.tolist())
