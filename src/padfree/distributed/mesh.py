"""Initialise the process group of a run, and make its groups of processes.

For example, 8 processes with context 2 (ranks per pack) and replicate 2 (copies of the weights) form these groups of
ranks:

    context   0 1, 2 3, 4 5, 6 7     share a pack (the samples of a micro-batch)
    data      0 2 4 6, 1 3 5 7       have different samples
    fsdp      0 1 2 3, 4 5 6 7       shard one copy of the weights
    loss      all ranks              sum one loss

Neighbouring ranks share a pack, because they are usually on one machine and context parallelism communicates in every
layer.
"""

from __future__ import annotations

import math
import socket
import sys
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
"""The default time limit of one collective operation, in seconds."""
LONGEST_TIMEOUT = 1e8
"""The longest time limit in seconds, about three years. The backends count in nanoseconds and would overflow."""


DIMENSIONS = ("replicate", "shard", "context")
"""The dimensions of the mesh of all processes.

The last dimension varies fastest: neighbouring ranks differ in it.
"""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Axis:
    """One process group, and the rank of this process in the group."""

    rank: int
    size: int
    group: ProcessGroup


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Mesh:
    """The process groups that this process belongs to, by purpose (`context`, `data`, `fsdp`, `loss`)."""

    device: torch.device
    devices: DeviceMesh  # the mesh of all processes, with the dimensions in `DIMENSIONS`
    data: Axis
    context: Axis
    loss: Axis
    fsdp: DeviceMesh
    contexts: Mapping[int, Axis] = field(default_factory=dict)
    """The context groups of this process (ranks that share a pack), by number of ranks.

    Empty, unless the run chooses the number of context ranks for each pack.
    """
    experts: DeviceMesh | None = None
    """The mesh for the weights of experts. The mesh dimension `expert` divides the experts among ranks. None if the
    weights of experts are sharded like all other weights.
    """
    groups: Groups

    def sharing(self, width: int | None) -> Axis:
        """Return the group of the ranks that share a pack with this rank.

        `width` is the number of ranks that share the pack, if the run chooses this number for each pack. None stands
        for the context group of `parallel.context` ranks.
        """
        return self.context if width is None else self.contexts[width]

    def over(self, *, shard: Sequence[str], replicate: Sequence[str] = ()) -> DeviceMesh:
        """Return a mesh for `fully_shard` over some of the mesh dimensions. Every rank must call it.

        The dimensions in `shard` are merged into one dimension. If `replicate` names dimensions, they are merged into a
        second dimension, which comes first.
        """
        return self.groups.mesh(self.device.type, shard, replicate)


def init_distributed(*, device: str = "auto", timeout: float = DEFAULT_TIMEOUT) -> torch.device:
    """Initialise the default process group, and return the device of this process.

    Without a launcher, the group has one process. `timeout` is the time limit of one collective in seconds; a lost peer
    may go unnoticed for this long. `device` is "cpu", "cuda" or "auto".
    """
    if device not in ("auto", "cpu", "cuda"):
        raise UserError("device", "is not a device type", "choose 'auto', 'cpu' or 'cuda'", value=device)
    if not 0 < timeout <= LONGEST_TIMEOUT:
        raise UserError(
            "timeout", f"{timeout} s is out of range", f"give more than 0 and at most {LONGEST_TIMEOUT:.0e} s"
        )
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("device", "is 'cuda', but torch sees no GPU", "choose 'cpu', or install a CUDA build of torch")
    cuda = torch.cuda.is_available() if device == "auto" else device == "cuda"
    processes = processes_of(meet=not dist.is_initialized())
    local_rank = processes.local_rank
    if cuda and local_rank >= torch.cuda.device_count():
        raise UserError(
            "LOCAL_RANK",
            f"is {local_rank} on a machine with {torch.cuda.device_count()} GPUs",
            "start one process per GPU",
        )
    chosen = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(chosen)
    if dist.is_initialized():
        return chosen
    # gloo is always included, because tensors in host memory are communicated too (metrics, checkpoints).
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    limit = timedelta(seconds=timeout)
    if processes.address is not None:
        with _rendezvous_errors(processes, timeout):
            store = _rendezvous_store(processes.address, processes.rank, processes.world, limit)
            store.set_timeout(limit)
            store = fresh_store(store, processes.rank, processes.world, timeout)
            dist.init_process_group(
                backend, store=store, rank=processes.rank, world_size=processes.world, timeout=limit
            )
    else:
        alone = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=alone, rank=0, world_size=1, timeout=limit)
    return chosen


