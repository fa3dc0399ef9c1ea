"""A process between a run and a server that it has started: the server does not outlive the run.

    run ──pipe──▶ watchdog ──▶ server and its workers, in a session of their own
    the run ends, even by kill -9: the pipe closes,
    and the watchdog has another parent             ->  SIGTERM to the session, after GRACE seconds SIGKILL
    the server ends                                 ->  the watchdog ends with its exit status

    python watchdog.py COMMAND ...        standard input is the pipe; standard output and error are the server's

Run as a file, and with the standard library alone, so that it starts in milliseconds. The session is the watchdog's
own: an interrupt from a terminal, which the run answers by finishing its step, does not reach the server.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress

GRACE = 10.0
POLL = 0.2
"""Seconds."""
_PR_SET_PDEATHSIG = 1


def main(command: list[str]) -> int:
    parent = os.getppid()
    os.setsid()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # through `finally` below
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_die_with_watchdog)
    try:
        while server.poll() is None and os.getppid() == parent:
            readable, _, _ = select.select([sys.stdin], [], [], POLL)
            if readable and not os.read(sys.stdin.fileno(), 1024):
                return 0
        return server.returncode or 0
    finally:
        _end(server)


def _die_with_watchdog() -> None:
    """Where the system can do that (Linux): a watchdog that is killed takes its server along."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _end(server: subprocess.Popen[bytes]) -> None:
    """All processes of the server's session: workers may be alive when their parent is not."""
    deadline = time.monotonic() + GRACE
    with suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGTERM)
        while time.monotonic() < deadline:
            server.poll()  # a child that nobody has waited for still counts as one of the group
            os.killpg(server.pid, 0)
            time.sleep(POLL)
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
