"""A first signal asks, a second one is what it would have been."""

from __future__ import annotations

import os
import signal
import threading

import pytest
from distributed import run_ranks

from padfree.dist import distributed, make_mesh
from padfree.train.signals import StopSignals, agreed


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_second_signal_goes_through(number: signal.Signals) -> None:
    seen: list[int] = []
    before = signal.signal(number, lambda number, frame: seen.append(number))
    try:
        with StopSignals() as signals:
            assert not signals.received
            os.kill(os.getpid(), number)
            assert signals.received
            assert seen == []
            os.kill(os.getpid(), number)
            assert seen == [number]
        with StopSignals() as signals:
            pass
        os.kill(os.getpid(), number)
        assert seen == [number, number]
        assert not signals.received
    finally:
        signal.signal(number, before)


def test_threads_leave_signals_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    received: list[bool] = []

    def work() -> None:
        with StopSignals() as signals:
            received.append(signals.received)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert received == [False]
    assert signal.getsignal(signal.SIGTERM) is before


def one_of_two(rank: int, world: int) -> list[bool]:
    mesh = make_mesh("cpu")
    return [agreed(rank == 1, mesh), agreed(False, mesh)]


def test_one_rank_is_enough() -> None:
    assert run_ranks(2, one_of_two) == [[True, False], [True, False]]
    with distributed(device="cpu") as device:
        mesh = make_mesh(device)
        assert agreed(True, mesh)
        assert not agreed(False, mesh)
