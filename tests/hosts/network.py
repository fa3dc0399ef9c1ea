"""Hosts for tests on one machine: network namespaces on a bridge.

    host-1   eth0 10.213.N.1 --+
    host-2   eth0 10.213.N.2 --+-- bridge
    host-3   eth0 10.213.N.3 --+

Each host has an address, a name and a hosts file of its own, and reaches the others through its one link. Processes on
different hosts share the disk, unless a folder is made a host's own.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.ranks import rank_server

ROOT = Path(__file__).parents[2]
NEW_MOUNTS, NEW_NAMES, NEW_NETWORK = 0x00020000, 0x04000000, 0x40000000
"""Flags of unshare(2) and setns(2), which Python has from 3.12 on."""


@dataclass(frozen=True, kw_only=True)
class Host:
    name: str
    namespace: str
    address: str
    link: str  # its end at the bridge

    @property
    def namespace_file(self) -> Path:
        return Path("/var/run/netns") / self.namespace

    def start(self, command: Sequence[str], *, output: Path, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """A program on this host."""
        inside = ["unshare", "--uts", "--mount", "sh", "-c", f'hostname {self.name} && exec "$@"', "sh"]
        with output.open("ab") as file:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.namespace, *inside, *command],
                cwd=ROOT,
                env={**os.environ, **env},
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def fork(
        self,
        function: Callable[..., None],
        *args: Any,
        output: Path,
        env: Mapping[str, str],
        own_folder: Path | None = None,
    ) -> Any:
        """A process on this host that has imported everything already, and calls a function.

        `own_folder` is empty there at first, and nobody else sees what is written to it.
        """
        process = rank_server().Process(target=_on_host, args=(self, output, env, own_folder, function, args))
        process.start()
        return process

    def enter(self, own_folder: Path | None = None) -> None:
        """Move this process, which must have one thread, to the host: as `ip netns exec` and `unshare` do."""
        libc = ctypes.CDLL(None, use_errno=True)
        with self.namespace_file.open() as namespace:
            moved = libc.setns(namespace.fileno(), NEW_NETWORK) or libc.unshare(NEW_MOUNTS | NEW_NAMES)
        assert moved == 0, os.strerror(ctypes.get_errno())
        socket.sethostname(self.name)
        mounts = [
            ["--make-rslave", "/"],
            ["-t", "sysfs", self.namespace, "/sys"],  # counters of this host's links
            ["--bind", f"/etc/netns/{self.namespace}/hosts", "/etc/hosts"],
        ]
        if own_folder:
            mounts.append(["-t", "tmpfs", "own", str(own_folder)])
        for words in mounts:
            subprocess.run(["mount", *words], check=True)

    def processes(self) -> list[int]:
        return [int(process) for process in _ip("netns", "pids", self.namespace).split()]

    def signal(self, number: signal.Signals) -> None:
        """To all of its processes at once."""
        for process in self.processes():
            with suppress(ProcessLookupError):  # it ended after it was listed
                os.kill(process, number)

    def cut_off(self) -> None:
        _ip("link", "set", self.link, "down")

    def connect(self) -> None:
        _ip("link", "set", self.link, "up")


def _on_host(
    host: Host,
    output: Path,
    env: Mapping[str, str],
    own_folder: Path | None,
    function: Callable[..., None],
    args: Sequence[Any],
) -> None:
    with output.open("ab") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    os.chdir(ROOT)
    os.environ.update(env)
    host.enter(own_folder)
    function(*args)


def no_hosts_reason() -> str | None:
    """Why hosts cannot be made here."""
    if sys.platform != "linux" or shutil.which("ip") is None or shutil.which("unshare") is None:
        return "needs Linux with iproute2 and unshare"
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"padfree-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode == 0:
        made = subprocess.run(
            ["ip", "netns", "exec", name, "unshare", "--uts", "--mount", "true"],
            capture_output=True,
            text=True,
            check=False,
        )
        _ip("netns", "del", name)
    return f"network namespaces cannot be made: {made.stderr.strip()}" if made.returncode else None


@contextmanager
def connected_hosts(count: int) -> Iterator[list[Host]]:
    tag = os.getpid() % 250
    bridge = f"pf{tag}"
    hosts = [
        Host(name=f"host-{n}", namespace=f"padfree{tag}-{n}", address=f"10.213.{tag}.{n}", link=f"pf{tag}h{n}")
        for n in range(1, count + 1)
    ]
    table = "".join(f"{host.address} {host.name}\n" for host in hosts)
    try:
        _ip("link", "add", bridge, "type", "bridge")
        _ip("link", "set", bridge, "up")
        for host in hosts:
            files = Path("/etc/netns") / host.namespace  # `ip netns exec` shows them in /etc
            files.mkdir(parents=True, exist_ok=True)
            (files / "hosts").write_text("127.0.0.1 localhost\n" + table)
            _ip("netns", "add", host.namespace)
            _ip("link", "add", host.link, "type", "veth", "peer", "name", "eth0", "netns", host.namespace)
            _ip("link", "set", host.link, "master", bridge, "up")
            _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", host.namespace, "link", "set", device, "up")
        yield hosts
    finally:
        for host in hosts:
            if host.namespace_file.exists():
                host.signal(signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", host.namespace], capture_output=True, check=False)
            # now, and not whenever the kernel takes the namespace down: the next test makes a link of this name
            subprocess.run(["ip", "link", "del", host.link], capture_output=True, check=False)
            shutil.rmtree(Path("/etc/netns") / host.namespace, ignore_errors=True)
        subprocess.run(["ip", "link", "del", bridge], capture_output=True, check=False)


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"
    return done.stdout
