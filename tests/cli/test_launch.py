"""`padfree launch` without real hosts: a program replaces ssh, and the name of a host selects its behaviour."""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from importlib.metadata import version
from pathlib import Path
from queue import Empty
from typing import Any

import pytest
import torch.distributed.run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

import padfree
import padfree.cli.launch as launch_module
from padfree.cli import on_host
from padfree.cli.host_connection import SIGNAL_CHECK_SECONDS, Ended, Events, Signalled, next_event, signals_as_events
from padfree.cli.launch import PORT, Launch, gpus_per_host
from padfree.cli.main import main
from tests.refused import refused

ROOT = Path(__file__).parents[2]
ANSWER = {"version": padfree.__version__, "source": on_host.source_digest(), "torch": version("torch"), "recipe": "x"}
SSH = f"""
import json, sys
host, behaviour = sys.argv[1], sys.argv[1].partition("-")[0]
answer = {ANSWER!r}
if behaviour == "gone":
    print("ssh: connect to host gone port 22: No route to host", file=sys.stderr); sys.exit(255)
if behaviour == "bare":
    print("sh: 1: python: not found", file=sys.stderr); sys.exit(127)
if behaviour == "empty":
    print("/usr/bin/python: No module named padfree", file=sys.stderr); sys.exit(1)
order = json.loads(sys.stdin.readline())
answer.update({{
    "old": {{"version": "0.0.9"}},
    "changed": {{"source": "y"}},
    "torch": {{"torch": "1.0"}},
    "elsewhere": {{"recipe": "y"}},
    "lost": {{"refused": "--folder: " + order["folder"] + " cannot be entered (it is away); give another"}},
}}.get(behaviour, {{}}))
print("Last login: today")
print({on_host.ANSWER!r} + json.dumps(answer), flush=True)
start = sys.stdin.readline()
print("got", start.strip(), flush=True)
if behaviour == "fails":
    print("no luck", file=sys.stderr); sys.exit(7)
if behaviour == "stays":
    print("was told", sys.stdin.readline().strip(), flush=True)
"""


