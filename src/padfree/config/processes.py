"""The rank of this process, from the environment variables that torchrun sets.

RANK, WORLD_SIZE                 rank of this process and number of processes, over all hosts
LOCAL_RANK, LOCAL_WORLD_SIZE     rank of this process and number of processes, on this host
MASTER_ADDR, MASTER_PORT         host of rank 0, and the port on which the processes connect to it

Without WORLD_SIZE, a run has a single process.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from padfree.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class Processes:
    """The rank of this process and the number of processes, in total and on this host."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    address: str | None = None  # host:port of rank 0; None: a single process

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def processes_of(variables: Mapping[str, str] = os.environ, *, meet: bool = True) -> Processes:
    """Read the rank and the number of processes from environment variables.

    Raise a `UserError` for a variable with an impossible value. `meet`: whether the processes will connect to each
    other. In a dry run they do not, and RANK and MASTER_ADDR may be missing.
    """
    world = _count(variables, "WORLD_SIZE", 1)
    rank = _index(variables, "RANK", world, "WORLD_SIZE")
    local_world = _count(variables, "LOCAL_WORLD_SIZE", world if not meet else 1)
    local_rank = _index(variables, "LOCAL_RANK", None, "")
    if local_world > world:
        raise UserError("LOCAL_WORLD_SIZE", f"{local_world} is more than WORLD_SIZE {world}", f"give {world} or less")
    address = None
    if "WORLD_SIZE" in variables and meet:
        if "RANK" not in variables:
            raise UserError(
                "RANK", f"missing, although WORLD_SIZE is {world}", "start the processes with torchrun, or set RANK"
            )
        if "LOCAL_WORLD_SIZE" in variables and local_rank >= local_world:
            raise UserError(
                "LOCAL_RANK",
                f"{local_rank} is out of range for LOCAL_WORLD_SIZE {local_world}",
                f"give 0 to {local_world - 1}",
            )
        for name, what in (("MASTER_ADDR", "the host of rank 0"), ("MASTER_PORT", "a free port of that host")):
            if not variables.get(name, "").strip():
                fix = f"give {what}, or start the processes with torchrun"
                raise UserError(name, f"missing, although WORLD_SIZE is {world}", fix)
        port = _number(variables, "MASTER_PORT")
        if not 0 < port < 1 << 16:
            raise UserError("MASTER_PORT", "", "give a port, 1 to 65535", value=port)
        address = f"{variables['MASTER_ADDR'].strip()}:{port}"
    return Processes(rank=rank, world=world, local_rank=local_rank, local_world=local_world, address=address)


def _number(variables: Mapping[str, str], name: str) -> int:
    text = variables[name].strip()
    if not text.removeprefix("-").isdecimal() or len(text) > 9:
        raise UserError(
            name, "is not a whole number", "unset it, or start the processes with torchrun", value=variables[name]
        )
    return int(text)


def _count(variables: Mapping[str, str], name: str, default: int) -> int:
    found = _number(variables, name) if name in variables else default
    if found < 1:
        raise UserError(name, "", "give 1 or more processes, or unset it", value=found)
    return found


def _index(variables: Mapping[str, str], name: str, limit: int | None, of: str) -> int:
    found = _number(variables, name) if name in variables else 0
    if found < 0 or (limit is not None and found >= limit):
        among = "" if limit is None else f" for {of} {limit}"
        raise UserError(
            name,
            f"{found} is out of range{among}",
            f"give 0{' or more' if limit is None else f' to {limit - 1}'}",
        )
    return found
