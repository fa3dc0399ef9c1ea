"""`bench/vision.py` with a tiny model: it compares the losses of all ways before it reports their times."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "bench"


@pytest.mark.slow
def test_losses_agree_and_work_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    vision = importlib.import_module("vision")
    found = vision.main(["--shape", "tiny", "--repeats", "1"])
    assert 0 < found["image tokens"] < found["tokens"]
    assert found["ratios"]["ratio of its work"] > 2
    rows = {**found["ways"], "padfree": {**found["ways"]["padfree"], "loss": 2.0}}
    with pytest.raises(AssertionError, match="differs"):
        vision.check_losses(rows)