@contextmanager
def _rendezvous_errors(processes: Processes, timeout: float) -> Iterator[None]:
    """Context manager that turns a failed rendezvous into a `UserError` about the environment variable to correct."""
    assert processes.address is not None
    host, _, port = processes.address.rpartition(":")
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:  # check the host name first, because the rendezvous store would retry until the timeout
        raise UserError(
            "MASTER_ADDR",
            f"cannot be resolved on this host ({error.strerror})",
            "set it to the host name of rank 0",
            value=host,
        ) from None
    try:
        yield
    except PeerLostError:
        raise
    except RuntimeError as error:  # raised by the store or the backend; the class differs between PyTorch versions
        reason = " ".join(str(error).split())
        lowered = reason.lower()
        if "address already in use" in lowered or "eaddrinuse" in lowered:
            raise UserError(
                "MASTER_PORT", f"{port} is in use on this host", "give every process the same free port"
            ) from None
        if "clients joined" in lowered:
            raise UserError(
                "WORLD_SIZE",
                f"is {processes.world}, but fewer processes connected to {processes.address} within {timeout:g} s "
                "(run.timeout)",
                "start all processes with the same MASTER_ADDR and MASTER_PORT",
            ) from None
        raise UserError(
            "MASTER_ADDR",
            f"rank {processes.rank} of {processes.world} could not join the other ranks at {processes.address} "
            f"({reason[:200]})",
            "start all processes with the same MASTER_ADDR and MASTER_PORT",
        ) from None


_STORES: dict[tuple[str, int, int], Store] = {}
"""The connections of this process to rendezvous stores, by address, rank and number of processes."""


def _rendezvous_store(address: str, rank: int, world: int, timeout: timedelta) -> Store:
    """Return this process's connection to the rendezvous store at `address`.

    The connection outlives the process groups. Rank 0 may host the store, and another rank may already wait there for
    the next process group when rank 0 destroys the current one.
    """
    key = (address, rank, world)
    if key not in _STORES:
        _STORES[key], _, _ = next(rendezvous("env://", timeout=timeout))
    return _STORES[key]


def fresh_store(store: Store, rank: int, world: int, timeout: float = DEFAULT_TIMEOUT) -> Store:
    """Return a view of the rendezvous store without the keys of earlier process groups. Every rank must call it.

    The store outlives a process group, and torchrun keeps it when it restarts the processes (PyTorch issue 135712). It
    may therefore contain addresses at which no process listens.
    """
    # All ranks use the nonce of rank 0 as key prefix. Rank 0 sends it in reply to the nonce of each other rank.
    nonce = uuid.uuid4().hex
    if rank > 0:
        store.set(f"padfree/nonce/{rank}", nonce)
        try:
            name = store.get(f"padfree/answer/{nonce}").decode()
        except dist.DistStoreError:
            raise PeerLostError(f"rank {rank}: rank 0 did not start within {timeout:.0f} s; read its log") from None
        store.set(f"padfree/confirmed/{name}/{rank}", "")
        return PrefixStore(name, store)
    missing, deadline = set(range(1, world)), time.monotonic() + timeout
    while missing:
        if time.monotonic() > deadline:
            raise PeerLostError(
                f"rank 0: ranks {sorted(missing)} did not start within {timeout:.0f} s; read their logs"
            )
        for other in sorted(missing):  # reply until a rank confirms, because its nonce may be that of an earlier group
            if store.check([f"padfree/confirmed/{nonce}/{other}"]):
                missing.remove(other)
            elif store.check([f"padfree/nonce/{other}"]):
                store.set(f"padfree/answer/{store.get(f'padfree/nonce/{other}').decode()}", nonce)
        time.sleep(0.05)
    return PrefixStore(nonce, store)


class RankGroups(NamedTuple):
    """The ranks of each context group (ranks that share one pack), and of each replica of the weights.

    A replica is a set of ranks that together hold all weights.
    """

    context: NDArray[np.int64]  # [packs, context]
    shards: NDArray[np.int64]  # [replicas, shards]; each column holds the ranks with replicas of one shard


def rank_groups(world: int, context: int, replicate: int) -> RankGroups:
    """Return which of the `world` ranks share a pack (context groups), and which share one copy of all weights
    (replicas).

    Each group has consecutive ranks.
    """
    return RankGroups(np.arange(world).reshape(-1, context), np.arange(world).reshape(replicate, -1))


