"""A first signal asks, a second one ends the process; warnings of a scheduler only ask."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from padfree import stop_signals
from padfree.stop_signals import REQUESTS, WARNINGS, StopRequested, StopSignals
from tests.waiting import wait_until

THEN = "saves and ends"


class Listening(StopSignals):
    """With the lines that it says."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        super().__init__(self.lines.append)


@pytest.fixture(autouse=True)
def ended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Exit codes, in the place of exits."""
    codes: list[int] = []
    monkeypatch.setattr(stop_signals, "_exit", codes.append)
    monkeypatch.setattr(stop_signals, "SAME_REQUEST_SECONDS", 0.2)
    return codes


@pytest.fixture(autouse=True)
def _heard() -> Iterator[None]:
    """Under `nohup` SIGHUP is ignored, and would stay so."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def signalled(number: int) -> None:
    """The handler runs before this returns, or soon after."""
    os.kill(os.getpid(), number)
    time.sleep(10)


@pytest.mark.parametrize("number", [*REQUESTS, *WARNINGS])
def test_a_signal_in_a_deferred_block_is_noted_and_said(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with Listening() as signals:
        with signals.deferred(THEN):
            assert not signals.received
            os.kill(os.getpid(), number)
            assert signals.number == number
            wait_until(lambda: bool(signals.lines))
            os.kill(os.getpid(), number)  # so soon after it, a launcher passes on the same request
        assert signals.lines[0].startswith(f"{number.name}: the run saves and ends; a second signal ends it at once")
    assert signal.getsignal(number) is before


def test_a_signal_with_another_meaning_neither_asks_nor_ends(ended: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_signals, "SAME_REQUEST_SECONDS", -1.0)  # each is a request of its own
    heard: list[int] = []
    with Listening() as signals:
        own = signal.getsignal(signal.SIGINT)
        with signals.lent(signal.SIGINT, lambda number, _: heard.append(number)), signals.deferred(THEN):
            for number in (signal.SIGINT, signal.SIGINT, signal.SIGTERM):
                os.kill(os.getpid(), number)
            wait_until(lambda: bool(signals.lines))
        assert signal.getsignal(signal.SIGINT) == own
    assert heard == [signal.SIGINT] * 2
    assert signals.number == signal.SIGTERM
    assert [line.partition(":")[0] for line in signals.lines] == ["SIGTERM"]
    assert ended == []


@pytest.mark.parametrize("number", [*REQUESTS, *WARNINGS])
def test_a_signal_before_there_is_anything_to_save_ends_the_block(number: signal.Signals) -> None:
    with Listening() as signals:
        with pytest.raises(StopRequested) as stop:
            signalled(number)
        wait_until(lambda: bool(signals.lines))
    assert stop.value.number == number
    assert signals.lines == [f"{number.name}: stopping; there is nothing to save yet"]


def test_an_exception_that_an_import_swallows_comes_again(ended: list[int]) -> None:
    with Listening() as signals:
        with suppress(BaseException):  # as some packages do while they are imported
            signalled(signal.SIGINT)
        with pytest.raises(StopRequested), signals.deferred(THEN):
            raise AssertionError("it must not begin")
    assert ended == []


def test_a_process_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch, ended: list[int]) -> None:
    monkeypatch.setattr(stop_signals, "PATIENCE", 0.2)
    with Listening():
        with pytest.raises(StopRequested):
            signalled(signal.SIGTERM)
        wait_until(lambda: ended == [128 + signal.SIGTERM])


def sent(numbers: list[signal.Signals], ended: list[int]) -> tuple[list[int], list[str]]:
    """Signals to a main thread that runs no handlers, apart from each other: exit codes, and what was said."""
    with Listening() as signals, signals.deferred(THEN):
        done = threading.Event()

        def send() -> None:
            for number in numbers:
                time.sleep(0.4)
                os.kill(os.getpid(), number)
            time.sleep(0.2)
            done.set()

        thread = threading.Thread(target=send)
        thread.start()
        while not done.is_set():
            hashlib.pbkdf2_hmac("sha256", b"", b"", 300_000)
        thread.join()
        return list(ended), [line.partition(":")[0] for line in signals.lines]


@pytest.mark.parametrize(
    ("names", "codes"),
    [
        ("SIGTERM SIGTERM", [143]),
        ("SIGINT SIGTERM", [143]),
        ("SIGHUP SIGINT", [130]),
        ("SIGTERM SIGHUP", [129]),
        ("SIGUSR1 SIGTERM", []),  # the warning of a scheduler, then its limit: the checkpoint is still being written
        ("SIGUSR1 SIGTERM SIGTERM", [143]),
        ("SIGXCPU SIGXCPU SIGXCPU", []),  # which comes every second
        ("SIGUSR2 SIGUSR1", []),
    ],
)
def test_the_second_request_ends_the_process(names: str, codes: list[int], ended: list[int]) -> None:
    found, said = sent([signal.Signals[name] for name in names.split()], ended)
    assert found == codes
    assert said[0] == names.split()[0], "said though the main thread is busy"


@pytest.mark.parametrize("number", [*REQUESTS, *WARNINGS])
def test_what_is_ignored_stays_ignored(number: signal.Signals) -> None:
    """`nohup`, and background jobs of a shell script."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with Listening() as signals:
            os.kill(os.getpid(), number)
            time.sleep(0.1)
            assert not signals.received
            assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_handlers_of_others_stay() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    try:
        with Listening() as signals:
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.1)
            assert not signals.received
        assert seen == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_forked_process_does_not_answer_for_its_parent() -> None:
    """A pool ends its workers with SIGTERM."""
    with Listening() as signals:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(write, b"x")
            time.sleep(60)
            os._exit(0)
        os.read(read, 1)
        os.close(read)
        os.close(write)
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        time.sleep(0.1)
        assert not signals.received
        assert signals.lines == []


def test_blocks_leave_nothing_behind_and_may_be_nested() -> None:
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(3):
        with Listening() as outer, Listening() as inner:
            with inner.deferred(THEN):
                os.kill(os.getpid(), signal.SIGTERM)
            assert inner.received
            assert not outer.received
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert threading.active_count() == threads
    assert signal.set_wakeup_fd(-1) == -1


def test_threads_leave_signals_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    received: list[bool] = []

    def work() -> None:
        with StopSignals() as signals:
            received.append(signals.received)

    in_thread(work)
    assert received == [False]
    assert signal.getsignal(signal.SIGTERM) is before


def in_thread(function: Callable[[], None]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()
