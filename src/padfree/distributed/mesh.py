"""Starting the processes of a run, and the groups they form.

    8 processes, context 2, replicate 2          rank  0 1 | 2 3 || 4 5 | 6 7

One DeviceMesh has them all, with the dimensions `replicate`, `shard` and `context`: [2, 2, 2]. Every group is made of
some of these.

    context    who share one packed row          0 1 | 2 3 | 4 5 | 6 7    context
    data       who hold different samples        0 2 4 6 | 1 3 5 7        replicate, shard
    fsdp       who share one set of weights      0 1 2 3 | 4 5 6 7        shard, context   (with `replicate` as another
                                                                                           dimension, if that is > 1)
    loss       whose sums make one loss          0 1 2 3 4 5 6 7          replicate, shard, context

Groups are asked for by purpose: `mesh.context.group`, `mesh.data.rank`, `fully_shard(model, mesh=mesh.fsdp)`. Sharding
rules ask for others by dimensions: `mesh.over(shard=("shard",), replicate=("context",))`.
Neighbouring ranks share a row, because context parallelism talks in every layer and machines hold neighbouring ranks.
Weights are sharded over data and context together, so that the gradients of context ranks are summed as well.

One process needs no launcher: without torchrun's environment `init_distributed` makes a group of one, and everything
downstream is the same code.
"""

from __future__ import annotations

import math
import os
import socket
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.rendezvous import rendezvous

from padfree.config.processes import Processes, processes_of
from padfree.distributed.peers import PeerLostError, failing_together
from padfree.errors import UserError

DEFAULT_TIMEOUT = 600.0
"""Seconds."""
LONGEST_TIMEOUT = 1e8
"""Seconds, three years: the backends count in nanoseconds."""


DIMENSIONS = ("replicate", "shard", "context")
"""Of the mesh of all processes, the slowest first: neighbouring ranks differ in the last one."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Axis:
    """One group of processes, and this process's place in it."""

    rank: int
    size: int
    group: ProcessGroup


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Mesh:
    """The groups of this process, by purpose."""

    device: torch.device
    devices: DeviceMesh  # all processes, with the dimensions DIMENSIONS
    data: Axis
    context: Axis
    loss: Axis
    fsdp: DeviceMesh
    contexts: Mapping[int, Axis] = field(default_factory=dict)
    """By how many ranks share a row, where the plan decides that row by row; empty: `context` share every row."""
    groups: Groups

    def sharing(self, width: int | None) -> Axis:
        """The ranks that share a row with this one, which are `width` where the plan says it."""
        return self.context if width is None else self.contexts[width]

    def over(self, *, shard: Sequence[str], replicate: Sequence[str] = ()) -> DeviceMesh:
        """A mesh for `fully_shard`, of these dimensions of `devices`: those of `shard` are taken for one, and those of
        `replicate` for another before it, if there are any. All ranks call it alike."""
        return self.groups.mesh(self.device.type, shard, replicate)


