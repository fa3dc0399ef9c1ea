"""The page of runs: its text, and its rendering in a browser."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path

import numpy as np
import pytest

from padfree.tools.report import write_report
from padfree.tools.report.build import report_page
from padfree.tools.report.runs import read_runs
from tests.browser import Browser, executable
from tests.tools.report.run_folders import timed_rl_step, write_lines, write_rl_run, write_sft_run

EVIL = "<img src=x></script>%{y}"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if executable() is None:
        pytest.skip("no Chromium is installed")
    with Browser() as found:
        yield found


def page_of(*folders: Path) -> str:
    """The file without plotly's script."""
    text = report_page(read_runs(folders)).html()
    return text[text.index("<header>") : text.index('<script type="application/json"')]


def packs_of(html: str) -> list[list[str]]:
    rows = re.findall(r"<tr>(.*?)</tr>", html)
    cells = [re.findall(r'<t[dh] class="\w+">(.*?)</t[dh]>', row) for row in rows]
    return [[unescape(cell) for cell in row] for row in cells]


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_two_runs_side_by_side_in_the_browser(browser: Browser, tmp_path: Path, width: int, dark: bool) -> None:
    folders = [write_rl_run(tmp_path / "rl", 230, uid=EVIL), write_sft_run(tmp_path / "sft", 60)]
    assert write_report(folders, tmp_path / "page.html", names=[EVIL, "b"]) == []
    view = browser.open(tmp_path / "page.html", width=width, dark=dark)
    assert view.errors == []
    assert view.evaluate("document.documentElement.scrollWidth") == width
    assert view.evaluate("document.querySelectorAll('img').length") == 0
    drawn = dict(
        view.evaluate(
            """[...document.querySelectorAll('figure')].map(f => [
                f.querySelector('figcaption').textContent, f.querySelectorAll('.scatterlayer .trace').length])"""
        )
    )
    assert len(drawn) == view.evaluate("document.querySelectorAll('.js-plotly-plot').length") == 15
    assert drawn["Loss"] == 3  # faint, running mean, and the short run
    assert drawn["Reward"] == 6
    assert drawn["Entropy"] == 2
    assert min(drawn.values()) >= 2
    assert view.evaluate("document.querySelector('.legendtext').textContent") == EVIL
    labels = view.evaluate(
        """[...document.querySelectorAll('.plot')].map(p => [
            p.querySelector('.xtitle').textContent, p.querySelector('.ytitle').textContent])"""
    )
    assert all(x == "step" and y for x, y in labels)
    view.point_at(".plot .nsewdrag")
    view.wait_for("document.querySelector('.plot .hoverlayer').textContent.length > 0")
    hover = view.evaluate("document.querySelector('.plot .hoverlayer').textContent")
    assert EVIL in hover
    assert view.errors == []


