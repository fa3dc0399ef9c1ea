"""Pages in a browser: all figures, light and dark, wide and narrow, with unusual texts."""

from __future__ import annotations

import importlib.resources
import json
import math
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from padfree.tools.page import COLOURS, Page, plain
from padfree.tools.page.page import BEGINNING, TEMPLATES
from padfree.tools.page.theme import THEMES
from tests.browser import Browser, View, executable
from tests.refused import refused
from tests.waiting import wait_until

EVIL = '</script><img src="http://example.invalid/x.png" onerror="document.title=\'broken\'"> & <b>bold</b>'
FIGURES = 3


def line(name: str = "line") -> dict[str, Any]:
    steps = np.arange(20)
    return {
        "data": [{"x": steps, "y": np.sin(steps), "name": plain(name)}, {"x": steps, "y": np.cos(steps), "meta": EVIL}],
        "layout": {"xaxis": {"title": {"text": "step"}}, "yaxis": {"title": {"text": "value"}}},
    }


def whole_page() -> Page:
    page = Page(f"title {EVIL}", f"subtitle {EVIL}")
    page.add_heading(f"heading {EVIL}")
    page.add_text(f"text {EVIL}")
    page.add_figure(f"caption {EVIL}", line(EVIL))
    page.add_figure("bars", {"data": [{"type": "bar", "y": [1, None, math.nan]}]})
    high = line()
    high["layout"]["height"] = 420
    page.add_figure("wide and high", high, wide=True)
    page.add_table(f"table {EVIL}", [f"column {i} {EVIL}" for i in range(6)], [[EVIL, 12345, 0.5, "x" * 200, 1, EVIL]])
    page.add_marked(f"marked {EVIL}", [(EVIL, False), (f"{EVIL}\n", True), ("z" * 300, False)])
    page.add_details(f"details {EVIL}", f"{EVIL}\n" + "y" * 500)
    return page


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if executable() is None:
        pytest.skip("no Chromium is installed")
    with Browser() as found:
        yield found


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "a folder" / "page.html"
    whole_page().write(path)
    return path


