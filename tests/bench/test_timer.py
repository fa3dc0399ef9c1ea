"""The timing functions of the benchmarks: what they time, and that warm-up calls are neither counted nor shown."""

from __future__ import annotations

import importlib
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCH = Path(__file__).parents[2] / "bench"
CPU = torch.device("cpu")


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("timer")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A fake clock: time passes only if a call says so."""
    now = 100.0

    def work(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    return work


def calls(work: Callable[[float], None], durations: list[float]) -> tuple[Callable[[], None], list[float]]:
    """A call that takes the next of these durations, and the remaining durations."""
    left = list(durations)
    return lambda: work(left.pop(0)), left


def test_the_median_is_of_the_calls_after_the_warm_up(timer: ModuleType, clock: Callable[[float], None]) -> None:
    call, left = calls(clock, [50.0, 40.0, 3.0, 1.0, 2.0])
    assert timer.median_seconds(call, CPU, repeats=3) == 2.0
    assert left == []
    call, _ = calls(clock, [50.0, 3.0, 1.0, 2.0, 8.0])
    assert timer.median_on(call, CPU, repeats=4, warmup=1) == 2.5


def test_what_comes_before_a_call_is_not_timed(timer: ModuleType, clock: Callable[[float], None]) -> None:
    order: list[str] = []

    def before() -> None:
        order.append("before")
        clock(1000.0)

    def call() -> None:
        order.append("call")
        clock(2.0)

    assert timer.median_seconds(call, CPU, repeats=2, warmup=1, before=before) == 2.0
    assert order == ["before", "call"] * 3


def test_warming_up_is_quiet(timer: ModuleType) -> None:
    def call() -> None:
        warnings.warn("compiled", stacklevel=1)

    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        timer.warm_up(call, 3)
        assert heard == []
        timer.median_seconds(call, CPU, repeats=2)
        assert len(heard) == 2


def test_the_quickest_counts_from_the_first_call(timer: ModuleType, clock: Callable[[float], None]) -> None:
    durations: Iterator[float] = iter([1.0, 3.0, 2.0])

    def call() -> float:
        seconds = next(durations)
        clock(seconds)
        return seconds

    assert timer.quickest(call, 3) == (1.0, 2.0)


def test_a_stopwatch_sums_its_blocks(timer: ModuleType, clock: Callable[[float], None]) -> None:
    watch = timer.Stopwatch(CPU)
    for seconds in (1.5, 2.0):
        with watch:
            clock(seconds)
        clock(10.0)
    assert watch.seconds == 3.5


def test_no_benchmark_has_a_clock_of_its_own() -> None:
    own = [
        f"{path.name}:{number}"
        for path in BENCH.glob("*.py")
        if path.name != "timer.py"
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if "statistics.median" in line or "cuda.Event" in line or ("perf_counter" in line and "deadline" not in line)
    ]
    assert own == []


def test_the_readme_has_a_row_for_every_benchmark() -> None:
    text = (BENCH / "README.md").read_text()
    modules = {"timer.py", "updates.py", "step_ways.py", "side_by_side.py", "gpu_only.py"}  # not run by themselves
    for path in BENCH.glob("*.py"):
        assert (f"| `{path.name}`" in text) == (path.name not in modules), path.name


@pytest.mark.gpu
def test_events_measure_the_device_and_not_the_host(timer: ModuleType) -> None:
    def busy(cycles: int) -> Callable[[], None]:
        return lambda: torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]

    short, long = busy(2_000_000), busy(20_000_000)  # about 1 and 10 ms
    for options in ({}, {"wait": False}, {"calls": 3}, {"sleep_cycles": 1_000_000}):
        first, second = timer.median_event_seconds(short, long, repeats=3, **options)
        assert second / first > 2, options  # 10 on an idle device
    device = torch.device("cuda")
    least = 0.7 * min(timer.median_event_seconds(long, repeats=3)[0], second)
    assert timer.median_on(long, device, repeats=3) > least
    assert timer.median_seconds(long, device, repeats=3) > least  # not the time of the launch
    in_a_row = timer.mean_in_a_row(long, 3)
    assert in_a_row > least
    assert timer.launch_seconds(long, 3) < in_a_row
    ways = timer.median_of_turns({"short": short, "long": long}, turns=1, seconds=0.05)
    assert ways["long"] / ways["short"] > 2
