"""docs/reference is what the code generates, and lists every setting and every metric."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import padfree
from padfree.config.setting import Needs
from padfree.config.settings_table import SettingEntry, setting_entries
from padfree.record.metric_table import METRIC_GROUPS, Metric, unknown_metrics
from padfree.tools.reference_pages import quick_pages
from padfree.train.batch_times import PARTS

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "docs" / "reference"
SOURCE = Path(padfree.__file__).parent
METRICS = [metric for group in METRIC_GROUPS for metric in group.metrics]


@pytest.mark.parametrize("name", quick_pages())
def test_a_page_is_what_the_code_generates(name: str) -> None:
    assert (REFERENCE / name).read_text(encoding="utf-8") == quick_pages()[name], "run `make reference`"


def test_the_index_lists_every_page() -> None:
    index = (REFERENCE / "index.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"\]\((\w+\.md)\)", index))
    assert listed == {page.name for page in REFERENCE.glob("*.md")} - {"index.md"}


def test_links_lead_to_pages_and_headings() -> None:
    for page in REFERENCE.glob("*.md"):
        for target, anchor in re.findall(r"\]\(([^)#:]+)(?:#([^)]*))?\)", page.read_text(encoding="utf-8")):
            path = page.parent / target
            assert path.exists(), f"{page.name}: {target}"
            headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            assert not anchor or anchor in {heading.lower().replace(" ", "-") for heading in headings}, anchor


@pytest.mark.parametrize("entry", setting_entries(), ids=lambda entry: entry.name)
def test_a_setting_has_a_meaning(entry: SettingEntry) -> None:
    assert entry.meaning, "give it as setting(default, about=...)"
    assert entry.meaning.endswith("."), "a sentence"
    assert len(entry.meaning) <= 250, "a sentence; docs/ have room for more"


def test_a_need_names_a_setting_or_has_words() -> None:
    names = {entry.name for entry in setting_entries()}
    for entry in setting_entries():
        for need in entry.needs:
            mentioned = re.findall(r"[a-z_]+\.[a-z_.]+", need)
            assert mentioned, f"{entry.name}: {need}"
            assert set(mentioned) <= names, f"{entry.name}: {need}: give `about` in need_of"
    assert Needs("a", (), "").about is None


def test_names_of_metrics_are_unique_within_a_group() -> None:
    for group in METRIC_GROUPS:
        names = [metric.name for metric in group.metrics]
        assert len(set(names)) == len(names)


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_a_metric_is_written_somewhere(metric: Metric) -> None:
    """The last part of its name is a string of the package, outside the table."""
    assert metric.unit
    assert metric.meaning.endswith(".")
    last = next(part for part in reversed(metric.name.split("/")) if not part.isupper())
    assert last in _strings(), f"{metric.name} is in the table, but nothing writes it"


def test_parts_of_the_time_are_in_the_table() -> None:
    assert unknown_metrics(f"seconds/{part}" for part in PARTS) == []


def test_families_and_sources_of_metrics() -> None:
    assert unknown_metrics(["source/math/loss", "environment/score", "eval/test.jsonl/loss", "eval/loss"]) == []
    assert unknown_metrics(["source/math/other", "eval/other", "eval/a/other", "no_such"]) == [
        *("source/math/other", "eval/other", "eval/a/other", "no_such")
    ]


def _strings() -> set[str]:
    """Words in the string constants of the package, and names of dataclass fields and of functions."""
    if not _FOUND:
        for path in SOURCE.rglob("*.py"):
            if path.name == "metric_table.py":
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    _FOUND.update(re.split(r"[/\s]", node.value))
    return _FOUND


_FOUND: set[str] = set()
