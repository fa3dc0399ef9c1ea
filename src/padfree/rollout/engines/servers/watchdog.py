"""A watchdog: a process that stops a server when the run that started the server ends.

    run ──pipe──▶ watchdog ──▶ server and its workers

If the run ends, even by kill -9, the pipe closes. The watchdog then sends SIGTERM to the process group of the server,
and SIGKILL after GRACE seconds. If the server ends, the watchdog exits with the server's status.

This file runs as a script: `python watchdog.py COMMAND ...`. It imports only the standard library, so that it starts in
milliseconds.
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
"""`GRACE`: seconds between SIGTERM and SIGKILL. `POLL`: seconds between two checks."""
_PR_SET_PDEATHSIG = 1


def main(command: list[str]) -> int:
    parent = os.getppid()
    os.setsid()  # Ctrl-C in a terminal then reaches only the run, which finishes its step
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # runs `finally` below
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
    """Make the Linux kernel send SIGTERM to this process if its parent is killed.

    The function runs in the process that becomes the server; the parent is the watchdog.
    """
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _end(server: subprocess.Popen[bytes]) -> None:
    """End all processes of the server's session, because workers may outlive their parent."""
    deadline = time.monotonic() + GRACE
    with suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGTERM)
        while time.monotonic() < deadline:
            server.poll()  # reap the child: a zombie still counts as a member of the process group
            os.killpg(server.pid, 0)
            time.sleep(POLL)
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
