"""The program that `padfree launch` starts on each host. It exchanges lines with the launcher over standard input and
output:

1. The launcher sends the command, the folder and the environment variables.
2. This program checks the command. It answers with its versions and the number of GPUs, or with an error.
3. The launcher sends the arguments of torchrun, and this program runs torchrun.
4. If the launcher sends "stop" or standard input ends, this program stops torchrun.

Environment variables may contain secrets. They are not sent as command-line arguments, because process lists show these
arguments.
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
"""The prefix of this host's answer to the launcher. Lines before the answer come from the host's shell."""

SHUTDOWN = 30.0
"""Seconds that torchrun waits for its processes after a signal; TORCH_ELASTIC_SHUTDOWN_TIMEOUT overrides it."""

RELEASE = 15.0
"""Seconds to wait for the end of torchrun, in addition to the seconds that torchrun waits for its processes."""


def shutdown_seconds() -> float:
    return float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", SHUTDOWN))


def source_digest() -> str:
    """Return a digest of padfree's source files, because two installations of the same version can have different
    files.
    """
    digest, root = hashlib.sha256(), Path(padfree.__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def answer(order: dict[str, Any]) -> dict[str, Any]:
    """Return this host's answer to `order`, the first message of the launcher.

    The answer has versions, a digest of the recipe, and the number of GPUs if `order` asks for it. If the folder or the
    command is wrong, the answer has an error.
    """
    os.environ.update(order["environment"])
    found = {"version": padfree.__version__, "source": source_digest(), "torch": version("torch")}
    try:
        os.chdir(order["folder"])
    except OSError as error:
        fix = "give a folder that exists on all hosts"
        return {**found, "refused": f"--folder: {order['folder']} cannot be entered ({error.strerror}); {fix}"}
    try:
        found["recipe"] = checked_recipe(order["words"])
    except UserError as error:
        return {**found, "refused": str(error)}
    if not order["counts_gpus"]:
        return found

    import torch

    return {**found, "gpus": torch.cuda.device_count()}


def checked_recipe(words: list[str]) -> str:
    """Check the settings of a command, and return the digest of its recipe file ("" for a command without recipe).

    Raise a `UserError` for wrong settings and missing models or files. `words`: the words of the command.
    """
    settings = parsed(words)
    if not hasattr(settings, "recipe"):
        return ""
    config = load_config(settings.recipe, settings.overrides)
    if settings.command in TASKS:
        check_names(config)
    return hashlib.sha256(recipe_path(settings.recipe).read_bytes()).hexdigest()


def torchrun(arguments: list[str]) -> int:
    """Run torchrun. Return the exit code of the first process that failed, or 128 plus the number of the signal that
    ended it.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as run

    start: Callable[[list[str]], object] = run  # torch has no type annotations for it
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
    """Wait for "stop" or the end of `orders` (standard input), then stop torchrun, even if torchrun hangs."""
    orders.readline()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(shutdown_seconds() + RELEASE)
    os._exit(128 + signal.SIGTERM)  # torchrun has killed its processes by now


def main() -> int:
    # Child processes do not inherit this copy of stdin. With a buffer, a waiting thread would hold the buffer's lock.
    orders = os.fdopen(os.dup(0), "rb", buffering=0)
    with open(os.devnull, encoding="utf-8") as nothing:
        os.dup2(nothing.fileno(), 0)
    print(ANSWER + json.dumps(answer(json.loads(orders.readline()))), flush=True)
    start = orders.readline()
    if not start:
        return 1  # a host refused the command
    threading.Thread(target=stop_at_end, args=(orders,), name="leash", daemon=True).start()
    return torchrun(json.loads(start))


if __name__ == "__main__":
    sys.exit(main())