class Groups:
    """Creates process groups over dimensions of the mesh, each group on first use. Every rank must call the methods."""

    def __init__(self, ranks: NDArray[np.int64], timeout: float) -> None:
        """Arrange the ranks as a mesh.

        `ranks` [replicate, shard, context]: the rank at each position of the mesh. `timeout`: the time limit of one
        collective in the groups, in seconds.
        """
        self.ranks, self._timeout = ranks, timedelta(seconds=timeout)
        self._made: dict[tuple[int, bytes], Axis] = {}

    def axis(self, *dimensions: str) -> Axis:
        """Return the group of the processes that differ from this process only in the mesh dimensions `dimensions`."""
        return self.among(self._moved(dimensions).reshape(-1, self._size(dimensions)))

    def among(self, groups: NDArray[np.int64]) -> Axis:
        """Create one process group for each list of ranks `groups[i]`, and return the group of this process."""
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
        """Return a mesh for FSDP2 with the dimension `fsdp`, preceded by `replicate` if there are replicas."""
        sharded = self.axis(*shard)
        if not replicate:
            return DeviceMesh.from_group(sharded.group, device_type, mesh_dim_names=("fsdp",))
        tables = self._moved((*replicate, *shard)).reshape(-1, self._size(replicate), self._size(shard))
        own = next(table for table in tables if (table == dist.get_rank()).any())
        groups = [self.axis(*replicate).group, sharded.group]
        return DeviceMesh.from_group(groups, device_type, mesh=own.tolist(), mesh_dim_names=("replicate", "fsdp"))

    def devices(self, device_type: str) -> DeviceMesh:
        """Return a mesh of all processes with the dimensions [replicate, shard, context]."""
        groups = [self.axis(name).group for name in DIMENSIONS]
        return DeviceMesh.from_group(groups, device_type, mesh=self.ranks.tolist(), mesh_dim_names=DIMENSIONS)

    def experts(self, device_type: str, expert: int) -> DeviceMesh:
        """Return a mesh for the weights of experts, in which groups of `expert` neighbouring ranks divide the
        experts.
        """
        # 8 ranks, 2 replicas, expert 2: ranks 0 and 2 shard one half of the experts, ranks 1 and 3 the other half.
        table = self.ranks.reshape(len(self.ranks), -1, expert)
        groups = [
            self.among(np.moveaxis(table, dim, -1).reshape(-1, size)).group for dim, size in enumerate(table.shape)
        ]
        names = ("replicate", "fsdp", "expert")
        if len(table) == 1:
            return DeviceMesh.from_group(groups[1:], device_type, mesh=table[0].tolist(), mesh_dim_names=names[1:])
        return DeviceMesh.from_group(groups, device_type, mesh=table.tolist(), mesh_dim_names=names)

    def _size(self, dimensions: Sequence[str]) -> int:
        return math.prod(self.ranks.shape[DIMENSIONS.index(name)] for name in dimensions)

    def _moved(self, dimensions: Sequence[str]) -> NDArray[np.int64]:
        """Return the array of ranks, transposed so that the mesh dimensions named in `dimensions` come last."""
        chosen = [DIMENSIONS.index(name) for name in dimensions]
        return self.ranks.transpose(*(each for each in range(3) if each not in chosen), *chosen)


def check_expert_ranks(expert: int, shards: int) -> None:
    """Raise a `UserError` unless `expert` divides `shards`, the number of processes that share one set of weights."""
    if shards % expert:
        raise UserError(
            "parallel.expert",
            f"{expert} does not divide the {shards} processes that share one set of weights",
            "set it to a divisor of this number of processes",
        )


def make_mesh(
    device: torch.device | str,
    *,
    context: int = 1,
    replicate: int = 1,
    expert: int = 1,
    contexts: Sequence[int] = (),
    timeout: float = DEFAULT_TIMEOUT,
) -> Mesh:
    """Make the process groups of a run. Every rank must call it.

    - `context`: the number of ranks that share a pack.
    - `replicate`: the number of copies of the weights.
    - `expert`: the number of ranks that divide the experts among them.
    - `contexts`: further sizes of context groups, divisors of the number of processes.
    - `timeout`: the limit of one collective, in seconds.
    """
    world = dist.get_world_size()
    for name, size in (("context", context), ("replicate", replicate), ("expert", expert)):
        if size < 1:
            raise UserError(name, "", "give 1 or more", value=size)
    if world % (context * replicate):
        raise UserError(
            "parallel.context",
            f"{context} × {replicate} (parallel.context × parallel.replicate) does not divide the {world} processes",
            f"start a multiple of {context * replicate} processes, or lower one of the two settings",
        )
    check_expert_ranks(expert, world // replicate)
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
        experts=groups.experts(device.type, expert) if expert > 1 else None,
        groups=groups,
    )


@contextmanager
def distributed(*, device: str = "auto", timeout: float = DEFAULT_TIMEOUT) -> Iterator[torch.device]:
    """Context manager that initialises the process group, yields the device, and destroys the group at the end.

    The arguments are those of `init_distributed`. If one rank fails inside the block, all ranks fail.
    """
    already, excepthook = dist.is_initialized(), sys.excepthook
    chosen = init_distributed(device=device, timeout=timeout)
    torch_excepthook = sys.excepthook  # init_process_group installs a hook that begins each line with the rank
    try:
        with failing_together():
            yield chosen
    finally:
        if not already:
            dist.destroy_process_group()
        if sys.excepthook is torch_excepthook:
            sys.excepthook = excepthook
