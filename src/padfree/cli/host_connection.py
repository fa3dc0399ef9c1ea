"""The connections of `padfree launch` to its hosts over ssh.

The threads of all connections and the signal handlers add events to one queue, from which the main thread reads.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import IO, Any

from padfree.cli.on_host import ANSWER
from padfree.errors import UserError

SIGNAL_CHECK_SECONDS = 0.5
"""Seconds between two checks for signals while the launcher waits for hosts."""

NOT_FOUND, CONNECTION = (126, 127), 255
"""`NOT_FOUND`: exit codes of a host's shell if it cannot run the given program. `CONNECTION`: exit code of ssh if it
cannot connect."""


@dataclass(frozen=True, slots=True)
class Answered:
    host: str
    answer: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Ended:
    host: str
    code: int


@dataclass(frozen=True, slots=True)
class Signalled:
    number: int


Event = Answered | Ended | Signalled
Events = SimpleQueue[Event]


def next_event(events: Events, *, deadline: float = float("inf")) -> Event:
    """Wait for the next event (from a host or a signal) and return it. Raise `Empty` after `deadline`, a time of
    `time.monotonic`.
    """
    while True:
        left = deadline - time.monotonic()
        # Wake up regularly: a signal to another thread does not wake the main thread, which runs the signal handlers.
        try:
            return events.get(timeout=max(min(left, SIGNAL_CHECK_SECONDS), 0.0))
        except Empty:
            if left <= SIGNAL_CHECK_SECONDS:
                raise


class HostConnection:
    """The ssh connection to one host.

    The threads of a connection print the output of the host. They add an event to the queue `events` when the host
    answers and when the connection ends.
    """

    def __init__(self, host: str, ssh: Sequence[str], remote_command: str, events: Events) -> None:
        self.host, self._events = host, events
        self.printed: list[str] = []  # lines that the host printed before its answer
        self._answered = False
        try:
            # Start ssh in a new session. Otherwise Ctrl-C would end ssh before the host is told to stop.
            self.process = subprocess.Popen(
                [*ssh, host, remote_command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        except OSError as error:
            raise UserError(
                "--ssh",
                f"{ssh[0]} cannot be run ({error.strerror})",
                "install the OpenSSH client, or give its path",
            ) from None
        self._errors = threading.Thread(target=self._read, args=(self.process.stderr, sys.stderr), daemon=True)
        self._errors.start()
        self._output = threading.Thread(target=self._read_all, daemon=True)
        self._output.start()

    def tell(self, line: str) -> None:
        """Send a line to the host. Errors are ignored, because a lost connection causes an `Ended` event."""
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()

    def close(self) -> None:
        """End the connection, which stops the run on the host."""
        self.process.kill()
        self._output.join()  # the output thread ends only after the thread of stderr and ssh have ended
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()

    def _read_all(self) -> None:
        self._read(self.process.stdout, sys.stdout)
        self._errors.join()
        self._events.put(Ended(self.host, self.process.wait()))

    def _read(self, lines: IO[str] | None, shown: IO[str]) -> None:
        for line in lines or ():
            if self._answered:
                self._show(line, shown)
            elif line.startswith(ANSWER):
                self._answered = True
                self._events.put(Answered(self.host, json.loads(line.removeprefix(ANSWER))))
            else:
                self.printed.append(line.strip())

    def _show(self, line: str, shown: IO[str]) -> None:
        try:
            shown.write(f"{self.host}: {line.rstrip()}\n")  # one write call, because other threads print too
            shown.flush()
        except BrokenPipeError:  # the program that reads the pipe has ended
            self._events.put(Signalled(signal.SIGPIPE))

    def refusal(self, code: int, python: str) -> UserError:
        """Return the error to raise for an ssh connection that ended before the host answered.

        `code`: the exit code of ssh. `python`: the Python program that was started on the host.
        """
        last = next((line for line in reversed(self.printed) if line), f"exit code {code}")
        if code == CONNECTION:
            return UserError(
                "--hosts", f"{self.host} cannot be reached ({last})", f"make ssh {self.host} work without a password"
            )
        if code in NOT_FOUND:
            return UserError(
                "--python",
                f"{python} cannot be run on {self.host} ({last})",
                "install Python on the host, or give the path of a Python there",
            )
        if "No module named" in last:
            return UserError(
                "--hosts",
                f"padfree is missing on {self.host}, or has another version there ({last})",
                "install the same version on all hosts",
            )
        return UserError(
            "--hosts",
            f"padfree on {self.host} ended before it answered ({last})",
            f"log in with ssh {self.host} and run padfree there to see the error",
        )


@contextmanager
def signals_as_events(events: Events) -> Iterator[None]:
    before = {
        number: signal.signal(number, lambda number, _: events.put(Signalled(number)))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