def test_the_first_figure_of_a_timed_run_in_the_browser(browser: Browser, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    write_lines(tmp_path / "rl" / "metrics.jsonl", [timed_rl_step(step, rng) for step in range(20)])
    write_report([tmp_path / "rl"], tmp_path / "page.html")
    view = browser.open(tmp_path / "page.html")
    assert view.errors == []
    first, second = view.evaluate(
        """[...document.querySelectorAll('figure')].slice(0, 2).map(f => [
            f.querySelector('figcaption').textContent, f.querySelectorAll('.trace').length,
            f.querySelectorAll('.bars .point').length])"""
    )
    assert first == ["Seconds of each part of a step", 3, 60]
    assert second[:2] == ["Tokens per second of the sampler", 1]
    tops = view.evaluate("[...document.querySelectorAll('figure')].slice(0, 2).map(f => f.offsetTop)")
    assert tops[0] == tops[1], "they stand beside each other"


def test_the_page_of_a_timed_run_begins_with_its_times(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    write_lines(tmp_path / "rl" / "metrics.jsonl", [timed_rl_step(step, rng) for step in range(6)])
    html = page_of(tmp_path / "rl")
    assert re.findall(r"<figcaption>(.*?)</figcaption>", html)[:3] == [
        "Seconds of each part of a step",
        "Tokens per second of the sampler",
        "Loss",
    ]
    assert ["time in sampling", "1 min 06 s"] in packs_of(html)
    assert "Where the time went" not in page_of(write_sft_run(tmp_path / "sft", 3))


def test_what_the_page_of_a_resumed_run_says(tmp_path: Path) -> None:
    html = page_of(write_rl_run(tmp_path / "first", 230))
    rows = packs_of(html)
    for row in (
        ["steps", "230 of 1,000"],
        ["state", "stopped: the loss or a gradient was not finite"],
        ["reward, first", "0.2"],
        ["reward, last", "0.429"],
        ["resumes", "1"],
        ["data rows skipped, dropped or truncated", "150"],
        ["checkpoints", "step-00000010"],
        ["torch", "2.13.0"],
        ["processes", "16"],
        ["2026-03-01 12:00:00 UTC", "first", "start", "10", "processes 16"],
        ["2026-03-01 12:00:00 UTC", "first", "resume", "10", "checkpoint step-00000010"],
        ["230", "2", "sample 7, 8", "nonfinite-step-00000230.jsonl"],
        ["samples", "128"],
    ):
        assert row in rows, row
    assert "<h1>Run first</h1>" in html
    assert "running means (5 steps" in html
    assert "show only the minimum" not in html
    assert "A dotted vertical line is a step at which the run was resumed." in html
    assert "A solid vertical line is a step whose loss or gradient was not finite." in html
    assert "150 skipped; the first 100 are shown, all are in rows.jsonl" in html
    assert html.count("skipped a.jsonl line ") == 100
    for step in (20, 30, 40):
        (tmp_path / "first" / "checkpoints" / f"step-{step:08d}").mkdir()
    assert ["checkpoints", "4, the newest step-00000020, step-00000030, step-00000040"] in packs_of(
        page_of(tmp_path / "first")
    )
    assert "Problems while reading" not in html
    assert "Settings that differ" not in html


def test_settings_that_differ(tmp_path: Path) -> None:
    folders = [
        write_sft_run(tmp_path / name, 3, optimizer={"lr": lr, "betas": [0.9, 0.95]}, **more)
        for name, lr, more in (("a", 1e-5, {}), ("b", 2e-5, {"lora": {"rank": 8}}))
    ]
    html = page_of(*folders)
    rows = packs_of(html[html.index("Settings that differ") :])
    assert rows == [["setting", "a", "b"], ["optimizer.lr", "1e-05", "2e-05"], ["lora.rank", "–", "8"]]
    assert "No events: the folders" in html
    assert "No versions: the folders" in html
    assert ["state", "not recorded", "not recorded"] in packs_of(html)


def test_states(tmp_path: Path) -> None:
    folder = write_sft_run(tmp_path / "a", 3)
    for kinds, state in (
        (["start"], "killed: it stopped without recording an end"),
        (["start", "something", "end"], "finished"),
        (["start", "stop"], "stopped by a signal"),
        (["start", "stop", "start", "resume"], "killed: it stopped without recording an end"),
        (["start", "nonfinite"], "stopped: the loss or a gradient was not finite"),
        (["something"], "not recorded"),
    ):
        write_lines(folder / "events.jsonl", [{"kind": kind, "step": 0} for kind in kinds])
        assert ["state", state] in packs_of(page_of(folder))


def test_a_finished_run_without_evaluation_has_nothing_that_could_not_be_read(tmp_path: Path) -> None:
    """A run creates evaluation.jsonl at its start, even if it never evaluates."""
    folder = write_sft_run(tmp_path / "a", 3)
    (folder / "evaluation.jsonl").touch()
    write_lines(folder / "events.jsonl", [{"kind": "start", "step": 0}, {"kind": "end", "step": 3}])
    html = page_of(folder)
    assert "Problems while reading" not in html
    assert ["state", "finished"] in packs_of(html)
    assert not [row for row in packs_of(html) if row[0] == "evaluations"]
    write_lines(folder / "evaluation.jsonl", [{"step": 0, "eval/loss": 2.0}, {"step": 3, "eval/loss": 1.5}])
    rows = packs_of(page_of(folder))
    assert ["evaluations", "2"] in rows
    assert ["eval/loss, last", "1.5"] in rows


def test_responses_are_on_the_page(browser: Browser, tmp_path: Path) -> None:
    folder = write_rl_run(tmp_path / "a", 20)
    responses = [
        {"batch": i // 4, "uid": f"row {i}", "prompt": f"What is {i}? {EVIL}", "response": f"#### {i}", "reward": i % 2}
        for i in range(40)
    ]
    write_lines(folder / "rollouts.jsonl", responses)
    write_lines(folder / "failures.jsonl", [{"batch": 3, "uid": "row 9", "episode": 1, "failure": f"raised {EVIL}"}])
    assert write_report([folder]) == []
    view = browser.open(folder / "report.html", width=1280)
    assert view.errors == []
    assert view.evaluate("document.documentElement.scrollWidth") == 1280
    assert view.evaluate("document.querySelectorAll('img').length") == 0
    assert view.evaluate("[...document.querySelectorAll('.records .count')].map(c => c.textContent)") == [
        "40 of 40",
        "1 of 1",
    ]
    first = view.evaluate("[...document.querySelector('.records tbody tr').children].map(c => c.textContent)")
    assert first == ["0", "0", f"What is 0? {EVIL}", "#### 0", "row 0"]


def test_many_long_responses_are_bounded_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("padfree.tools.report.build.MOST_LETTERS", 200_000)
    folder = write_sft_run(tmp_path / "a", 3)
    with (folder / "rollouts.jsonl").open("w") as file:
        for i in range(5000):
            line = {"batch": i // 4, "prompt": "p" * 900, "response": f"{i} {'r' * 900} end", "reward": 0.5}
            file.write(json.dumps(line) + "\n")
        file.write('{"batch": 12')
    (run,) = read_runs([folder])
    assert run.responses is not None
    assert {run.responses.rows[0]["batch"], run.responses.rows[-1]["batch"]} == {0, 1249}
    text = report_page([run]).html()
    shown = len(run.responses.rows)
    assert 390 <= shown <= 400
    assert f"Responses, {shown} of 5,001; the other {5000 - shown:,} are in rollouts.jsonl" in text
    assert "1 lines that are not JSON objects were skipped" in text
    records = text[text.index('<section class="records">') : text.index("</section>")]
    assert len(records) < 300_000
    assert "characters omitted" in records
    both = report_page(read_runs([folder, write_sft_run(tmp_path / "b", 3)])).html()
    assert f"Responses: a, {shown} of 5,001" in both


def test_odd_events_and_rows_are_shown_as_they_are(tmp_path: Path) -> None:
    folder = write_sft_run(tmp_path / "a", 3)
    write_lines(folder / "events.jsonl", [{}, {"time": 5, "kind": ["x"], "step": None, "more": {"a": None}}])
    write_lines(folder / "rows.jsonl", [{}, {"action": 3, "reason": "<b>"}])
    html = page_of(folder)
    assert ["5", "a", '["x"]', "–", 'more {"a": null}'] in packs_of(html)
    assert "3 – line –: &lt;b&gt;" in html


def test_many_events_are_cut_and_long_series_thinned(tmp_path: Path) -> None:
    folder = write_sft_run(tmp_path / "a", 2000)
    write_lines(folder / "events.jsonl", [{"time": f"{i:05d}", "kind": "resume", "step": i} for i in range(500)])
    html = report_page(read_runs([folder])).html()
    assert "The last 200 of 500 events" in html
    assert "running means (41 steps" in html
    assert "more than 1,000 values show only" in html
    (data,) = re.findall(r'id="figures">(.*?)</script>', html, re.DOTALL)
    figures = json.loads(data)["figures"]
    assert max(len(line["x"]) for figure in figures for line in figure["data"]) == 1000
    assert max(len(figure["layout"]["shapes"]) for figure in figures) == 100
    assert len(data) < 1_000_000


def test_a_run_without_steps_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "metrics.jsonl").touch()
    html = page_of(tmp_path / "new")
    assert "has not finished a step yet" in html
    assert ["steps", "0"] in packs_of(html)
    both = page_of(tmp_path / "new", write_sft_run(tmp_path / "a", 1))
    (last,) = [row for row in packs_of(both) if row[0] == "loss, last"]
    assert last[1] == "–"
    assert float(last[2]) == pytest.approx(2.5, abs=0.2)
    assert both.count("<figure") == 4


def test_a_run_of_constants_has_their_table(tmp_path: Path) -> None:
    write_lines(tmp_path / "a" / "metrics.jsonl", [{"step": step, "fill": 1.0} for step in range(3)])
    html = page_of(tmp_path / "a")
    assert ["fill", "1"] in packs_of(html)
    assert "not finished a step yet" not in html
    assert "<figure" not in html


def test_notes_are_on_the_page_and_returned(tmp_path: Path) -> None:
    folder = write_sft_run(tmp_path / "a", 3)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"st')
    notes = write_report([folder], tmp_path / "page.html")
    assert notes == ["a: metrics.jsonl: the last line is incomplete and was skipped"]
    assert "the last line is incomplete" in (tmp_path / "page.html").read_text()
