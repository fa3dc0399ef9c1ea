"""Timing functions for all benchmarks, with the same clocks and warm-up. Times are in seconds.

    function              clock     one measurement                                    result
    median_seconds        host      one call, synchronised before and after            median
    median_event_seconds  device    consecutive calls between two events               median of each function, in turns
    median_on             device on a GPU, else host                                   median
    quickest              host      one call                                           minimum, and the call's result
    mean_in_a_row         host      consecutive calls, synchronised at the end         mean
    median_of_turns       host      consecutive calls for some seconds, in turns       median of each function
    launch_seconds        host      calls without synchronisation                      mean
    Stopwatch             host      one or more `with` blocks                          sum
    DeviceSpan            device    a `with` block                                     its time

Warm-up calls come first. They are not counted, and their warnings are hidden.
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
"""The number of calls between two readings of the clock."""


def synchronize(device: torch.device | None) -> None:
    """Synchronise with a GPU. Calls on other devices are synchronous."""
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
    """Return the median seconds of a synchronised call. `before` runs before each call and is not timed."""

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
    """Return the median seconds of each function on a GPU, measured in turns.

    `before` runs before each measurement. `sleep_cycles` keeps the device busy, so that the host runs ahead and launch
    time is not measured. With `wait`, the device is synchronised before each measurement.
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
    """Return the median seconds of a call, from events on a GPU and from the host's clock elsewhere."""
    if device.type == "cuda":
        return median_event_seconds(call, repeats=repeats, warmup=warmup)[0]
    return median_seconds(call, device, repeats=repeats, warmup=warmup)


def quickest(call: Callable[[], T], repeats: int = 1) -> tuple[float, T]:
    """Return the minimum seconds of a call, and its last result. There is no warm-up."""
    best = math.inf
    for _ in range(repeats):
        with Stopwatch() as watch:
            result = call()
        best = min(best, watch.seconds)
    return best, result


def mean_in_a_row(call: Call, repeats: int, *, rest: float = 0.0) -> float:
    """Return the mean seconds of consecutive calls on a GPU, after `rest` idle seconds."""
    torch.cuda.synchronize()
    time.sleep(rest)
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / repeats


def median_of_turns(ways: Mapping[str, Call], *, turns: int, seconds: float) -> dict[str, float]:
    """Return the median seconds of each function on a hot GPU. A turn is as many calls as fit in `seconds`."""

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
    """Return the seconds that the host needs to launch a call on a GPU."""
    warm_up(call, 1)
    torch.cuda.synchronize()
    with Stopwatch() as watch:
        for _ in range(repeats):
            call()
    torch.cuda.synchronize()
    return watch.seconds / repeats


class Stopwatch:
    """Measures the seconds spent in its `with` blocks. If a device is given, it is synchronised at both ends."""

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
    """Measures the GPU time of a `with` block. Read `seconds` after synchronising."""

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