@pytest.fixture(scope="module")
def ssh(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("ssh") / "ssh.py"
    path.write_text(SSH)
    return shlex.join([sys.executable, "-S", str(path)])


def words(ssh: str, hosts: str, *options: str) -> list[str]:
    recipe = str(ROOT / "src" / "padfree" / "recipes" / "sft.toml")
    return ["launch", "--hosts", hosts, "--processes", "2", "--ssh", ssh, *options, "--", "sft", recipe, "run.steps=3"]


def test_every_host_gets_its_number_and_the_same_words(ssh: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words(ssh, "a,me@b", "--restarts", "1")) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    for rank, host in enumerate(("a", "me@b")):
        (line,) = [line for line in printed.out.splitlines() if line.startswith(f"{host}: got ")]
        arguments = json.loads(line.removeprefix(f"{host}: got "))
        assert arguments == [
            *("--nnodes", "2", "--node-rank", str(rank), "--nproc-per-node", "2", "--master-addr", "a"),
            *("--master-port", str(PORT), "--max-restarts", "1", "-m", "padfree"),
            *("sft", str(ROOT / "src" / "padfree" / "recipes" / "sft.toml"), "run.steps=3"),
        ]
    assert "login" not in printed.out, "what a shell prints before is not shown"


def made(**changes: Any) -> Launch:
    values = {
        "hosts": "me@a,b",
        "words": ["sft", "recipes/sft.toml", "--dry-run"],
        "folder": "/work",
        "python": "/opt/my python",
        "processes": None,
        "restarts": 0,
        "address": None,
        "ssh": "ssh -p 2222",
    }
    return Launch.of(argparse.Namespace(**{**values, **changes}))


def test_what_a_host_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("PYTHONPATH", "/a:/b")
    launch = made()
    assert launch.address == ("a", PORT)
    assert made(address="c:1").address == ("c", 1)
    assert launch.remote_command() == "exec env PYTHONPATH=/a:/b '/opt/my python' -u -m padfree.cli.on_host"
    told = launch.order()
    assert told["environment"]["HF_TOKEN"] == "secret"
    assert "RANK" not in told["environment"]
    assert (told["folder"], told["words"], told["counts_gpus"]) == ("/work", launch.words, True)


@pytest.mark.parametrize(
    ("hosts", "line"),
    [
        (
            "a,gone",
            r"--hosts: gone cannot be reached \(ssh: connect to host gone .*: No route to host\); make ssh gone work",
        ),
        ("a,bare", r"--python: .* cannot be run on bare \(sh: 1: python: not found\); install Python on the host, or"),
        (
            "a,empty",
            r"--hosts: padfree is missing on empty, or .* \(.*No module named padfree\); install the same",
        ),
        ("a,old", r"--hosts: padfree on old is 0.0.9, here it is .*; install the same version on all"),
        (
            "a,changed",
            r"--hosts: padfree on changed is .* with different source files, here it is .*; install the same version",
        ),
        ("a,torch", r"--hosts: torch is 1.0 on torch and .* on a; install the same"),
        (
            "a,elsewhere",
            r"--folder: the recipe on elsewhere differs from the one on a; use a folder that all hosts share",
        ),
        ("a,lost", r"--folder: on lost: /.* cannot be entered \(it is away\); give another"),
    ],
)
def test_a_host_that_cannot_take_part_is_refused(
    hosts: str, line: str, ssh: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words(ssh, hosts)) == 1
    printed = capsys.readouterr()
    assert "got" not in printed.out, "nothing was started anywhere"
    assert printed.err.count("\n") == 1
    assert re.match(f"padfree launch: {line}", printed.err), printed.err


def test_a_failure_stops_the_others_and_is_the_exit_code(
    ssh: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_module, "LINGER", 0.1)
    with pytest.raises(SystemExit) as end:
        main(words(ssh, "stays,fails"))
    assert end.value.code == 7
    printed = capsys.readouterr()
    assert "stays: was told stop\n" in printed.out
    assert "fails: no luck\n" in printed.err
    assert "padfree launch: fails: the command ended with exit code 7; the other hosts are stopped\n" in printed.err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_all(ssh: str, number: signal.Signals) -> None:
    launched = subprocess.Popen(
        [sys.executable, "-m", "padfree", *words(ssh, "stays-1,stays-2")], stdout=subprocess.PIPE, text=True
    )
    assert launched.stdout is not None
    heard = [launched.stdout.readline() for _ in range(2)]
    assert all(": got [" in line for line in heard), heard
    launched.send_signal(number)
    rest = launched.communicate(timeout=60)[0]
    assert launched.returncode == 128 + number
    assert sorted(rest.splitlines()) == ["stays-1: was told stop", "stays-2: was told stop"]


def test_a_signal_that_another_thread_gets_is_seen() -> None:
    """A process that was stopped for a while often has it so; here the thread sends it to itself."""
    events = Events()

    def disturb() -> None:
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        if not seen.wait(20.0):
            events.put(Ended("late", 0))

    seen = threading.Event()
    with signals_as_events(events):
        thread = threading.Timer(0.2, disturb)
        thread.start()
        try:
            assert next_event(events) == Signalled(signal.SIGTERM)
        finally:
            seen.set()
            thread.join()


def test_waiting_for_an_event_has_an_end() -> None:
    begun = time.monotonic()
    with pytest.raises(Empty):
        next_event(Events(), deadline=begun + SIGNAL_CHECK_SECONDS + 0.2)
    assert time.monotonic() >= begun + SIGNAL_CHECK_SECONDS + 0.2
    with pytest.raises(Empty):
        next_event(Events(), deadline=begun)


def test_processes_are_gpus_and_as_many_on_each_host() -> None:
    assert gpus_per_host({"a": {"gpus": 8}, "b": {"gpus": 8}}) == 8
    with refused("--processes"):
        gpus_per_host({"a": {"gpus": 8}, "b": {"gpus": 4}})
    with refused("--processes"):
        gpus_per_host({"a": {"gpus": 8}, "b": {"gpus": 0}})


# On the host itself


def order(folder: Path, *command: str) -> dict[str, Any]:
    return {"words": command, "folder": str(folder), "environment": {}, "counts_gpus": False}


def answered(folder: Path, *command: str) -> dict[str, Any]:
    """As it comes through the pipes of a process of its own."""
    result = subprocess.run(
        [sys.executable, "-m", "padfree.cli.on_host"],
        input=json.dumps(order(folder, *command)) + "\n",
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert result.returncode == 1, "it was not told to start"
    return json.loads(result.stdout.removeprefix(on_host.ANSWER))


def test_a_host_looks_at_folder_and_settings_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)  # and back in the end: a host goes to the folder it is told
    recipe = (ROOT / "src" / "padfree" / "recipes" / "sft.toml").read_text()
    (tmp_path / "r.toml").write_text(recipe)
    (tmp_path / "d.jsonl").touch()
    (tmp_path / "model").mkdir()
    right = ["sft", "r.toml", "model.path=./model", "data.path=d.jsonl"]
    found = answered(tmp_path, *right)
    assert found == {**ANSWER, "recipe": hashlib.sha256(recipe.encode()).hexdigest()}
    for folder, wrong, line in (
        (tmp_path, ["sft", "nowhere.toml"], "config: nowhere.toml cannot be read"),
        (tmp_path, [*right, "optimizer.lr=-1"], "optimizer.lr: "),
        (tmp_path, [*right, "model.path=./elsewhere"], "model.path: "),
        (tmp_path / "none", right, f"--folder: {tmp_path / 'none'} cannot be entered (No such file or directory); "),
    ):
        assert on_host.answer(order(folder, *wrong))["refused"].startswith(line)


def test_the_exit_code_is_that_of_the_process_that_failed_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(*codes: int) -> ChildFailedError:
        failures = {}
        for rank, code in enumerate(codes):
            failure = ProcessFailure(local_rank=rank, pid=rank, exitcode=code, error_file="none")
            failure.timestamp = 10 - rank
            failures[rank] = failure
        return ChildFailedError("padfree", failures)

    for error, code in (
        (failing(1, 3), 3),
        (failing(1, -9), 137),
        (SignalException("stop", signal.SIGTERM), 143),
        (None, 0),
    ):

        def run(_: Any, error: Exception | None = error) -> None:
            if error is not None:
                raise error

        monkeypatch.setattr(torch.distributed.run, "main", run)
        assert on_host.torchrun([]) == code
    assert capsys.readouterr().err == "rank 1 ended with exit code 3\nrank 1 was killed by signal 9\n"
