"""No server outlives the run that started it, no matter how the run ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from padfree.rollout.engines.servers.server_processes import WATCHDOG
from tests.waiting import wait_until

SERVER = """
import os, signal, subprocess, sys, time
if sys.argv[2] == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
beside = sys.argv[1] + ".writing"
open(beside, "w").write(f"{os.getpid()} {worker.pid}")
os.replace(beside, sys.argv[1])
time.sleep(600)
"""
RUN = """
import subprocess, sys, time
watchdog = subprocess.Popen([sys.executable, sys.argv[1], *sys.argv[2:]], stdin=subprocess.PIPE)
time.sleep(600)
"""


def alive(number: int) -> bool:
    """Whether the process is running; a zombie is not."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def started(path: Path) -> list[int]:
    wait_until(path.exists)
    return [int(word) for word in path.read_text().split()]


def impatient(folder: Path) -> Path:
    """The watchdog, with a grace period of one second instead of ten."""
    text = WATCHDOG.read_text()
    assert text.count("GRACE = 10.0\n") == 1
    (folder / "watchdog.py").write_text(text.replace("GRACE = 10.0\n", "GRACE = 1.0\n"))
    return folder / "watchdog.py"


@pytest.mark.parametrize("ears", ["good", "deaf"])
def test_a_run_that_is_killed_leaves_no_server(ears: str, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    command = [sys.executable, "-c", SERVER, str(pids), ears]
    watchdog = impatient(tmp_path) if ears == "deaf" else WATCHDOG
    run = subprocess.Popen([sys.executable, "-c", RUN, str(watchdog), *command])
    server, worker = started(pids)
    assert alive(server)
    assert alive(worker)
    run.send_signal(signal.SIGKILL)
    run.wait()
    wait_until(lambda: not alive(server) and not alive(worker))


def test_closing_the_pipe_ends_the_server_and_an_interrupt_does_not(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    command = [sys.executable, str(WATCHDOG), sys.executable, "-c", SERVER, str(pids), "good"]
    watchdog = subprocess.Popen(command, stdin=subprocess.PIPE)
    server, worker = started(pids)
    assert os.getsid(server) != os.getsid(0), "an interrupt at the terminal goes to the session of the run"
    assert watchdog.stdin is not None
    watchdog.stdin.close()
    assert watchdog.wait(60) == 0
    assert not alive(server)
    assert not alive(worker)


def test_the_watchdog_ends_with_its_server() -> None:
    watchdog = subprocess.Popen([sys.executable, str(WATCHDOG), sys.executable, "-c", "exit(3)"], stdin=subprocess.PIPE)
    assert watchdog.wait(60) == 3
    assert watchdog.stdin is not None
    watchdog.stdin.close()
