"""sshd on the hosts of the tests, with keys of their own."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.hosts.network import Host

PORT = 2222
SBIN = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


def no_sshd_reason() -> str | None:
    missing = [name for name in ("sshd", "ssh", "ssh-keygen") if shutil.which(name, path=SBIN) is None]
    return f"needs OpenSSH: {', '.join(missing)} not found" if missing else None


@contextmanager
def sshd_on(hosts: Sequence[Host], folder: Path) -> Iterator[str]:
    """The words of ssh with which any of these hosts logs in on any other."""
    folder.mkdir()
    for name in ("key", "host_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    server = {
        "Port": PORT,
        "HostKey": folder / "host_key",
        "AuthorizedKeysFile": folder / "key.pub",
        "StrictModes": "no",
        "PermitRootLogin": "yes",
        "PasswordAuthentication": "no",
        "UsePAM": "no",
        "PidFile": "none",
    }
    client = {
        "Port": PORT,
        "IdentityFile": folder / "key",
        "BatchMode": "yes",
        "ConnectTimeout": 30,
        "StrictHostKeyChecking": "no",
        "UserKnownHostsFile": "/dev/null",
        "LogLevel": "ERROR",
    }
    for name, values in (("server", server), ("client", client)):
        (folder / name).write_text("".join(f"{setting} {value}\n" for setting, value in values.items()))
    Path("/run/sshd").mkdir(exist_ok=True)  # sshd wants to have it
    program = shutil.which("sshd", path=SBIN)
    assert program is not None
    started = [
        host.start([program, "-D", "-e", "-f", str(folder / "server")], output=folder / f"{host.name}.log", env={})
        for host in hosts
    ]
    try:
        deadline = time.monotonic() + 60
        for host, process in zip(hosts, started, strict=True):
            log = folder / f"{host.name}.log"
            while "Server listening" not in log.read_text():
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.05)
        yield shlex.join(["ssh", "-F", str(folder / "client")])
    finally:
        for process in started:
            process.kill()
            process.wait()
