"""`bench/gateway_load.py` with fewer requests: an attack on the gateway for agents does not change a run."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "bench"


@pytest.mark.slow
def test_a_run_under_attack_trains_as_in_peace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PADFREE_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(FOLDER))
    load = importlib.import_module("gateway_load")
    found = load.main(["--steps=8", "--idle=300", "--slow=10", "--malformed=1000"])
    peace, attacked, attack = found["peace"], found["attacked"], found["attack"]
    assert peace["steps"] == attacked["steps"] == 8
    assert attacked["trained"] == peace["trained"], "bit for bit"
    assert attacked["memory"] < peace["memory"] + (200 << 20)
    assert attack["sent"] > 100
    assert not {"500", "200", "hangs"} & set(attack["outcomes"])
