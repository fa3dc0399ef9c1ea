"""Run a function on several processes that form a gloo group on this machine.

    def case(rank: int, world: int, scale: float) -> float: ...      # at module level, so that it can be pickled

    assert run_ranks(2, case, 3.0) == [0.0, 3.0]                     # one result per rank

Ranks are forked from a server that has imported torch and padfree once: only the first call of a session pays. In
them the same warnings are errors as in the test that starts them. A rank that fails makes the call fail with its
traceback; ranks that do not end in time are stopped, and the place where each one hung is shown.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.run
import torch.multiprocessing as multiprocessing
from torch.distributed.distributed_c10d import _set_pg_timeout

from tests.waiting import wait_until

PRELOAD = [
    "torch",
    "torch.distributed",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed.run",
    "numpy",
    "pytest",
    "transformers.generation.utils",
    "transformers.modeling_utils",
    "padfree.tools.check",
    "padfree.cli.train",
    "padfree.rollout.engines.in_process.sampler",
    "padfree.train.run",
    "tests.compiler_settings",
    "padfree.testing.models",
    "tests.train.trainer_cases",
    "tests.first_models",
]
"""What ranks need; what is missing here each of them imports again, which takes a second or more."""


def run_ranks(
    world: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 600.0,
    group_timeout: float = 300.0,
    dying: Collection[int] = (),
) -> list[Any]:
    """What `function(rank, world, *args)` returns on each rank (anything that pickles; tensors on the CPU).

    `timeout` is for the whole call and `group_timeout` for one collective, in seconds: far more than they take, because
    a busy machine may stop a process for a minute. Ranks in `dying` are expected to end their process without
    returning; their result is None.
    """
    context = rank_server()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processes = [
            context.Process(
                target=_main,
                args=(rank, world, folder, timeout, group_timeout, bool(dying), _filters(), function, args),
                daemon=True,
            )
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout
        while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
            if list(folder.glob("failed*")):
                deadline = min(deadline, time.monotonic() + 5.0)  # the others get a moment to report, too
            time.sleep(0.02)
        hung = [rank for rank, process in enumerate(processes) if process.is_alive()]
        ended = [process.exitcode for process in processes]  # negative: the signal that ended it; None: still alive
        for process in processes:
            process.kill()
            process.join()
        failed = sorted(folder.glob("failed*"), key=lambda path: path.stat().st_mtime_ns)
        if failed:
            crashes = [f"exit codes of the ranks: {ended}", *(path.read_text() for path in folder.glob("stack*"))]
            raise AssertionError("\n".join([path.read_text() for path in failed] + crashes))
        if hung:
            stacks = "\n".join((folder / f"stack{rank}").read_text() for rank in hung)
            raise AssertionError(f"ranks {hung} of {world} did not end within {timeout} s\n{stacks}")
        for rank, process in enumerate(processes):
            stack = (folder / f"stack{rank}").read_text()
            assert rank in dying or process.exitcode == 0, f"rank {rank} of {world} ended with {ended[rank]}\n{stack}"
        return [
            None if rank in dying else pickle.loads((folder / f"result{rank}").read_bytes()) for rank in range(world)
        ]


def rank_server() -> Any:
    """Starts processes, which have everything imported and one thread."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def torchrun(options: Sequence[str], script: str, *words: str) -> None:
    """What `torchrun OPTIONS SCRIPT WORDS` does, but its workers are forked from this process, which has everything
    imported: starting them, and starting them again, takes no time. For a process of `rank_server`."""
    torch.set_num_threads(1)
    torch.distributed.run.main([*options, "--start-method", "fork", "--run-path", script, *words])


def as_started_by_torchrun() -> None:
    """For a forked worker: signals do what they do in a new process, and not what they do in torchrun."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _filters() -> list[tuple[Any, ...]]:
    """Which warnings are errors in this test, as arguments of `warnings.filterwarnings`."""

    def pattern(text: Any) -> str:
        return getattr(text, "pattern", text) or ""

    return [
        (action, pattern(message), category, pattern(module), line)
        for action, message, category, module, line in warnings.filters
    ]


def _main(
    rank: int,
    world: int,
    folder: Path,
    timeout: float,
    group_timeout: float,
    someone_dies: bool,
    filters: list[tuple[Any, ...]],
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    gc.freeze()
    torch.set_num_threads(1)
    for action, message, category, module, line in reversed(filters):  # the last one that is set is asked first
        warnings.filterwarnings(action, message, category, module, line)
    with open(folder / f"stack{rank}", "w") as stack:
        faulthandler.enable(file=stack)
        faulthandler.dump_traceback_later(max(timeout - 3.0, 0.5), file=stack)
        try:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{folder / 'store'}",
                rank=rank,
                world_size=world,
                timeout=timedelta(seconds=300),  # to find each other, whatever the test's own
            )
            _set_pg_timeout(timedelta(seconds=group_timeout))
            if someone_dies:  # not while another still connects, for which that would be a failure
                (folder / f"met{rank}").touch()
                wait_until(lambda: all((folder / f"met{other}").exists() for other in range(world)), timeout)
            result = function(rank, world, *args)
            (folder / f"result{rank}").write_bytes(pickle.dumps(result))
            if not someone_dies:
                dist.barrier()
        except BaseException:
            (folder / f"failed{rank}").write_text(f"rank {rank} of {world}:\n{traceback.format_exc()}")
            os._exit(1)  # a group with a lost member cannot be taken down in order
        finally:
            faulthandler.cancel_dump_traceback_later()
            faulthandler.disable()
    if someone_dies:
        os._exit(0)
    dist.destroy_process_group()