def init_distributed(*, device: str = "auto", timeout: float = DEFAULT_TIMEOUT) -> torch.device:
    """Join the other processes of the run; this process's device.

    `timeout` is in seconds, for one collective: that long a lost peer can go unnoticed. `device` is "cpu", "cuda" or
    "auto". Does nothing but choose the device if the processes have met before.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise UserError("device", "", "choose auto, cpu or cuda", value=device)
    if not 0 < timeout <= LONGEST_TIMEOUT:
        raise UserError("timeout", f"{timeout} s", f"give more than 0, and {LONGEST_TIMEOUT:.0e} at most")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("device", "'cuda', but torch sees no GPU", "choose cpu, or install a CUDA build of torch")
    cuda = torch.cuda.is_available() if device == "auto" else device == "cuda"
    processes = processes_of(meet=not dist.is_initialized())
    local_rank = processes.local_rank
    if cuda and local_rank >= torch.cuda.device_count():
        raise UserError(
            "LOCAL_RANK", f"{local_rank} on a machine of {torch.cuda.device_count()} GPUs", "start one process per GPU"
        )
    chosen = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(chosen)
    if dist.is_initialized():
        return chosen
    # Host tensors travel as well (metrics, checkpoints), so gloo is always there.
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    limit = timedelta(seconds=timeout)
    if processes.address is not None:
        with _meeting(processes, timeout):
            store, rank, world = next(rendezvous("env://", timeout=limit))
            if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")):
                store.set_timeout(limit)
                store = fresh_store(store, rank, world, timeout)
            dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit)
    else:
        alone = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=alone, rank=0, world_size=1, timeout=limit)
    return chosen


@contextmanager
def _meeting(processes: Processes, timeout: float) -> Iterator[None]:
    """One line for whatever keeps the processes of a run from meeting, with the variable that is to blame."""
    assert processes.address is not None
    host, _, port = processes.address.rpartition(":")
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:  # asked first: the store would ask again and again until the timeout
        raise UserError(
            "MASTER_ADDR", f"is not known here ({error.strerror})", "give the host of rank 0", value=host
        ) from None
    try:
        yield
    except PeerLostError:
        raise
    except RuntimeError as error:  # of the store and of the backend, whose classes change from version to version
        reason = " ".join(str(error).split())
        lowered = reason.lower()
        if "address already in use" in lowered or "eaddrinuse" in lowered:
            raise UserError(
                "MASTER_PORT", f"{port} is in use on this host", "give a free port, the same to every process"
            ) from None
        if "clients joined" in lowered:
            raise UserError(
                "WORLD_SIZE",
                f"{processes.world}, but not as many processes came to {processes.address} within {timeout:g} s "
                "(run.timeout)",
                "start them all, with the same MASTER_ADDR and MASTER_PORT",
            ) from None
        raise UserError(
            "MASTER_ADDR",
            f"rank {processes.rank} of {processes.world} did not meet the others at {processes.address} "
            f"({reason[:200]})",
            "start them all, with the same MASTER_ADDR and MASTER_PORT",
        ) from None


def fresh_store(store: Store, rank: int, world: int, timeout: float = DEFAULT_TIMEOUT) -> Store:
    """A part of the store with nothing in it of an earlier start of the processes. Every process calls it.

    torchrun keeps its store when it starts the processes again (PyTorch's issue 135712), and the new ones would wait
    for the addresses of dead ones. So nothing is believed that does not answer a word that was chosen just now:

        rank r   says its word, waits for the answer to it, the name of this start, and confirms the name
        rank 0   answers whatever word each rank has said last, again and again, until all have confirmed
    """
    word = uuid.uuid4().hex
    if rank > 0:
        store.set(f"padfree/word/{rank}", word)
        name = store.get(f"padfree/answer/{word}").decode()
        store.set(f"padfree/confirmed/{name}/{rank}", "")
        return PrefixStore(name, store)
    missing, deadline = set(range(1, world)), time.monotonic() + timeout
    while missing:
        if time.monotonic() > deadline:
            raise PeerLostError(f"rank 0: ranks {sorted(missing)} did not start within {timeout:.0f} s")
        for other in sorted(missing):
            if store.check([f"padfree/confirmed/{word}/{other}"]):
                missing.remove(other)
            elif store.check([f"padfree/word/{other}"]):
                store.set(f"padfree/answer/{store.get(f'padfree/word/{other}').decode()}", word)
        time.sleep(0.05)
    return PrefixStore(word, store)


class RankGroups(NamedTuple):
    """Who is with whom, rank by rank."""

    context: NDArray[np.int64]  # [rows, context]
    shards: NDArray[np.int64]  # [replicate, shards]; its columns are the replicas of a shard


def rank_groups(world: int, context: int, replicate: int) -> RankGroups:
    """Neighbours share a row, and neighbours hold one set of weights: machines hold neighbouring ranks."""
    return RankGroups(np.arange(world).reshape(-1, context), np.arange(world).reshape(replicate, -1))


class Groups:
    """Process groups over some of the dimensions of all processes, each made when it is first asked for.

    All ranks ask alike. Not init_device_mesh: its groups would wait for a lost peer as long as the backend's own
    default.
    """

    def __init__(self, ranks: NDArray[np.int64], timeout: float) -> None:
        """`ranks` [replicate, shard, context]."""
        self.ranks, self._timeout = ranks, timedelta(seconds=timeout)
        self._made: dict[tuple[int, bytes], Axis] = {}

    def axis(self, *dimensions: str) -> Axis:
        """The processes that differ from this one along these dimensions alone."""
        return self.among(self._moved(dimensions).reshape(-1, self._size(dimensions)))

    def among(self, groups: NDArray[np.int64]) -> Axis:
        """The one of these groups [number, size] that this process belongs to."""
        number, size = groups.shape
        key = (size, groups.tobytes())
        if key not in self._made:
            if number == 1:
                group = dist.group.WORLD
            else:
                group, _ = dist.new_subgroups_by_enumeration(  # type: ignore[no-untyped-call]
                    groups.tolist(), timeout=self._timeout
                )
            assert group is not None
            self._made[key] = Axis(rank=group.rank(), size=size, group=group)
        return self._made[key]

    def mesh(self, device_type: str, shard: Sequence[str], replicate: Sequence[str] = ()) -> DeviceMesh:
        """Of one dimension, `fsdp`, or of two, `replicate` and `fsdp`."""
        sharded = self.axis(*shard)
        if not replicate:
            return DeviceMesh.from_group(sharded.group, device_type, mesh_dim_names=("fsdp",))
        tables = self._moved((*replicate, *shard)).reshape(-1, self._size(replicate), self._size(shard))
        own = next(table for table in tables if (table == dist.get_rank()).any())
        groups = [self.axis(*replicate).group, sharded.group]
        return DeviceMesh.from_group(groups, device_type, mesh=own.tolist(), mesh_dim_names=("replicate", "fsdp"))

    def devices(self, device_type: str) -> DeviceMesh:
        """All processes."""
        groups = [self.axis(name).group for name in DIMENSIONS]
        return DeviceMesh.from_group(groups, device_type, mesh=self.ranks.tolist(), mesh_dim_names=DIMENSIONS)

    def _size(self, dimensions: Sequence[str]) -> int:
        return math.prod(self.ranks.shape[DIMENSIONS.index(name)] for name in dimensions)

    def _moved(self, dimensions: Sequence[str]) -> NDArray[np.int64]:
        """The ranks with these dimensions last."""
        chosen = [DIMENSIONS.index(name) for name in dimensions]
        return self.ranks.transpose(*(each for each in range(3) if each not in chosen), *chosen)


def make_mesh(
    device: torch.device | str,
    *,
    context: int = 1,
    replicate: int = 1,
    contexts: Sequence[int] = (),
    timeout: float = DEFAULT_TIMEOUT,
) -> Mesh:
    """The groups of a run of data × context processes, in which `replicate` sets of processes hold all weights each.

    With `contexts`, each a divisor of the number of processes, there are groups of all these sizes of neighbours.

    `timeout` is that of a collective of these groups, as in `init_distributed`.
    """
    world = dist.get_world_size()
    for name, size in (("context", context), ("replicate", replicate)):
        if size < 1:
            raise UserError(name, "", "give 1 or more", value=size)
    if world % (context * replicate):
        raise UserError(
            "parallel.context",
            f"{context} times parallel.replicate {replicate} does not divide {world} processes",
            f"start a multiple of {context * replicate} processes, or lower one of them",
        )
    device = torch.device(device)
    groups = Groups(np.arange(world).reshape(replicate, -1, context), timeout)
    return Mesh(
        device=device,
        loss=groups.axis(*DIMENSIONS),
        data=groups.axis("replicate", "shard"),
        context=groups.axis("context"),
        fsdp=groups.mesh(device.type, ("shard", "context"), ("replicate",) if replicate > 1 else ()),
        devices=groups.devices(device.type),
        contexts={width: groups.among(np.arange(world).reshape(-1, width)) for width in contexts},
        groups=groups,
    )


@contextmanager
def distributed(*, device: str = "auto", timeout: float = DEFAULT_TIMEOUT) -> Iterator[torch.device]:
    """`init_distributed` for the length of a block; the group is taken down at the end. Ranks fail together in it."""
    already = dist.is_initialized()
    chosen = init_distributed(device=device, timeout=timeout)
    try:
        with failing_together():
            yield chosen
    finally:
        if not already:
            dist.destroy_process_group()
