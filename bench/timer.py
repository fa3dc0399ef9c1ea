"""How the benchmarks take the time: the same clocks and the same warm-up for all. Times are in seconds.

    function              clock     one time is                                        result
    median_seconds        host's    one call, the device waited for before and after   median
    median_event_seconds  device's  calls in a row between two events                  median of each, in turns
    median_on             whichever of these two the device has                        median
    quickest              host's    one call                                           the least, and what it returned
    mean_in_a_row         host's    calls that nobody waits for but at the end         mean
    median_of_turns       host's    the same for a while, one way after the other      median of each
    launch_seconds        host's    calls whose work on the device is not waited for   mean
    Stopwatch             host's    a `with` block, or several, summed                 sum
    DeviceSpan            device's  what lies between two marks                        that

Calls to warm up come first. They are not counted, and what they warn about is not shown.
"""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, TypeVar

import torch

T = TypeVar("T")
Call = Callable[[], object]

CALLS_BETWEEN_LOOKS = 10
"""At the clock, where calls fill a given time."""


def synchronize(device: torch.device | None) -> None:
    """Wait for a GPU; other devices are done when a call returns."""
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize()


def warm_up(call: Call, times: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(times):
            call()


def median_seconds(
    call: Call, device: torch.device, *, repeats: int, warmup: int = 2, before: Call | None = None
) -> float:
    """`before` is called before each, and not timed."""

    def once() -> float:
        if before is not None:
            before()
        with Stopwatch(device) as watch:
            call()
        return watch.seconds

    warm_up(once, warmup)
    return statistics.median(once() for _ in range(repeats))


def median_event_seconds(
    *functions: Call,
    repeats: int,
    calls: int = 1,
    warmup: int = 2,
    before: Call | None = None,
    sleep_cycles: int = 0,
    wait: bool = True,
) -> list[float]:
    """Of each function on a GPU, in turns: what drifts drifts for all.

    `before` is called before each time. `sleep_cycles` keep the device busy before it, so that the host is ahead as in
    training and its own time is not in it. With `wait` the device is idle before that; without, nobody waits before all
    are launched.
    """
    for function in functions:
        warm_up(function, warmup)
    spans: list[list[DeviceSpan]] = [[] for _ in functions]
    for _ in range(repeats):
        for function, taken in zip(functions, spans, strict=True):
            if wait:
                torch.cuda.synchronize()
            if before is not None:
                before()
            if sleep_cycles:
                torch.cuda._sleep(sleep_cycles)  # type: ignore[no-untyped-call]
            with DeviceSpan() as span:
                for _ in range(calls):
                    function()
            taken.append(span)
    torch.cuda.synchronize()
    return [statistics.median(span.seconds() / calls for span in taken) for taken in spans]


def median_on(call: Call, device: torch.device, *, repeats: int, warmup: int = 2) -> float:
    """By events on a GPU, elsewhere by the host's clock."""
    if device.type == "cuda":
        return median_event_seconds(call, repeats=repeats, warmup=warmup)[0]
    return median_seconds(call, device, repeats=repeats, warmup=warmup)


def quickest(call: Callable[[], T], repeats: int = 1) -> tuple[float, T]:
    """The least seconds, and the last result. Without a warm-up: the first call is seldom the quickest."""
    best = math.inf
    for _ in range(repeats):
        with Stopwatch() as watch:
            result = call()
        best = min(best, watch.seconds)
    return best, result


def mean_in_a_row(call: Call, repeats: int, *, rest: float = 0.0) -> float:
    """On a GPU, which rests before: one that computes for seconds lowers its clock."""
    torch.cuda.synchronize()
    time.sleep(rest)
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / repeats


def median_of_turns(ways: Mapping[str, Call], *, turns: int, seconds: float) -> dict[str, float]:
    """Of each way on a GPU that is kept busy: a turn is as many calls as so many seconds hold."""

    def turn(call: Call) -> float:
        torch.cuda.synchronize()
        begin, count = time.perf_counter(), 0
        while time.perf_counter() - begin < seconds:
            for _ in range(CALLS_BETWEEN_LOOKS):
                call()
            torch.cuda.synchronize()
            count += CALLS_BETWEEN_LOOKS
        return (time.perf_counter() - begin) / count

    for call in ways.values():
        warm_up(call, 1)
    found = [{name: turn(call) for name, call in ways.items()} for _ in range(turns)]
    return {name: statistics.median(times[name] for times in found) for name in ways}


def launch_seconds(call: Call, repeats: int = 20) -> float:
    """What the host takes to launch a call on a GPU."""
    warm_up(call, 1)
    torch.cuda.synchronize()
    with Stopwatch() as watch:
        for _ in range(repeats):
            call()
    torch.cuda.synchronize()
    return watch.seconds / repeats


class Stopwatch:
    """Seconds of its `with` blocks; given a device, its work is waited for at both ends."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.seconds = 0.0
        self._device, self._begin = device, 0.0

    def __enter__(self) -> Stopwatch:
        synchronize(self._device)
        self._begin = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        synchronize(self._device)
        self.seconds += time.perf_counter() - self._begin


class DeviceSpan:
    """What a GPU does between the two ends of a `with` block; read `seconds` once it has done it."""

    def __init__(self) -> None:
        event: Any = torch.cuda.Event
        self._begin, self._end = event(enable_timing=True), event(enable_timing=True)

    def __enter__(self) -> DeviceSpan:
        self._begin.record()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.record()

    def seconds(self) -> float:
        return float(self._begin.elapsed_time(self._end)) / 1e3
