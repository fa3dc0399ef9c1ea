"""Benchmarks that need a GPU: they show their help without one, and stop with one line. Their checks run on a CPU."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCH = Path(__file__).parents[2] / "bench"
SCRIPTS = sorted(
    path.stem for path in BENCH.glob("*.py") if "cuda_device()" in path.read_text() and path.stem != "gpu_only"
)
CPU = torch.device("cpu")


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module(name)


def test_the_scripts_are_found() -> None:
    assert set(SCRIPTS) >= {"decode_experts", "float8", "sampler_bits", "split_weights"}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_without_a_gpu_stops_with_one_line(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = load(name, monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [f"bench/{name}.py", "--help"])
    with pytest.raises(SystemExit, match=r"^0$"):
        script.main()
    assert f"bench/{name}.py" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", [f"bench/{name}.py"])
    with pytest.raises(SystemExit, match=rf"^{name}\.py: torch .* finds no CUDA device.*$") as stopped:
        script.main()
    assert "\n" not in str(stopped.value)


def test_updates_of_split_weights_are_compared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = load("split_weights", monkeypatch)
    sizes = script.sizes_of(1, 24, 32, 16, 40, 70)
    assert script.all_patterns(CPU, 16256, 16258) == 2 << 16
    script.compare("small", sizes, 1, CPU)
    assert "all bits are equal" in capsys.readouterr().out
    split = script.split_weights

    def off_by_one_bit(parameters: list[torch.nn.Parameter]) -> None:
        split(parameters)
        parameters[0].data.view(-1)[5] += 2e-9

    monkeypatch.setattr(script, "split_weights", off_by_one_bit)
    with pytest.raises(AssertionError, match="other bits"):
        script.compare("small", sizes, 1, CPU)


def test_a_wrong_cast_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    script = load("float8", monkeypatch)
    script.check_casts((37, 96), CPU)
    x = script.spread(script.random(37, 96, device=CPU))
    q, scale, _ = torch.ops.padfree.float8_rows(x, False)
    with pytest.raises(AssertionError):
        script.assert_same_cast(q, scale * 2, q, scale)
    other = q.clone()
    other[3, 4] = -other[3, 4].float()
    with pytest.raises(AssertionError):
        script.assert_same_cast(other, scale, q, scale)


def test_rows_whose_bits_depend_on_other_rows_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    script = load("sampler_bits", monkeypatch)
    x = torch.arange(32.0)[:, None]
    monkeypatch.setattr(script, "FEWER_ROWS", (1, 8, 16))
    assert script.rows_that_differ(lambda rows: [x[:rows]], 32) == "rows that differ: []"
    assert script.rows_that_differ(lambda rows: [x[:rows] + (rows < 16)], 32) == "rows that differ: [1, 8]"
    assert script.unequal(x, x) == "equal"
    assert script.unequal(x + (x > 29), x) == "2 of 32 differ, by at most 1"
