"""`padfree launch`: runs one command on several hosts, over ssh, with torchrun on each host.

    padfree launch --hosts a,b -- sft recipe.toml

1. The launcher starts `padfree.cli.on_host` on each host over ssh, and sends the command to it.
2. Each host checks the command. It answers with its versions and its number of GPUs, or with an error.
3. If the answers agree, the launcher starts torchrun on each host.
4. The launcher prints the output of the hosts. If a host fails, or if SIGINT or SIGTERM arrives, it stops all hosts.

With --slurm, `padfree launch` writes a batch script for Slurm instead.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from queue import Empty
from typing import Any

import padfree
from padfree.cli.host_connection import (
    CONNECTION,
    Ended,
    Events,
    HostConnection,
    Signalled,
    next_event,
    signals_as_events,
)
from padfree.cli.main import COMMANDS, parsed
from padfree.cli.on_host import RELEASE, shutdown_seconds, source_digest
from padfree.cli.slurm import write_script
from padfree.config.inputs import path_word
from padfree.config.loss import TASKS
from padfree.errors import UserError

LAUNCHED = ("check", *TASKS, "eval")
"""Commands that `padfree launch` accepts, because they can run on several processes."""

SSH = "ssh -o BatchMode=yes -o ConnectTimeout=15 -o ServerAliveInterval=15 -o ServerAliveCountMax=4"
PORT = 29500
ENVIRONMENT = (
    "GLOO_",
    "HF_",
    "MLFLOW_",
    "NCCL_",
    "OMP_",
    "PADFREE_",
    "PYTORCH_",
    "TOKENIZERS_",
    "TORCH_",
    "TORCHDYNAMO_",
    "TORCHINDUCTOR_",
    "TRITON_",
    "WANDB_",
)
"""Environment variables whose names begin with one of these prefixes are copied to the hosts."""

LINGER = 8.0
"""After a failure on one host, the other hosts have this many seconds to print their errors and end by themselves."""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = COMMANDS["launch"][1]
    command = commands.add_parser(
        "launch",
        usage="padfree launch (--hosts a,b | --slurm FILE --nodes N) [options] -- COMMAND ...",
        help=text,
        description=f"{text[0].upper()}{text[1:]}. All hosts need the same version of padfree and the same folder.",
        epilog="example: padfree launch --hosts a,b -- sft sft run.folder=/shared/runs/first",
    )
    add = command.add_argument
    add("--hosts", metavar="A,B,...", help="host names for ssh; the first has rank 0")
    add("--slurm", type=path_word("--slurm"), metavar="FILE", help="write a batch script for sbatch, and run nothing")
    add("--nodes", type=int, metavar="N", help="with --slurm: number of nodes")
    add("--sbatch", action="append", default=[], metavar="NAME=VALUE", help="with --slurm: an option of sbatch")
    add("--dry-run", action="store_true", help="with --slurm: print the script, and write nothing")
    add("--processes", type=int, metavar="N", help="processes per host (default: one per GPU)")
    add("--restarts", type=int, default=0, metavar="N", help="restarts by torchrun (default 0)")
    add("--address", metavar="HOST[:PORT]", help=f"rendezvous address (default: first host, port {PORT})")
    add(
        "--folder",
        type=path_word("--folder"),
        default=".",
        metavar="PATH",
        help="working directory on each host (default: this one)",
    )
    add(
        "--python",
        type=path_word("--python"),
        default=sys.executable,
        metavar="PATH",
        help="Python on each host (default: this one)",
    )
    add("--ssh", default=SSH, metavar="WORDS", help="ssh command with options (default: ssh)")
    add("words", nargs=argparse.REMAINDER, metavar="COMMAND ...", help="what to run: " + ", ".join(LAUNCHED))
    command.set_defaults(run=run)


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """The command to run, and the hosts to run it on."""

    hosts: tuple[str, ...]
    words: tuple[str, ...]
    folder: str
    python: str
    processes: int | None  # number of processes per host; None: one per GPU
    restarts: int
    address: tuple[str, int]
    ssh: tuple[str, ...]

    @staticmethod
    def of(settings: argparse.Namespace) -> Launch:
        words = _words(settings.words)
        hosts = [host.strip() for host in settings.hosts.split(",")]
        if not all(hosts) or any(host.startswith("-") for host in hosts):
            raise UserError(
                "--hosts",
                "",
                "give comma-separated host names that are not empty and do not begin with -",
                value=settings.hosts,
            )
        for host in hosts:
            if hosts.count(host) > 1:
                raise UserError("--hosts", f"{host} is named twice", "name every host once")
        if settings.processes is not None and settings.processes < 1:
            raise UserError("--processes", "", "give 1 or more", value=settings.processes)
        if settings.restarts < 0:
            raise UserError("--restarts", "", "give 0 or more", value=settings.restarts)
        parsed(words)  # refuses an invalid command line
        return Launch(
            hosts=tuple(hosts),
            words=tuple(words),
            folder=os.path.abspath(settings.folder),
            python=settings.python,
            processes=settings.processes,
            restarts=settings.restarts,
            address=_address(settings.address, hosts[0]),
            ssh=tuple(shlex.split(settings.ssh)),
        )

    def order(self) -> dict[str, Any]:
        """Return the first message that is sent to a host: the command, the folder and the environment variables."""
        return {
            "words": self.words,
            "folder": self.folder,
            "environment": {name: value for name, value in os.environ.items() if name.startswith(ENVIRONMENT)},
            "counts_gpus": self.processes is None,
        }

    def remote_command(self) -> str:
        """Return the command that ssh runs in the shell of a host."""
        paths = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        variables = [f"PYTHONPATH={os.pathsep.join(paths)}"] if paths else []
        return shlex.join(["exec", "env", *variables, self.python, "-u", "-m", "padfree.cli.on_host"])

    def torchrun(self, rank: int, processes: int) -> list[str]:
        """Return the arguments of torchrun on the host with node rank `rank`, with `processes` processes per host."""
        name, port = self.address
        return [
            *("--nnodes", str(len(self.hosts)), "--node-rank", str(rank), "--nproc-per-node", str(processes)),
            *("--master-addr", name, "--master-port", str(port), "--max-restarts", str(self.restarts)),
            *("-m", "padfree", *self.words),
        ]


def _words(given: Sequence[str]) -> list[str]:
    words = list(given[1:] if given[:1] == ["--"] else given)
    if not words or words[0] not in LAUNCHED:
        problem = f"{words[0]!r} cannot be launched" if words else "missing"
        raise UserError("COMMAND", problem, f"give one of {', '.join(LAUNCHED)} after --")
    return words


def _address(given: str | None, first: str) -> tuple[str, int]:
    name, _, port = (given or first.rpartition("@")[2]).partition(":")
    if not name or not (port or str(PORT)).isdigit():
        raise UserError(
            "--address",
            "",
            f"give HOST:PORT, a name that all hosts can resolve and the number of a port, e.g. host0:{PORT}",
            value=given,
        )
    return name, int(port or PORT)


@contextmanager
def connected(launch: Launch, events: Events) -> Iterator[list[HostConnection]]:
    """Context manager that connects to all hosts, yields the connections, and closes them at the end of the block."""
    found: list[HostConnection] = []
    try:
        for host in launch.hosts:
            found.append(HostConnection(host, launch.ssh, launch.remote_command(), events))
            found[-1].tell(json.dumps(launch.order()))
        yield found
    finally:
        for connection in found:
            connection.close()


def run(settings: argparse.Namespace) -> None:
    if (settings.hosts is None) == (settings.slurm is None):
        raise UserError(
            "--hosts",
            "exactly one of --hosts and --slurm is needed",
            "give --hosts for ssh, or --slurm for a batch script",
        )
    if settings.slurm is not None:
        if settings.address is not None or settings.ssh != SSH:
            raise UserError("--slurm", "writes a script that uses neither --address nor --ssh", "remove these options")
        if settings.restarts < 0:
            raise UserError("--restarts", "", "give 0 or more", value=settings.restarts)
        write_script(settings, _words(settings.words))
        return
    for name, given in (("--nodes", settings.nodes), ("--sbatch", settings.sbatch), ("--dry-run", settings.dry_run)):
        if given:
            raise UserError(name, "has no effect with --hosts", f"remove {name}, or use --slurm")
    launch, events = Launch.of(settings), Events()
    with signals_as_events(events), connected(launch, events) as connections:
        answers = gather_answers(connections, events, launch)
        processes = launch.processes or gpus_per_host(answers)
        for rank, connection in enumerate(connections):
            connection.tell(json.dumps(launch.torchrun(rank, processes)))
        code = supervise(connections, events)
    if code:
        raise SystemExit(code)


def gather_answers(connections: Sequence[HostConnection], events: Events, launch: Launch) -> dict[str, dict[str, Any]]:
    """Wait until every host has reported its versions, its recipe's digest and its number of GPUs. Return these answers
    by host.

    Raise a `UserError` if a host reports an error or cannot be reached, or if the versions of the hosts differ.
    """
    answers: dict[str, dict[str, Any]] = {}
    by_name = {connection.host: connection for connection in connections}
    while len(answers) < len(connections):
        event = next_event(events)
        if isinstance(event, Signalled):
            raise SystemExit(128 + event.number)
        if isinstance(event, Ended):
            raise by_name[event.host].refusal(event.code, launch.python)
        answers[event.host] = event.answer
        check_answer(event.host, event.answer)
    ordered = {host: answers[host] for host in launch.hosts}
    check_same_versions(ordered)
    return ordered


def check_answer(host: str, answer: Mapping[str, Any]) -> None:
    if (answer["version"], answer["source"]) != (padfree.__version__, source_digest()):
        theirs = answer["version"]
        difference = theirs if theirs != padfree.__version__ else f"{theirs} with different source files"
        raise UserError(
            "--hosts",
            f"padfree on {host} is {difference}, here it is {padfree.__version__}",
            "install the same version on all hosts",
        )
    if answer.get("refused"):
        raise UserError.of(with_host(answer["refused"], host))


def with_host(message: str, host: str) -> str:
    """Add the host to an error message: `optimizer.lr: -1; give ...` -> `optimizer.lr: on b: -1; give ...`."""
    name, _, rest = message.partition(":")
    return f"{name}: on {host}:{rest}"


def check_same_versions(answers: Mapping[str, Mapping[str, Any]]) -> None:
    (first, expected), *others = answers.items()
    for host, answer in others:
        if answer["torch"] != expected["torch"]:
            raise UserError(
                "--hosts",
                f"torch is {answer['torch']} on {host} and {expected['torch']} on {first}",
                "install the same version of torch on all hosts",
            )
        if answer["recipe"] != expected["recipe"]:
            raise UserError(
                "--folder",
                f"the recipe on {host} differs from the one on {first}",
                "use a folder that all hosts share, or copy the recipe",
            )


def gpus_per_host(answers: Mapping[str, Mapping[str, Any]]) -> int:
    counts = {host: int(answer["gpus"]) for host, answer in answers.items()}
    fewest = min(counts, key=lambda host: counts[host])
    if not counts[fewest]:
        raise UserError(
            "--processes", f"torch finds no GPU on host {fewest}", "set --processes to the number of processes per host"
        )
    most = max(counts, key=lambda host: counts[host])
    if counts[most] != counts[fewest]:
        raise UserError(
            "--processes",
            f"host {most} has {counts[most]} GPUs, but {fewest} has {counts[fewest]}",
            f"set the number of processes per host, as in --processes {counts[fewest]}",
        )
    return counts[fewest]


def supervise(connections: Sequence[HostConnection], events: Events) -> int:
    """Wait until the command has ended on all hosts, and return the exit code.

    The exit code is that of the first host that failed, or 128 plus the number of the signal that stopped this process.
    """
    running = {connection.host for connection in connections}
    code, deadline, stopped = 0, float("inf"), False

    def stop() -> None:
        nonlocal stopped, deadline
        stopped, deadline = True, time.monotonic() + shutdown_seconds() + 2 * RELEASE
        for connection in connections:
            connection.tell("stop")

    while running:
        try:
            event = next_event(events, deadline=deadline)
        except Empty:
            if stopped:
                say(f"the run may not have ended on {', '.join(sorted(running))}; log in there and check")
                return code
            stop()
            continue
        if isinstance(event, Signalled):
            if stopped:
                return code or 128 + event.number
            code = code or 128 + event.number
            stop()
        elif isinstance(event, Ended):
            running.discard(event.host)
            if event.code and not code:
                code = event.code
                how = "the connection is lost" if code == CONNECTION else f"the command ended with exit code {code}"
                say(f"{event.host}: {how}" + ("; the other hosts are stopped" if running else ""))
                deadline = time.monotonic() + LINGER
    return code


def say(line: str) -> None:
    print(f"padfree launch: {line}", file=sys.stderr, flush=True)
