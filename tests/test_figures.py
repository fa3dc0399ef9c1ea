"""Every measured figure of the README has a source: an entry of docs/experiments/figures.toml, and a page that has it.

figures.toml  ->  docs/experiments/figures.md, and the README between <!-- figures --> and <!-- /figures -->
"""

from __future__ import annotations

import importlib
import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "experiments"
HEADINGS = ["Question", "Prediction", "Result", "Decision"]
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
UNITS = r"tokens/s|[TG]FLOP/s|[kKMGT]i?B\b|%|[mµn]?s\b|seconds?\b|×|x (?:as|faster)|times (?:as|the|faster|slower|less)"
MEASURED = re.compile(rf"(?<!assumed )(?<![\w.,])\d[\d.,]*[kM]? ?(?:{UNITS})")  # an assumption is not a measurement


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return importlib.import_module("figures")


def toml_entries() -> dict[str, dict[str, str]]:
    entries: dict[str, dict[str, str]] = tomllib.loads((FOLDER / "figures.toml").read_text(encoding="utf-8"))["figures"]
    return entries


def experiments() -> list[Path]:
    return sorted(page for page in FOLDER.glob("*.md") if page.stem not in ("index", "figures"))


def measured(text: str) -> list[str]:
    """The measured figures of a Markdown text outside its fenced blocks."""
    return MEASURED.findall(FENCE.sub("", text))


def test_both_tables_are_what_figures_toml_gives(figures: ModuleType) -> None:
    for path, text in figures.generated().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run python bench/figures.py"


@pytest.mark.parametrize("key", toml_entries())
def test_a_figure_is_on_the_page_that_it_names(key: str) -> None:
    entry = toml_entries()[key]
    text = (FOLDER / entry["page"]).read_text(encoding="utf-8")
    assert re.search(rf"(?<![\d.,]){re.escape(entry['value'])}(?![\d%]|[.,]\d)", text), entry["value"]
    for commit in re.findall(r"[0-9a-f]{7}", entry["commit"]):
        assert commit in text, commit
    for script in re.findall(r"(?:bench|tests)/\S+\.py", entry["command"]):
        assert (ROOT / script).exists(), script


@pytest.mark.parametrize("name", ["name", "value", "unit", "hardware", "versions", "commit", "date", "command", "page"])
def test_an_entry_without_a_field_is_refused(figures: ModuleType, name: str) -> None:
    content = tomllib.loads((FOLDER / "figures.toml").read_text(encoding="utf-8"))
    entry = content["figures"]["fill"]
    assert str(figures.figure("fill", entry, content)) == f"{entry['value']} {entry['unit']}"
    for broken in ({key: value for key, value in entry.items() if key != name}, {**entry, name: ""}):
        with pytest.raises(ValueError, match=rf"figures\.fill: .*{name}"):
            figures.figure("fill", broken, content)


def test_the_readme_has_no_figure_without_a_source(figures: ModuleType) -> None:
    before, _, rest = (ROOT / "README.md").read_text(encoding="utf-8").partition(figures.BEGIN)
    table, _, after = rest.partition(figures.END)
    assert measured(table)
    assert measured(before) + measured(after) == []


def test_a_result_has_no_number_of_its_own(figures: ModuleType) -> None:
    content = figures.read()
    content["readme"] = [{"what": "`fill`", "result": "{fill}; fa4 {attention.value}"}]
    assert "| 183 times as fast; fa4 393 | 2 CPU cores, H200 |" in figures.readme_table(content)
    content["readme"] = [{"what": "`fill`", "result": "{fill}, or 60"}]
    with pytest.raises(ValueError, match="not a figure"):
        figures.readme_table(content)


def test_what_is_taken_for_a_measured_figure() -> None:
    for text in ("113k tokens/s", "9.1 GiB", "40%", "12.0 × HF", "175 ms", "2.5 s.", "606 TFLOP/s", "3 times as fast"):
        assert measured(text), text
    for text in (
        "an assumed 40% of",
        "killed 20 times at random",
        "67 architectures",
        "torch ≥ 2.11, safetensors",
        "fa4",
    ):
        assert not measured(text), text


@pytest.mark.parametrize("page", experiments(), ids=lambda page: page.stem)
def test_an_experiment_has_question_prediction_result_and_decision(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == HEADINGS
    assert all(body.strip() for body in re.split(r"^## .+$", text, flags=re.MULTILINE))
    assert re.search(r"^\*\*Machines?:\*\*", text, re.MULTILINE)
    assert re.search(r"\*\*Recorded:\*\*\s20\d\d-\d\d-\d\d", text)


def test_the_index_lists_every_experiment() -> None:
    listed = re.findall(r"^- \[.+\]\((.+\.md)\): .+$", (FOLDER / "index.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == [page.name for page in experiments()]
