"""What `padfree launch` starts on a host: it says whether the command can run here, and then it is torchrun.

    standard input    the order, one JSON line; the arguments of torchrun, another; then "stop", or its end
    standard output   the answer, one JSON line behind ANSWER; then what torchrun and its processes print

The input is the leash: when it ends, because whoever launched this is gone or the connection is lost, torchrun gets
SIGTERM as it does for "stop". Secrets of the environment come this way, too, where no list of processes shows them.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from importlib.metadata import version
from io import FileIO
from pathlib import Path
from typing import Any

import padfree
from padfree.cli.main import parsed
from padfree.config import load_config
from padfree.config.hub import check_names
from padfree.config.loss import TASKS
from padfree.config.recipe_files import recipe_path
from padfree.errors import UserError

ANSWER = "padfree-answer "
"""Before the answer: a shell may print other lines first."""

SHUTDOWN = 30.0
"""Seconds that torchrun waits for its processes after a signal, unless TORCH_ELASTIC_SHUTDOWN_TIMEOUT says more."""

RELEASE = 15.0
"""Seconds beyond that after which torchrun itself is not waited for any longer."""


def shutdown_seconds() -> float:
    return float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", SHUTDOWN))


def source_digest() -> str:
    """Of all of padfree's code: two states of one version differ, too."""
    digest, root = hashlib.sha256(), Path(padfree.__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def answer(order: dict[str, Any]) -> dict[str, Any]:
    """What is installed here, and why the command cannot run, if it cannot."""
    os.environ.update(order["environment"])
    found = {"version": padfree.__version__, "source": source_digest(), "torch": version("torch")}
    try:
        os.chdir(order["folder"])
    except OSError as error:
        cure = "use a folder that all hosts share, or give another"
        return {**found, "refused": f"--folder: {order['folder']} cannot be entered ({error.strerror}); {cure}"}
    try:
        found["recipe"] = checked_recipe(order["words"])
    except UserError as error:
        return {**found, "refused": str(error)}
    if not order["counts_gpus"]:
        return found

    import torch

    return {**found, "gpus": torch.cuda.device_count()}


def checked_recipe(words: list[str]) -> str:
    """The digest of the recipe's file; settings that cannot be right, and names that are not here, are refused."""
    settings = parsed(words)
    if not hasattr(settings, "recipe"):
        return ""
    config = load_config(settings.recipe, settings.overrides)
    if settings.command in TASKS:
        check_names(config)
    return hashlib.sha256(recipe_path(settings.recipe).read_bytes()).hexdigest()


def torchrun(arguments: list[str]) -> int:
    """The exit code of the process that failed first; 128 and the number of the signal that ended it, or this one."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as run

    start: Callable[[list[str]], object] = run  # it has no types
    try:
        start(arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code: int = failure.exitcode
        how = f"ended with exit code {code}" if code > 0 else f"was killed by signal {-code}"
        print(f"rank {rank} {how}", file=sys.stderr, flush=True)
        return code if code > 0 else 128 - code
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def stop_at_end(orders: FileIO) -> None:
    """Wait for "stop" or the end of the input, and then for torchrun, which may be stuck among lost hosts."""
    orders.readline()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(shutdown_seconds() + RELEASE)
    os._exit(128 + signal.SIGTERM)  # its processes are dead by now: torchrun kills those that stay


def main() -> int:
    # Not inherited, so that nobody else reads from it; no buffer, which a thread that waits at the end would lock.
    orders = os.fdopen(os.dup(0), "rb", buffering=0)
    with open(os.devnull, encoding="utf-8") as nothing:
        os.dup2(nothing.fileno(), 0)
    print(ANSWER + json.dumps(answer(json.loads(orders.readline()))), flush=True)
    start = orders.readline()
    if not start:
        return 1  # refused, here or elsewhere
    threading.Thread(target=stop_at_end, args=(orders,), name="leash", daemon=True).start()
    return torchrun(json.loads(start))


if __name__ == "__main__":
    sys.exit(main())
