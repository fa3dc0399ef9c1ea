"""A bucket of weights and how it travels: what the trainer and the servers must know alike.

    bucket    q q q . k k v v v    uint8, one broadcast; every tensor begins at a multiple of ALIGNMENT bytes

    trainer   join_group(rank 0)   BucketForm over the engine's own protocol   broadcast, or a safetensors file
    server    Receiver.join        Receiver.tensors(form): names and tensors   the same

A group belongs to one server: a server that dies takes nothing from the others, and one that comes back gets another
group. A bucket is one broadcast to all workers of a server: gloo between CPUs, NCCL between GPUs, with the same code.

This module is imported in a server's environment, which has torch and safetensors, and not all that padfree needs.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store, TCPStore

ALIGNMENT = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketForm:
    """What a bucket holds; `file` is where it is, None: it comes by broadcast."""

    names: Sequence[str]
    dtypes: Sequence[str]  # of torch, such as bfloat16
    shapes: Sequence[Sequence[int]]
    file: str | None = None

    def __post_init__(self) -> None:
        assert len(self.names) == len(self.dtypes) == len(self.shapes)

    @property
    def num_bytes(self) -> int:
        return self._ends()[-1]

    @property
    def transfer_info(self) -> dict[str, Any]:
        """As JSON, for `BucketForm(**transfer_info)` on the other side."""
        transfer_info: dict[str, Any] = {"names": self.names, "dtypes": self.dtypes, "shapes": self.shapes}
        return transfer_info if self.file is None else {**transfer_info, "file": self.file}

    def _ends(self) -> list[int]:
        """The end of each tensor's bytes, and 0 in front."""
        ends = [0]
        for dtype, shape in zip(self.dtypes, self.shapes, strict=True):
            size = prod(shape) * getattr(torch, dtype).itemsize
            ends.append(ends[-1] + -(-size // ALIGNMENT) * ALIGNMENT)
        return ends

    def parts(self, buffer: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The tensors of a buffer [num_bytes] uint8, each a view of it."""
        for name, dtype, shape, begin in zip(self.names, self.dtypes, self.shapes, self._ends()[:-1], strict=True):
            kind = getattr(torch, dtype)
            yield name, buffer[begin : begin + prod(shape) * kind.itemsize].view(kind).view(tuple(shape))


def join_group(
    store: Store, rank: int, world: int, *, backend: str, address: str, device: torch.device, timeout: float
) -> Any:
    """A process group of its own, beside whatever groups the process has; `address` is this process's."""
    limit = timedelta(seconds=timeout)
    options: Any
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        torch.cuda.set_device(device)
        return dist.ProcessGroupNCCL(store, rank, world, options)
    kind: Any = dist.ProcessGroupGloo
    options = kind._Options()
    options._timeout = limit
    options._devices = [kind.create_device(hostname=address)]  # not what the host's name may stand for
    return kind(store, rank, world, options)


def broadcast(group: Any, buffer: Tensor) -> None:
    """From rank 0, the trainer."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    group.broadcast([buffer], options).wait()


def address_towards(host: str, port: int) -> str:
    """The address of this machine that `host` sees."""
    family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)  # of a datagram socket: nothing is sent
        return str(probe.getsockname()[0])


class Receiver:
    """The server's side, in each of its workers. `device` is the worker's."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._group: Any = None
        self._place = device  # where broadcast buckets arrive

    def join(self, transfer_info: Mapping[str, Any], rank: int) -> None:
        """What the trainer says before its first bucket (`ServerApi.join`); ranks of workers begin at 1."""
        self._group = None
        if transfer_info["way"] == "files":
            return
        if transfer_info["backend"] == "nccl" and self.device.type != "cuda":
            raise RuntimeError(f"padfree: the trainer is on a GPU, this worker is on {self.device}")
        address, port, world, timeout = (
            transfer_info["address"],
            transfer_info["port"],
            transfer_info["world"],
            transfer_info["timeout"],
        )
        limit = timedelta(seconds=timeout)
        store = TCPStore(address, port, world, is_master=False, timeout=limit, wait_for_workers=False)
        self._place = self.device if transfer_info["backend"] == "nccl" else torch.device("cpu")
        own = address_towards(address, port)
        self._group = join_group(
            store, rank, world, backend=transfer_info["backend"], address=own, device=self.device, timeout=timeout
        )

    def leave(self) -> None:
        self._group = None

    def tensors(self, form: BucketForm) -> Iterator[tuple[str, Tensor]]:
        """The names and tensors of a bucket. Tensors stay valid when the next bucket arrives."""
        if form.file is not None:
            return _read(form, self.device)
        if self._group is None:
            raise RuntimeError("padfree: a bucket by broadcast, but no process group; join one first")
        buffer = torch.empty(form.num_bytes, dtype=torch.uint8, device=self._place)
        broadcast(self._group, buffer)
        return form.parts(buffer)


def _read(form: BucketForm, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    with safe_open(form.file, framework="pt", device=str(device)) as file:
        for name, dtype, shape in zip(form.names, form.dtypes, form.shapes, strict=True):
            tensor = file.get_tensor(name)
            if (str(tensor.dtype), list(tensor.shape)) != (f"torch.{dtype}", list(shape)):
                raise RuntimeError(f"padfree: {name} in {form.file} is {tensor.dtype} {list(tensor.shape)}")
            yield name, tensor
