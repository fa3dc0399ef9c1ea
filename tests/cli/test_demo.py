"""`padfree demo` at a small size: what it shows is computed, and its gradients agree."""

from __future__ import annotations

import re

import numpy as np
import pytest

from padfree.cli import demo
from padfree.cli.main import main


def test_the_demo_runs_and_its_gradients_agree(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "GRADIENT_SAMPLES", 3)
    assert main(["demo", "--samples", "60", "--max-tokens", "512", "--ranks", "2"]) == 0
    shown = capsys.readouterr().out
    losses = re.findall(r"^(?:one at a time|padded|packed) +[\d.]+ +(\d+\.\d+) +\S+$", shown, re.MULTILINE)
    assert len(losses) == 3
    assert len({round(float(loss), 4) for loss in losses}) == 1


def test_padded_tokens_are_those_of_the_longest_of_each_batch() -> None:
    assert demo.padded_tokens(np.array([5, 3, 7, 1, 2]), 2) == 2 * 5 + 2 * 7 + 2
