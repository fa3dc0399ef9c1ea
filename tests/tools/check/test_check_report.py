"""Results pass by tolerance or by noise, and the verdict names the failures."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from padfree.tools.check import CheckReport, CheckResult, Skipped

ROW = CheckResult(check="packed", quantity="loss", difference=1e-6, noise=1e-7, tolerance=1e-5)
REPORT = CheckReport(
    model="Qwen3ForCausalLM",
    num_layers=4,
    total_layers=36,
    random_weights=False,
    dtype="float32",
    device="cpu",
    backend="auto",
    data_ranks=1,
    context_ranks=2,
    samples="of train.jsonl",
    lengths=(3, 9),
    num_labels=7,
    reference="transformers",
    noise="pairs",
    rows=(ROW,),
    skipped=(Skipped(check="balanced ring", reason="no"),),
)


@pytest.mark.parametrize(
    ("difference", "noise", "tolerance", "passed"),
    [
        (1e-6, 0.0, 1e-5, True),
        (3e-5, 1e-5, 1e-5, True),  # four times the noise
        (5e-5, 1e-5, 1e-5, False),
        (0.0, None, 0.0, True),
        (1e-30, None, 0.0, False),
        (math.inf, 1.0, 1.0, False),
        (1e-6, math.inf, 1e-5, True),
        (1.0, math.inf, 1e-5, False),  # non-finite noise is ignored
    ],
)
def test_what_passes(difference: float, noise: float | None, tolerance: float, passed: bool) -> None:
    row = replace(ROW, difference=difference, noise=noise, tolerance=tolerance)
    assert row.passed == passed
    assert (row.excess <= 1) == passed


def test_the_verdict_names_what_failed() -> None:
    assert REPORT.passed
    assert REPORT.verdict.startswith("passed: ")
    wrong = replace(ROW, difference=1.0)
    report = replace(
        REPORT,
        rows=(
            wrong,
            replace(wrong, quantity="gradients", part="layer 0"),
            replace(wrong, quantity="gradients", part="layer 1"),
            replace(wrong, check="pad"),
            replace(ROW, check="leak"),
        ),
    )
    assert not report.passed
    assert report.verdict == "FAILED: loss, gradients; pad (loss)"
    assert replace(report, remark="hm").verdict.endswith(" (hm)")


def test_a_variation_is_one_line_unless_it_fails() -> None:
    rows = [replace(ROW, check="pad", quantity=name, difference=d) for name, d in (("loss", 1e-6), ("gradients", 2e-6))]
    assert [row.title for row in replace(REPORT, rows=(ROW, *rows)).shown_rows()] == ["loss", "pad: gradients"]
    rows = [replace(row, difference=1.0) for row in rows]
    shown = replace(REPORT, rows=(ROW, *rows)).cells()
    assert [(cells[0], cells[4]) for cells in shown] == [
        ("loss", "ok"),
        ("pad: loss", "FAILED"),
        ("pad: gradients", "FAILED"),
    ]


def test_it_is_told_in_json_and_in_words() -> None:
    told = json.loads(json.dumps(replace(REPORT, rows=(replace(ROW, difference=math.inf),)).to_dict(), allow_nan=False))
    assert (told["passed"], told["rows"][0]["difference"], told["rows"][0]["passed"]) == (False, None, False)
    assert told["skipped"] == [{"check": "balanced ring", "reason": "no"}]
    heading = "\n".join(REPORT.heading())
    for words in (
        "the first 4 of its 36 layers",
        "2 of train.jsonl, 3 to 9 tokens, 12 tokens in all, 7 trained",
        "2 context",
    ):
        assert words in heading
