"""Servers that a run starts itself, and a task that restarts them.

A run starts one server for each entry of `rollout.launch.devices`:

    command    `rollout.launch.command`, and the options that the run needs (`ServerApi.command`)
    devices    the entry, as CUDA_VISIBLE_DEVICES
    output     `servers/0.log` (for the first entry) in the run folder

A server that has ended is restarted after a pause of 1, 2, 4, ... seconds. A server that hangs is stopped and restarted
at once. The next weight sync sends the weights to a restarted server.

Each server has a watchdog (`watchdog`), which stops the server when the run ends.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from padfree.config.rollout import LaunchConfig
from padfree.errors import UserError
from padfree.rollout.engines.servers.server_api import ServedModel, ServerApi, ServerLostError

WATCHDOG = Path(__file__).with_name("watchdog.py")
EVERY, PROBE, LONGEST_PAUSE, GRACE = 1.0, 30.0, 60.0, 15.0
"""`EVERY`: seconds between two checks of a server. `PROBE`: time limit of a check in seconds. `LONGEST_PAUSE`: maximum
seconds before a server is restarted. `GRACE`: seconds after which a watchdog that does not exit is killed."""
MAX_FAILED_STARTS = 3
"""The run ends if a server process exits or hangs this many times in a row before it has answered a single request."""

_OF_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME")


class LaunchedServer:
    """One server that this process starts and restarts."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path, server: ServerApi) -> None:
        self.server, self.log, self.starts, self.answered = server, log, 0, False
        self._command, self._environment = list(command), dict(environment)
        self._watchdog: subprocess.Popen[bytes] | None = None
        self._failed_starts = 0
        self._not_before = self._started = 0.0

    async def check(self) -> str | None:
        """Start the server if it is not running, and end it if it hangs. Return an error message if it cannot start."""
        now = time.monotonic()
        if self._watchdog is not None and self._watchdog.poll() is not None:
            status = self._watchdog.returncode
            self.begin_end()  # close the run's end of the pipe to the watchdog
            self._watchdog = None
            if (message := self._ended(f"ended with status {status} before it answered")) is not None:
                return message
            self._not_before = now + min(2.0 ** min(self.starts - 1, 6), LONGEST_PAUSE)
        if self._watchdog is None:
            if now >= self._not_before:
                self._start()
            return None
        try:
            await self.server.version(timeout=PROBE)
            self.answered = True
        except ServerLostError:
            limit = self.server.timeout
            if (self.answered or now > self._started + limit) and self._watchdog.poll() is None:
                await self.end()  # the server hangs; the next check starts it again
                return self._ended(f"did not answer within {limit:g} s")
        except UserError:
            self.answered = True  # the next request reports the error
        return None

    def _ended(self, how: str) -> str | None:
        """Count a failed start, unless the server has answered. Return an error message after too many of them."""
        self._failed_starts = 0 if self.answered else self._failed_starts + 1
        if self._failed_starts < MAX_FAILED_STARTS:
            return None
        return (
            f"rollout.launch: {self.server.url} {how}, {MAX_FAILED_STARTS} times ({self._last_line()}); correct "
            f"rollout.launch.command (the output of the server is in {self.log})"
        )

    def begin_end(self) -> None:
        """Tell the watchdog to end the server, and return without waiting."""
        if self._watchdog is not None:
            assert self._watchdog.stdin is not None
            self._watchdog.stdin.close()

    async def end(self) -> None:
        self.begin_end()
        watchdog = self._watchdog
        if watchdog is None:
            return
        deadline = time.monotonic() + GRACE
        while watchdog.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        if watchdog.poll() is None:
            watchdog.kill()
            watchdog.wait()
        self._watchdog = None

    def _start(self) -> None:
        self.starts += 1
        self.answered, self._started = False, time.monotonic()
        with self.log.open("ab") as output:
            output.write(f"start {self.starts}: {' '.join(self._command)}\n".encode())
            output.flush()
            self._watchdog = subprocess.Popen(
                [sys.executable, str(WATCHDOG), *self._command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment,
            )

    def _last_line(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        wrong = [line for line in lines if "Error" in line or "error:" in line]
        return " ".join((wrong or lines or [""])[-1].split())[-200:]


class Launcher:
    """All servers that a run starts. `start` creates a task that watches them until `close`."""

    def __init__(self, launched: Sequence[LaunchedServer]) -> None:
        self.launched = launched
        self.fatal_error: str | None = None  # why a server cannot be started
        self.probe_lock = asyncio.Lock()  # held during a weight sync, because servers then answer probes late
        self._watching: asyncio.Task[None] | None = None

    @property
    def servers(self) -> list[ServerApi]:
        return [one.server for one in self.launched]

    @property
    def restarts(self) -> int:
        return sum(one.starts - 1 for one in self.launched)

    async def start(self, seconds: float) -> None:
        """Start all servers, and wait until all answer. Raise an error if one does not answer within `seconds`."""
        self._watching = self._watching or asyncio.create_task(self._watch())
        deadline = time.monotonic() + seconds
        while missing := [one for one in self.launched if not one.answered]:
            if self.fatal_error is not None:
                raise UserError.of(self.fatal_error)
            if time.monotonic() > deadline:
                raise UserError(
                    "rollout.launch",
                    f"{missing[0].server.url} did not answer within {seconds:g} s",
                    f"raise rollout.timeout, or read the output of the server in {missing[0].log}",
                )
            await asyncio.sleep(0.1)

    async def _watch(self) -> None:
        while True:
            async with self.probe_lock:
                messages = await asyncio.gather(*map(self._check, self.launched))
            self.fatal_error = self.fatal_error or next(filter(None, messages), None)
            await asyncio.sleep(EVERY)

    async def _check(self, one: LaunchedServer) -> str | None:
        """Check a server (`LaunchedServer.check`). Return an error message, also if the check raises an exception."""
        try:
            return await one.check()
        except OSError as error:  # the process limit, or a full disk
            return (
                f"rollout.launch: {one.server.url} cannot be started ({error}); free disk space or end other processes "
                f"(the output of the server is in {one.log})"
            )
        except Exception as error:
            return f"rollout.launch: {one.server.url} cannot be watched ({error!r}); please report this"

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
        for one in self.launched:
            one.begin_end()
        await asyncio.gather(*(one.end() for one in self.launched))


def make_launcher(
    api: type[ServerApi], settings: LaunchConfig, served: ServedModel, folder: Path, timeout: float
) -> Launcher:
    """Make a launcher with a server for each entry of `rollout.launch.devices`. The servers are not started yet.

    The output of the servers goes to `folder`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name = f"padfree-{secrets.token_hex(4)}"  # identifies this run's servers, in case another server uses the port
    launched = []
    for number, (devices, port) in enumerate(zip(settings.devices, _free_ports(len(settings.devices)), strict=True)):
        command = api.command(settings.command, served, name=name, port=port)
        environment = {**_environment(devices), **api.environment(), **settings.environment}
        server = api(f"http://127.0.0.1:{port}", timeout)
        launched.append(LaunchedServer(command, environment, folder / f"{number}.log", server))
    return Launcher(launched)


def _environment(devices: str) -> dict[str, str]:
    """Return the environment variables of a server on `devices`: those of this process without torchrun's variables."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _OF_TORCHRUN and not name.startswith(("LOCAL_", "TORCHELASTIC_"))
    }
    return {**kept, "CUDA_VISIBLE_DEVICES": "" if devices == "cpu" else devices}


def _free_ports(number: int) -> list[int]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(number)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
