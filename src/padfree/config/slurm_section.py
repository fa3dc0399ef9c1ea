"""The section `slurm`: a batch script for Slurm in place of a run on this machine."""

from __future__ import annotations

import re
from dataclasses import dataclass

from padfree.config.setting import check_table, need_of, setting
from padfree.errors import need

OPTION = re.compile(r"[a-z][a-z0-9-]*")
"""The name of an option of sbatch, without the two dashes."""

NODES = need_of("nodes", fix="set slurm.nodes=2, or leave it out")


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmConfig:
    """Training in a Slurm job: with `slurm.nodes`, a training command writes a batch script and does not train, unless
    it already runs inside a job.
    """

    nodes: int | None = setting(
        None,
        least=1,
        about="Number of nodes. If it is set, a training command writes the batch script RUN_FOLDER.sbatch and does "
        "not train. Inside a Slurm job and under torchrun, all settings of slurm are ignored.",
    )
    processes: int | None = setting(None, least=1, about="Number of processes per node, one per GPU.", needs=NODES)
    restarts: int = setting(0, least=0, about="Maximum number of restarts by torchrun after a failure.", needs=NODES)
    sbatch: dict[str, str] = setting(
        factory=dict,
        about='Options of sbatch, such as { time = "24:00:00", partition = "h200" }; an empty string is an option '
        "without a value.",
        needs=NODES,
    )
    setup: tuple[str, ...] = setting(
        (),
        about='Lines of shell before the run starts, such as ["module load cuda"].',
        needs=NODES,
    )
    python: str | None = setting(
        None,
        about="Path of the Python executable on the nodes. The default, none, stands for the path of the Python that "
        "writes the batch script.",
        filled="give the path of a Python executable, or leave it out",
        needs=NODES,
    )

    def __post_init__(self) -> None:
        check_table(self, "slurm.")
        fix = "set slurm.processes=8, the number of GPUs of a node"
        need(self.nodes is None or self.processes is not None, "slurm.processes", self.processes, fix)
        for name, value in self.sbatch.items():
            fix = "give names of options of sbatch without dashes, as in slurm.sbatch.time=24:00:00"
            need(OPTION.fullmatch(name) is not None, "slurm.sbatch", name, fix)
            need(value.isprintable(), f"slurm.sbatch.{name}", value, "give a value of one line")
        for line in self.setup:
            need(
                line.isprintable() and bool(line.strip()),
                "slurm.setup",
                line,
                "give one shell line per list entry, without tabs or line breaks",
            )
