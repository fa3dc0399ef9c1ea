"""The batch script of `padfree launch --slurm FILE`: one torchrun per node, as in `padfree launch --hosts`.

Examples:

    padfree launch --slurm job.sh --nodes 4 --processes 8 --sbatch time=24:00:00 -- sft sft run.folder=/shared/first
    sbatch job.sh

The script is complete: it names the folder, the Python and every setting, and does not read the environment of the
shell that submits it. The command and its settings are checked before the script is written.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import chdir
from pathlib import Path

from padfree.cli.on_host import checked_recipe
from padfree.errors import UserError

SAVE_SECONDS = 120
"""Seconds before the time limit at which Slurm sends SIGTERM, for a last checkpoint."""

TORCHRUN_SECONDS = SAVE_SECONDS - 10
OPTION = re.compile(r"([a-z][a-z0-9-]*)(?:=(\S.*))?")


def write_script(settings: argparse.Namespace, words: Sequence[str]) -> None:
    """Write the batch script, or print it if --dry-run is given."""
    for name, needed in (("nodes", settings.nodes), ("processes", settings.processes)):
        if needed is None:
            raise UserError(f"--{name}", "missing", f"give the number of {name} with --slurm")
        if needed < 1:
            raise UserError(f"--{name}", "", "give 1 or more", value=needed)
    path, folder = Path(settings.slurm).absolute(), Path(settings.folder).absolute()
    try:
        with chdir(folder):
            checked_recipe(list(words))
    except OSError as error:
        raise UserError("--folder", f"{folder} cannot be entered ({error.strerror})", "give another folder") from None
    text = sbatch_script(
        words,
        nodes=settings.nodes,
        processes=settings.processes,
        restarts=settings.restarts,
        folder=str(folder),
        python=settings.python,
        options=dict(_option(given) for given in settings.sbatch),
    )
    if settings.dry_run:
        print(text, end="")
        return
    if path.exists():
        raise UserError("--slurm", f"{path} exists", "give another name, or remove this file")
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError("--slurm", f"{path} cannot be written ({error.strerror})", "give another file") from None
    print(f"sbatch {shlex.quote(settings.slurm)}")


def _option(given: str) -> tuple[str, str | None]:
    found = OPTION.fullmatch(given)
    if found is None:
        raise UserError("--sbatch", "", "give an option of sbatch as name=value, or name", value=given)
    return found[1], found[2]


def sbatch_script(
    words: Sequence[str],
    *,
    nodes: int,
    processes: int,
    restarts: int,
    folder: str,
    python: str,
    options: Mapping[str, str | None],
) -> str:
    """Return the batch script that runs the padfree command `words`. `options` are options of sbatch, which replace
    defaults.
    """
    directives: dict[str, str | None] = {
        "job-name": "padfree",
        "nodes": str(nodes),
        "ntasks-per-node": "1",
        "gpus-per-node": str(processes),
        "signal": f"TERM@{SAVE_SECONDS}",
        "requeue": None,
        **options,
    }
    lines = [f"#SBATCH --{name}" + ("" if value is None else f"={value}") for name, value in directives.items()]
    launched = shlex.join([python, "-m", "torch.distributed.run"])
    return "\n".join(
        [
            "#!/bin/bash",
            *lines,
            "",
            "set -euo pipefail",
            shlex.join(["cd", folder]),
            f"export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={TORCHRUN_SECONDS}  # seconds for a checkpoint after a signal",
            "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # lets a lost host rejoin",
            'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)',
            f"srun {launched} --nnodes {nodes} --nproc-per-node {processes} --max-restarts {restarts} \\",
            '    --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$first:29500" \\',
            f"    -m padfree {shlex.join(words)}",
            "",
        ]
    )
