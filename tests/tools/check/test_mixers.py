"""`padfree check` on models with recurrent layers, and on one whose state leaks across samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from torch import Tensor

from padfree.model.mixers import forward
from padfree.model.mixers.by_segment import by_segment
from padfree.tools.check import check_model
from tests.tools.check import cases


@pytest.mark.parametrize("name", ["qwen3_5", "jamba", "lfm2"])
def test_a_model_with_mixers_passes(name: str, tmp_path: Path) -> None:
    report = check_model(cases.save_model(tmp_path, name), cases.make_samples(), device="cpu")
    assert report.passed, report.verdict
    assert [skipped.check for skipped in report.skipped] == ["shared prefixes"], "a state does not fork"
    assert max(row.difference for row in report.rows) < 1e-4


def test_a_state_that_crosses_samples_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = cases.save_model(tmp_path, "qwen3_5")
    check_model(folder, 2, device="cpu")  # caches a verdict of the probe without a leak

    def one_segment(call: Callable[[list[Tensor]], Tensor], values: Sequence[Tensor], lengths: Sequence[int]) -> Tensor:
        return by_segment(call, values, [sum(lengths)])

    monkeypatch.setattr(forward, "by_segment", one_segment)
    report = check_model(folder, cases.make_samples(), device="cpu")
    assert not report.passed
    assert any("leak" in row.check for row in report.rows if row.difference > row.limit)
