"""`bench/ppo.py`: two runs from one model, and their curves on a page."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "bench"


def test_both_curves_are_on_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PADFREE_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(FOLDER))
    ppo = importlib.import_module("ppo")
    few = ["--steps", "2", "--sft-steps", "2", "--responses", "16"]
    found = ppo.main(["--folder", str(tmp_path / "runs"), *few])
    assert {name: len(lines) for name, lines in found.items()} == {"grpo": 2, "ppo": 2}
    assert all(line["critic/loss"] >= 0 and line["reward"] >= 0 for line in found["ppo"])
    page = (tmp_path / "runs" / "ppo.html").read_text()
    assert "Critic loss" in page
    assert page.count("Reward") > 0
    drawn = (tmp_path / "runs" / "ppo.svg").read_text()
    assert drawn.count("<polyline") == 3, "the rewards of both, and the value loss"
    assert "value loss" in capsys.readouterr().out
