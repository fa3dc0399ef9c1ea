"""A first signal asks, a second one ends the process."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time

import pytest

from padfree.distributed import distributed, make_mesh
from padfree.stop_signals import StopSignals
from padfree.train.signals import agreed
from tests.ranks import run_ranks


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_first_signal_is_noted_and_what_was_before_comes_back(number: signal.Signals) -> None:
    seen: list[int] = []
    before = signal.signal(number, lambda number, frame: seen.append(number))
    try:
        with StopSignals() as signals:
            assert not signals.received
            os.kill(os.getpid(), number)
            assert signals.received
            os.kill(os.getpid(), number)  # so soon after it, a launcher passes on the same request
        assert seen == []
        os.kill(os.getpid(), number)
        assert seen == [number]
    finally:
        signal.signal(number, before)


def test_the_second_one_is_noticed_where_no_handler_runs() -> None:
    """The thread sees them though the main thread is busy; other signals are not counted."""
    ended: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        with pytest.MonkeyPatch.context() as patch, StopSignals() as signals:
            patch.setattr("padfree.stop_signals.SAME_REQUEST_SECONDS", 0.05)
            patch.setattr(os, "_exit", ended.append)

            def send() -> None:
                for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM):
                    time.sleep(0.1)
                    os.kill(os.getpid(), number)
                time.sleep(0.1)
                noted.append((signals.received, list(ended)))

            noted: list[tuple[bool, list[int]]] = []
            thread = threading.Thread(target=send)
            thread.start()
            while not noted:
                hashlib.pbkdf2_hmac("sha256", b"", b"", 300_000)
            thread.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert noted == [(True, [128 + signal.SIGTERM])]


def test_blocks_leave_nothing_behind() -> None:
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(3):
        with StopSignals():
            pass
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert threading.active_count() == threads
    assert signal.set_wakeup_fd(-1) == -1


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
