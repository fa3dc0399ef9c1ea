"""No server outlives the run that started it, no matter how the run ends."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest

from padfree.rollout.engines.servers.server_api import ServerApi, ServerLostError
from padfree.rollout.engines.servers.server_processes import WATCHDOG, LaunchedServer
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


class Silent:
    """A server that answers its first `answers` probes, and never again."""

    url, timeout = "http://127.0.0.1:1", 0.2

    def __init__(self, answers: int = 0) -> None:
        self.answers = answers

    async def version(self, *, timeout: float | None = None) -> str | None:
        if self.answers == 0:
            raise ServerLostError("no answer")
        self.answers -= 1
        return None


def checked(server: Silent, folder: Path, *, most: int = 200) -> tuple[LaunchedServer, str | None]:
    """Check a launched server every 50 ms until it cannot be started."""
    command = [sys.executable, "-c", "import time; print('warming up', flush=True); time.sleep(600)"]
    launched = LaunchedServer(command, dict(os.environ), folder / "log", cast(ServerApi, server))

    async def check() -> str | None:
        try:
            for _ in range(most):
                if (message := await launched.check()) is not None:
                    return message
                await asyncio.sleep(0.05)
            return None
        finally:
            await launched.end()

    return launched, asyncio.run(check())


def test_a_server_that_hangs_before_its_first_answer_is_restarted_and_given_up(tmp_path: Path) -> None:
    launched, message = checked(Silent(), tmp_path)
    assert message is not None
    assert "did not answer within 0.2 s, 3 times (" in message
    assert launched.starts == 3


def test_a_server_that_hangs_after_an_answer_is_restarted_at_once(tmp_path: Path) -> None:
    launched, message = checked(Silent(answers=1), tmp_path)
    assert message is not None, "the restarted server never answers"
    assert launched.starts == 1 + 3
