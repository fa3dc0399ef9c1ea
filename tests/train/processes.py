"""Processes for tests that kill: forked from a process with one thread that has imported everything.

test --forkserver--> alone(function, folder) --fork--> forked(...), forked(...), ...     these are killed
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.ranks import rank_server


def alone(function: Callable[[Path], Any], folder: Path) -> Any:
    """The result of a module's function in such a process, transferred as JSON."""
    process = rank_server().Process(target=in_folder, args=(function, folder))
    process.start()
    process.join(400)
    ended_by_itself = process.exitcode is not None
    process.kill()
    process.join()
    log = (folder / "alone.log").read_text()
    assert ended_by_itself, log
    assert process.exitcode == 0, log
    return json.loads((folder / "result.json").read_text())


def in_folder(function: Callable[[Path], Any], folder: Path) -> None:
    # A run does not handle signals that its caller ignores: SIGHUP under `nohup`, SIGINT in a background job.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    os.environ["PADFREE_CACHE"] = str(folder / "cache")
    with (folder / "alone.log").open("w") as file:
        os.dup2(file.fileno(), 2)
    (folder / "result.json").write_text(json.dumps(function(folder)))


def forked(function: Callable[[int], int], output: Path) -> tuple[int, int]:
    """Fork a child that exits with the function's return code; return its pid and the pipe that it writes to."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        code = 70
        try:
            with output.open("a") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            code = function(write)
        except BaseException as error:
            print(repr(error), file=sys.stderr)  # noqa: T201
        sys.stdout.flush()
        os._exit(code)
    os.close(write)
    return child, read


def ended(child: int) -> int:
    """The exit code of a process; minus the signal number if it was killed."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
