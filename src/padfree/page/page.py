"""A page that is put together from above to below and written as one HTML file.

    page = Page("A run", "100 steps")
    page.add_figure("Loss", {"data": [{"y": [2.0, 1.5]}], "layout": {"xaxis": {"title": {"text": "step"}}}})
    page.add_table("Settings", ["name", "value"], [["lr", 1e-5]])
    page.write("run.html")

The file has everything in it, plotly's own script too, and its security policy forbids it every request. All text is
escaped. Plotly reads a little HTML in the texts of a figure (`<br>`, `<b>`): a name that is not ours goes there through
`plain`. Figures that follow each other stand two in a row on a wide screen; a `wide` one has the row for itself.
"""

from __future__ import annotations

import contextlib
import html
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from padfree.page.theme import SCRIPT, THEMES, style_sheet, template

Cell = str | int | float

EMPTY = ("", "–")
"""What stands in a column of numbers where there is none."""

POLICY = "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; img-src data: blob:"


BEGINNING = (
    '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
    f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
)
"""By which a page is known."""


def refuse_foreign(path: Path, setting: str = "output") -> None:
    """Refuse to write where something lies that is no page of padfree."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            head = file.read(len(BEGINNING))
    except OSError:
        return  # nothing is there, or writing will say what is wrong with it
    if head and head != BEGINNING:
        raise ValueError(f"{setting}: {path} is there and is no page of padfree; give another file name, or remove it")


class Page:
    """Texts, tables and figures in the order in which they are added."""

    def __init__(self, title: str, subtitle: str = "") -> None:
        self.title, self.subtitle = title, subtitle
        self._blocks: list[tuple[bool, str]] = []  # (is a figure, HTML)
        self._figures: list[Any] = []

    def add_text(self, text: str) -> None:
        self._add(f"<p>{html.escape(text)}</p>")

    def add_heading(self, text: str) -> None:
        self._add(f"<h2>{html.escape(text)}</h2>")

    def add_table(self, caption: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """Integers get separators, floats four digits that count. A column of numbers stands on the right."""
        wrong = [row for row in rows if len(row) != len(columns)]
        assert not wrong, f"{len(columns)} columns, but a row has {len(wrong[0])}"
        numeric = [
            any(not isinstance(row[i], str) for row in rows)
            and all(not isinstance(row[i], str) or row[i] in EMPTY for row in rows)
            for i in range(len(columns))
        ]
        head = "".join(_cell("th", name, right) for name, right in zip(columns, numeric, strict=True))
        body = "\n".join(
            "<tr>" + "".join(_cell("td", cell, right) for cell, right in zip(row, numeric, strict=True)) + "</tr>"
            for row in rows
        )
        self._add(
            f'<div class="table" tabindex="0"><table><caption>{html.escape(caption)}</caption>\n'
            f"<thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>"
        )

    def add_figure(self, caption: str, figure: Mapping[str, Any], *, wide: bool = False) -> None:
        """A plotly figure: `{"data": [...], "layout": {...}}` of plain values or numpy arrays; NaN is a gap."""
        extra = set(figure) - {"data", "layout"}
        assert not extra, f"a figure has data and layout, not {sorted(extra)}"
        layout = _jsonable(figure.get("layout", {}))
        height = f' style="height:{float(layout["height"]):.0f}px"' if "height" in layout else ""
        number = len(self._figures)
        self._figures.append({"data": _jsonable(figure["data"]), "layout": layout})
        self._add(
            f'<figure class="{"wide" if wide else "half"}"><figcaption>{html.escape(caption)}</figcaption>'
            f'<div class="plot" id="plot-{number}"{height}></div></figure>',
            is_figure=True,
        )

    def add_details(self, summary: str, text: str) -> None:
        """Text as it is, closed until the reader opens it."""
        self._add(f"<details><summary>{html.escape(summary)}</summary><pre>{html.escape(text)}</pre></details>")

    def write(self, path: str | Path) -> None:
        """The whole file at once: a reader sees the old page or the new one."""
        path = Path(path)
        refuse_foreign(path)
        beside = path.with_name(f".{path.name}.{os.getpid()}.writing")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            beside.write_text(self.html(), encoding="utf-8")
            beside.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                beside.unlink()
            raise ValueError(f"output: {path} cannot be written ({error.strerror}); give another file name") from error

    def html(self) -> str:
        """The file's text."""
        subtitle = f'<p class="subtitle">{html.escape(self.subtitle)}</p>' if self.subtitle else ""
        return "\n".join(
            [
                BEGINNING,
                '<meta name="viewport" content="width=device-width, initial-scale=1">',
                f"<title>{html.escape(self.title)}</title>",
                f"<style>{style_sheet()}</style>\n</head>\n<body>",
                f"<header><div><h1>{html.escape(self.title)}</h1>{subtitle}</div>",
                '<button class="theme" type="button" title="Light or dark" hidden></button></header>',
                "<main>",
                "<noscript><p>The figures need JavaScript.</p></noscript>" if self._figures else "",
                *self._grouped(),
                "</main>\n<footer></footer>",
                *self._scripts(),
                "</body>\n</html>\n",
            ]
        )

    def _add(self, block: str, *, is_figure: bool = False) -> None:
        self._blocks.append((is_figure, block))

    def _grouped(self) -> list[str]:
        """The blocks, each run of figures in one grid."""
        found = []
        inside = False
        for is_figure, block in [*self._blocks, (False, "")]:
            if is_figure != inside:
                found.append('<div class="figures">' if is_figure else "</div>")
                inside = is_figure
            found.append(block)
        return found

    def _scripts(self) -> list[str]:
        shown = {"figures": self._figures, "templates": {theme: template(theme) for theme in THEMES}}
        data = json.dumps(shown, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
        library = ""
        if self._figures:
            from plotly.offline import get_plotlyjs

            library = get_plotlyjs()
        for script in (library, SCRIPT):
            assert "</script" not in script
            assert "<!--" not in script
        return [
            f'<script type="application/json" id="figures">{data}</script>',
            f"<script>{library}</script>",
            f"<script>{SCRIPT}</script>",
        ]


def plain(text: str) -> str:
    """Text for a figure (a trace's name, a label) that plotly shows as it is."""
    return html.escape(text, quote=False)


def _cell(tag: str, cell: Cell, right: bool) -> str:
    if isinstance(cell, str):
        shown = cell
    elif isinstance(cell, float):
        shown = f"{cell:,.0f}" if 1e4 <= abs(cell) < 1e15 else f"{cell:.4g}"
    else:
        shown = f"{cell:,}"
    # Short text is not broken and long text not squeezed: a table that is too wide then scrolls inside itself.
    kind = "number" if right else "short" if len(shown) <= 26 else "long" if len(shown) > 60 else "text"
    return f'<{tag} class="{kind}">{html.escape(shown)}</{tag}>'


def _jsonable(value: Any) -> Any:
    """Plain lists, dicts and numbers; JSON has no NaN and no infinity, null is a gap in a figure."""
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