def luminance(colour: str) -> float:
    """The luminance of `#rrggbb` or `rgb(r, g, b)`, as defined by WCAG."""
    if colour.startswith("#"):
        parts = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    else:
        parts = [int(part) for part in re.findall(r"\d+", colour)[:3]]
    linear = [part / 255 / 12.92 if part <= 10 else ((part / 255 + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first: str, second: str) -> float:
    bright, dark = sorted((luminance(first), luminance(second)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


INK = "getComputedStyle(document.querySelector('.plot .xtick text')).fill"
CARD = "getComputedStyle(document.querySelector('figure')).backgroundColor"
TEXT = "getComputedStyle(document.body).color"
PAPER = "getComputedStyle(document.body).backgroundColor"


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (390, True)])
def test_every_figure_is_drawn_and_can_be_read(browser: Browser, path: Path, width: int, dark: bool) -> None:
    view = browser.open(path, width=width, dark=dark)
    assert view.errors == []
    assert view.evaluate("document.querySelectorAll('.js-plotly-plot .main-svg .xtick').length") >= FIGURES
    assert view.evaluate("[...document.querySelectorAll('.plot')].map(p => p.querySelectorAll('.trace').length)") == [
        2,
        1,
        2,
    ]
    assert view.evaluate("document.querySelector('.legendtext').textContent") == EVIL
    assert view.evaluate("document.title") == f"title {EVIL}"
    assert view.evaluate("document.querySelectorAll('img, main b').length") == 0
    assert view.evaluate("document.querySelector('.plot')._context.showSendToCloud") is False

    # Nothing is wider than the screen, and each plot is as wide as its figure.
    assert view.evaluate("document.documentElement.scrollWidth") == width
    places = view.evaluate(
        "[...document.querySelectorAll('.plot')].map(p => [p.clientWidth, p.querySelector('.main-svg').clientWidth])"
    )
    assert all(place == drawing > 200 for place, drawing in places)
    assert view.evaluate("document.querySelector('.table').scrollWidth") > width
    assert view.evaluate("[...document.querySelectorAll('.main-svg:first-child')].at(-1).clientHeight") == 420
    tops = view.evaluate("[...document.querySelectorAll('figure')].map(f => f.getBoundingClientRect().top)")
    assert (tops[0] == tops[1]) == (width > 700)
    assert tops[1] < tops[2]

    # The button turns the page and its figures to the other theme and back.
    for is_dark in (dark, not dark, dark):
        ink, card, text, paper = (view.evaluate(colour) for colour in (INK, CARD, TEXT, PAPER))
        assert (luminance(card) < 0.2) == (luminance(paper) < 0.2) == is_dark
        assert contrast(ink, card) > 4.5
        assert contrast(text, paper) > 4.5
        assert view.evaluate("document.querySelector('button.theme').textContent") == ("Light" if is_dark else "Dark")
        view.evaluate("document.querySelector('button.theme').click()")
    assert view.errors == []


def test_the_system_changes_its_mind_and_the_window_its_width(browser: Browser, path: Path) -> None:
    view = browser.open(path)
    view.call("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": "dark"}]})
    view.wait_for(f"{INK} === 'rgb(154, 165, 175)'")
    assert THEMES["dark"]["faint"] == "#9aa5af"
    view.call(
        "Emulation.setDeviceMetricsOverride", {"width": 500, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    )
    view.wait_for(
        "document.querySelector('.plot .main-svg').clientWidth === document.querySelector('.plot').clientWidth"
    )
    assert view.evaluate("document.documentElement.scrollWidth") == 500
    image = view.evaluate("Plotly.toImage(document.querySelector('.plot'), { format: 'png' })")
    assert image.startswith("data:image/png;base64,")
    assert view.errors == []


def test_the_browser_tells_of_errors_and_requests(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "bad.html"
    path.write_text(
        "<html data-drawn><body><script>console.error('first')</script><script>throw new Error('second')</script>"
        "<img src='http://127.0.0.1:9/third.png'></body></html>"
    )
    view = browser.open(path)
    wait_until(lambda: all(tells_of(view, word) for word in ("first", "second", "third")))
    policy = BEGINNING[BEGINNING.index('<meta http-equiv="Content-Security-Policy"') :]
    path.write_text(path.read_text().replace("<body>", f"<head>{policy}</head><body>"))
    view = browser.open(path)
    wait_until(lambda: tells_of(view, "Content Security Policy"))


def tells_of(view: View, word: str) -> bool:
    view.evaluate("0")  # processes pending events
    return any(word in error for error in view.errors)


def test_records_are_searched_sorted_and_opened(browser: Browser, tmp_path: Path) -> None:
    page = Page("records")
    rows: list[list[Any]] = [[i // 4, i / 10, f"word{i} {EVIL}\n" + "line\n" * 20, "\ud800"] for i in range(60)]
    rows[7][1] = None
    page.add_records(f"caption {EVIL}", ["batch", "reward", f"text {EVIL}", "odd"], rows)
    page.write(tmp_path / "page.html")
    view = browser.open(tmp_path / "page.html")
    assert view.errors == []
    assert view.evaluate("document.querySelectorAll('img, main b').length") == 0

    def shown(column: int) -> Any:
        return view.evaluate(f"[...document.querySelectorAll('tbody tr')].map(r => r.children[{column}].textContent)")

    def click(selector: str) -> None:
        view.evaluate(f"document.querySelector({selector!r}).click()")

    def choose(selector: str, value: str, event: str) -> None:
        view.evaluate(
            f"(e => {{ e.value = {value!r}; e.dispatchEvent(new Event({event!r})); }})"
            f"(document.querySelector({selector!r}))"
        )

    assert len(shown(0)) == 25
    assert view.evaluate("document.querySelector('.count').textContent") == "60 of 60"
    assert shown(2)[0] == rows[0][2]
    click(".more")
    assert len(shown(0)) == 50
    choose(".records input", "WORD59 line", "input")
    assert shown(1) == ["5.9"]
    choose(".records input", "", "input")
    choose(".records select", "3", "change")
    assert shown(1) == ["1.2", "1.3", "1.4", "1.5"]
    choose(".records select", "", "change")
    click(".records th:nth-child(2) button")
    assert shown(1)[:2] == ["5.9", "5.8"]
    click(".records th:nth-child(2) button")
    assert shown(1)[:2] == ["0", "0.1"]
    assert view.evaluate("document.querySelector('.records th:nth-child(2)').getAttribute('aria-sort')") == "ascending"
    for _ in range(2):
        click(".more")
    assert shown(1)[-1] == "–", "a missing value stands last"
    heights = [view.evaluate("document.querySelector('tbody tr').clientHeight")]
    click("tbody tr td:nth-child(3)")
    heights.append(view.evaluate("document.querySelector('tbody tr').clientHeight"))
    assert heights[1] > 2 * heights[0]
    assert view.errors == []


def test_a_page_without_figures_has_no_library(browser: Browser, tmp_path: Path) -> None:
    page = Page("no figures")
    page.add_text("text")
    page.write(tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size < 20_000
    view = browser.open(tmp_path / "page.html")
    assert view.errors == []
    assert view.evaluate("document.querySelector('main').textContent.trim()") == "text"


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("colour", COLOURS)
def test_colours_stand_out_in_both_themes(theme: str, colour: str) -> None:
    assert contrast(colour, THEMES[theme]["card"]) > 3


def test_figures_are_valid_json_without_nan_and_without_tags(path: Path) -> None:
    text = path.read_text()
    (data,) = re.findall(r'<script type="application/json" id="figures">(.*?)</script>', text, re.DOTALL)
    figures = json.loads(data, parse_constant=pytest.fail)["figures"]
    assert len(figures) == FIGURES
    assert figures[0]["data"][0]["name"] == plain(EVIL)
    assert figures[1]["data"][0]["y"] == [1, None, None]
    assert "<" not in data
    assert text.count("</script>") == 3


def test_templates_are_packaged_and_cannot_end_their_elements() -> None:
    """A wheel includes every template file, and the style sheet and the script cannot end their tags."""
    folder = Path(str(importlib.resources.files("padfree.tools.page"))) / "templates"
    names = sorted(path.name for path in folder.iterdir())
    assert (
        names
        == sorted(TEMPLATES.list_templates())
        == [
            "beginning.html",
            "page.css",
            "page.html",
            "page.js",
            "records.js",
        ]
    )
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["padfree.tools.page"]
    assert {path.name for pattern in patterns for path in folder.parent.glob(pattern)} == set(names)
    for name in ("page.css", "page.js", "records.js"):
        text = (folder / name).read_text()
        assert "</" not in text
        assert "<!--" not in text


def test_cells_show_numbers_for_people() -> None:
    page = Page("t")
    page.add_table("t", ["a", "b", "c"], [[1234567, 0.000123456, "–"], ["–", 123456.7, 7], [np.int64(5), 1.0, 8]])
    cells = re.findall(r'<td class="(\w+)">(.*?)</td>', page.html())
    assert [text for _, text in cells] == ["1,234,567", "0.0001235", "–", "–", "123,457", "7", "5", "1", "8"]
    assert {kind for kind, _ in cells} == {"number"}
    page = Page("t")
    page.add_table("t", ["a", "b"], [["word", 1], ["x" * 61, 2]])
    assert re.findall(r'<td class="(\w+)">', page.html()) == ["short", "number", "long", "number"]


def test_write_replaces_the_file_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    for title in ("first", "second"):
        Page(title).write(path)
    assert "<title>second</title>" in path.read_text()
    assert list(tmp_path.iterdir()) == [path]
    (tmp_path / "folder").mkdir()
    with refused("output"):
        Page("t").write(tmp_path / "folder")
    assert len(list(tmp_path.iterdir())) == 2
