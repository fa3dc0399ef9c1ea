"""Buckets of weights and their transfer: the code shared by the trainer and the servers.

    bucket    q q q . k k v v v    uint8: tensors q, k, v; padding (.) so that each starts at a multiple of ALIGNMENT

              connect              describe a bucket                             transfer it
    trainer   join_group(rank 0)   sends a BucketForm by the engine's protocol   broadcasts it, or writes a file
    server    Receiver.join        calls Receiver.tensors(form)                  receives it, or reads the file

Each server has its own process group, so a server that dies does not affect the others, and a restarted server joins a
new group. A bucket is one broadcast to all workers of a server, with gloo on CPUs and NCCL on GPUs.

The server imports this module too. Its environment has torch and safetensors, but not all dependencies of padfree.
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
    """Names, dtypes and shapes of the tensors of a bucket.

    `file`: the safetensors file that holds the tensors, or None if the tensors are broadcast.
    """

    names: Sequence[str]
    dtypes: Sequence[str]  # torch names such as bfloat16
    shapes: Sequence[Sequence[int]]
    file: str | None = None

    def __post_init__(self) -> None:
        assert len(self.names) == len(self.dtypes) == len(self.shapes)

    @property
    def num_bytes(self) -> int:
        return self._ends()[-1]

    @property
    def transfer_info(self) -> dict[str, Any]:
        """Return the fields as JSON values, from which the server makes `BucketForm(**transfer_info)`."""
        transfer_info: dict[str, Any] = {"names": self.names, "dtypes": self.dtypes, "shapes": self.shapes}
        return transfer_info if self.file is None else {**transfer_info, "file": self.file}

    def _ends(self) -> list[int]:
        """Return the end offset of each tensor in bytes, with a leading 0."""
        ends = [0]
        for dtype, shape in zip(self.dtypes, self.shapes, strict=True):
            size = prod(shape) * getattr(torch, dtype).itemsize
            ends.append(ends[-1] + -(-size // ALIGNMENT) * ALIGNMENT)
        return ends

    def parts(self, buffer: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the name of each tensor and the tensor, as a view of `buffer` [num_bytes] uint8."""
        for name, dtype, shape, begin in zip(self.names, self.dtypes, self.shapes, self._ends()[:-1], strict=True):
            kind = getattr(torch, dtype)
            yield name, buffer[begin : begin + prod(shape) * kind.itemsize].view(kind).view(tuple(shape))


def join_group(
    store: Store, rank: int, world: int, *, backend: str, address: str, device: torch.device, timeout: float
) -> Any:
    """Join a process group that is independent of the default one, and return it.

    `store`: the rendezvous store. `world`: number of processes. `address`: the network address of this process.
    """
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
    # Pass the address, because the host name may resolve to an address that the server cannot reach.
    options._devices = [kind.create_device(hostname=address)]
    return kind(store, rank, world, options)


def broadcast(group: Any, buffer: Tensor) -> None:
    """Broadcast `buffer` from rank 0, which is the trainer, to all processes of the group."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    group.broadcast([buffer], options).wait()


def address_towards(host: str, port: int) -> str:
    """Return the address of the network interface through which this machine reaches `host`."""
    family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)  # a datagram socket sends nothing here
        return str(probe.getsockname()[0])


class Receiver:
    """Receives buckets in a worker of a server. `device`: the device of the worker."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._group: Any = None
        self._buffer_device = device  # the device of buffers for broadcast buckets

    def join(self, transfer_info: Mapping[str, Any], rank: int) -> None:
        """Connect to the trainer, which has rank 0. `rank`: the rank of this worker, from 1 on.

        `transfer_info`: the argument of `ServerApi.join`.
        """
        self._group = None
        if transfer_info["transport"] == "files":
            return
        if transfer_info["backend"] == "nccl" and self.device.type != "cuda":
            raise RuntimeError(f"padfree: the trainer is on a GPU, but this worker is on {self.device}")
        address, port, world, timeout = (
            transfer_info["address"],
            transfer_info["port"],
            transfer_info["world"],
            transfer_info["timeout"],
        )
        limit = timedelta(seconds=timeout)
        store = TCPStore(address, port, world, is_master=False, timeout=limit, wait_for_workers=False)
        self._buffer_device = self.device if transfer_info["backend"] == "nccl" else torch.device("cpu")
        own = address_towards(address, port)
        self._group = join_group(
            store, rank, world, backend=transfer_info["backend"], address=own, device=self.device, timeout=timeout
        )

    def leave(self) -> None:
        self._group = None

    def tensors(self, form: BucketForm) -> Iterator[tuple[str, Tensor]]:
        """Receive a bucket. Yield the name of each tensor and the tensor, which stays valid after the next bucket."""
        if form.file is not None:
            return _read(form, self.device)
        if self._group is None:
            raise RuntimeError("padfree: a bucket is broadcast, but there is no process group; join one first")
        buffer = torch.empty(form.num_bytes, dtype=torch.uint8, device=self._buffer_device)
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
