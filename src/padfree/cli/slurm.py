"""Batch scripts for Slurm, which start one torchrun per node.

There are two ways to get a script:

- `padfree launch --slurm FILE --nodes 4 --processes 8 -- sft recipe.toml` writes the script FILE.
- `padfree sft recipe.toml` writes the script RUN_FOLDER.sbatch if the recipe sets `slurm.nodes`. Inside a Slurm job,
  the same command trains.

The settings are checked before the script is written. The script contains the folder, the path of Python and the whole
command.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager
from pathlib import Path

from padfree.cli.on_host import checked_recipe
from padfree.config import Config
from padfree.config.hub import check_names
from padfree.config.output_sections import check_output
from padfree.config.slurm_section import SlurmConfig
from padfree.errors import UserError

SAVE_SECONDS = 120
"""Slurm sends SIGTERM this many seconds before the time limit, for a checkpoint."""

TORCHRUN_SECONDS = SAVE_SECONDS - 10
OPTION = re.compile(r"([a-z][a-z0-9-]*)(?:=(\S.*))?")


def write_script(settings: argparse.Namespace, words: Sequence[str]) -> None:
    """Write the batch script, or print it if --dry-run is given."""
    for name, needed in (("nodes", settings.nodes), ("processes", settings.processes)):
        if needed is None:
            raise UserError(f"--{name}", "missing", f"add --{name} N with the number of {name}, which --slurm needs")
        if needed < 1:
            raise UserError(f"--{name}", "", "give a number of 1 or more", value=needed)
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


def is_job_description(slurm: SlurmConfig) -> bool:
    """Return whether to write a batch script instead of training: `slurm.nodes` is set, and this process was started
    neither in a Slurm job nor by torchrun.
    """
    return slurm.nodes is not None and not os.environ.keys() & {"SLURM_JOB_ID", "WORLD_SIZE"}


def recipe_script(config: Config, words: Sequence[str]) -> tuple[Path, str]:
    """Return the path and the text of the batch script for a recipe with the section `slurm`.

    `words`: the padfree command that the job runs.
    """
    slurm = config.slurm
    assert slurm.nodes is not None, "no batch script was asked for"
    assert slurm.processes is not None, "SlurmConfig refuses this"
    text = sbatch_script(
        words,
        nodes=slurm.nodes,
        processes=slurm.processes,
        restarts=slurm.restarts,
        folder=os.getcwd(),
        python=slurm.python or sys.executable,
        options={name: value or None for name, value in slurm.sbatch.items()},
        setup=slurm.setup,
    )
    return Path(f"{config.run.folder.rstrip('/')}.sbatch"), text


def write_recipe_script(config: Config, words: Sequence[str]) -> None:
    """Write the batch script for a recipe with the section `slurm`, and say how to submit it."""
    check_names(config)
    path, text = recipe_script(config, words)
    check_output(path, "run.folder", makes_folder=True)
    try:
        if path.exists() and path.read_text(encoding="utf-8", errors="replace") != text:
            raise UserError("slurm", f"{path} exists and is another script", "remove it, or set another run.folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        problem = f"{path} cannot be written ({error.strerror})"
        raise UserError("run.folder", problem, "give another folder") from None
    print(f"the job is described in {path}; submit it with: sbatch {shlex.quote(str(path))}")


@contextmanager
def processes_of_job(slurm: SlurmConfig) -> Iterator[None]:
    """Context manager that sets the environment variables `WORLD_SIZE` and `LOCAL_WORLD_SIZE` as in the Slurm job, so
    that a dry run (one process) describes a run with all processes of the job.
    """
    assert slurm.nodes is not None, "no batch script was asked for"
    assert slurm.processes is not None, "SlurmConfig refuses this"
    variables = {"WORLD_SIZE": str(slurm.nodes * slurm.processes), "LOCAL_WORLD_SIZE": str(slurm.processes)}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]


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
    setup: Sequence[str] = (),
) -> str:
    """Return the batch script that runs the padfree command `words`. `options` are options of sbatch, which replace
    defaults. `setup` are lines of shell that the script runs before the command.
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
            *setup,
            f"export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={TORCHRUN_SECONDS}  # seconds for a checkpoint after a signal",
            "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # lets a lost host rejoin",
            'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)',
            f"srun {launched} --nnodes {nodes} --nproc-per-node {processes} --max-restarts {restarts} \\",
            '    --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$first:29500" \\',
            f"    -m padfree {shlex.join(words)}",
            "",
        ]
    )
