"""`padfree launch` over real ssh: two hosts with an sshd each."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from padfree.config import load_config
from padfree.train.run import train
from tests.hosts.network import Host
from tests.hosts.sshd import no_sshd_reason, sshd_on

LIMIT = 300.0

pytestmark = pytest.mark.slow


def write_recipe(folder: Path, model: Path) -> Path:
    rows = [{"prompt": f"{a}+{b}=", "response": str(a + b)} for a in range(4) for b in range(4)]
    (folder / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "recipe.toml").write_text(f"""
        model.path = "{model}"
        data = {{ path = ["{folder / "sft.jsonl"}"], epochs = 100000 }}
        batch = {{ samples = 8, max_tokens = 40 }}
        optimizer = {{ lr = 2e-3, eps = 1e-3 }}
        checkpoint.every = 4
        run = {{ folder = "run", steps = 100000, device = "cpu", timeout = 60.0 }}
    """)
    return folder / "recipe.toml"


class Launched:
    """`padfree launch` on the first host, and what it prints."""

    def __init__(self, host: Host, folder: Path, ssh: str, *words: str) -> None:
        self.log = folder / "launch.log"
        self.log.unlink(missing_ok=True)
        command = [sys.executable, "-m", "padfree", "launch", "--hosts", "host-1,host-2", "--processes", "1"]
        paths = os.pathsep.join(path for path in sys.path if path)
        self.process = host.start(
            [*command, "--ssh", ssh, "--folder", str(folder), *words],
            output=self.log,
            env={"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PADFREE_CACHE": str(folder / "cache")},
        )

    def wait_until(self, ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT
        while not ready():
            assert time.monotonic() < deadline, self.said()
            assert self.process.poll() is None, self.said()
            time.sleep(0.1)

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def ended(self) -> int:
        try:
            return self.process.wait(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"did not end within {LIMIT} s\n{self.said()}") from None


def workers(host: Host) -> list[int]:
    """Processes of the run on a host."""
    found = []
    for process in host.processes():
        words: list[bytes] = []
        with suppress(FileNotFoundError, ProcessLookupError):  # it ended after it was listed
            words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
        if b"padfree" in words and b"sft" in words and b"launch" not in words:
            found.append(process)
    return found


def test_a_launched_run_starts_again_stops_and_goes_on(hosts: list[Host], model_folder: Path, tmp_path: Path) -> None:
    if reason := no_sshd_reason():
        pytest.skip(reason)
    write_recipe(tmp_path, model_folder)
    metrics = tmp_path / "run" / "metrics.jsonl"

    def steps() -> int:
        return metrics.read_text().count("\n") if metrics.exists() else 0

    with sshd_on(hosts[:2], tmp_path / "ssh") as ssh:
        refused = Launched(hosts[0], tmp_path, ssh, "--", "sft", "nowhere.toml")
        assert refused.ended() == 1
        assert refused.said().startswith("padfree launch: config: on host-"), refused.said()
        assert refused.said().count("\n") == 1, refused.said()

        # one process is killed: torchrun starts all again; then whoever launched it is told to stop
        launched = Launched(hosts[0], tmp_path, ssh, "--restarts", "1", "--", "sft", "recipe.toml")
        launched.wait_until(lambda: steps() >= 5)
        (victim,) = workers(hosts[1])
        os.kill(victim, signal.SIGKILL)
        launched.wait_until(lambda: workers(hosts[1]) not in ([], [victim]))
        before = steps()
        launched.wait_until(lambda: steps() > before)
        launched.process.send_signal(signal.SIGTERM)
        assert launched.ended() == 128 + signal.SIGTERM, launched.said()
        output = launched.said()
        assert "host-1: stopped by a signal after " in output, output
        done = int(output.split("host-1: stopped by a signal after ")[1].split()[0])
        assert (tmp_path / "run" / "checkpoints" / "latest").read_text() == f"step-{done:08d}"
        assert all(line.startswith(("host-1: ", "host-2: ", "padfree launch: ")) for line in output.splitlines())
        assert not workers(hosts[0]) + workers(hosts[1])

        # to the end
        launched = Launched(hosts[0], tmp_path, ssh, "--", "sft", "recipe.toml", f"run.steps={done + 2}")
        assert launched.ended() == 0, launched.said()
        assert f"host-1: done after {done + 2} steps" in launched.said()
    alone = [f"run.steps={done + 2}", f"run.folder={tmp_path / 'alone'}"]
    train(load_config(tmp_path / "recipe.toml", alone))
    weights, others = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("run", "alone"))
    for name, weight in weights.items():
        torch.testing.assert_close(weight, others[name], rtol=1e-5, atol=1e-5)
