"""The transfer of weights in buckets (groups of tensors that are sent together), for the trainer and the servers.

The trainer describes a bucket in an API request (`BucketForm`). It then broadcasts the tensors or writes them to a
file, and the server receives them with `Receiver.tensors`.

Each server has its own process group with the trainer. A server that dies therefore does not affect other servers.

The server imports this module too. Its environment has torch and safetensors, but not all dependencies of padfree.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import groupby
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store, TCPStore

from padfree.rollout.engines.servers.differences import RegionDifference, apply, bits_of, checksum

ALIGNMENT = 64  # bytes: the offset of each tensor in a bucket is a multiple of it


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketForm:
    """Describes a bucket (tensors that are sent together), so that the server can receive it.

    `file`: the safetensors file that holds the tensors; None if they are broadcast. `keep`: whether the server keeps a
    copy.

    `differences`: None for whole tensors, otherwise the changed regions. The bucket then holds two tensors per region:
    positions and new values.
    """

    names: Sequence[str]
    dtypes: Sequence[str]  # torch names such as bfloat16
    shapes: Sequence[Sequence[int]]
    file: str | None = None
    keep: bool = False
    differences: Sequence[RegionDifference] | None = None

    def __post_init__(self) -> None:
        assert len(self.names) == len(self.dtypes) == len(self.shapes)
        assert self.differences is None or len(self.names) == 2 * len(self.differences)

    @classmethod
    def of(cls, transfer_info: Mapping[str, Any]) -> BucketForm:
        """Make the description of a bucket from the dict `transfer_info`, which the trainer has sent."""
        differences = transfer_info.get("differences")
        found = None if differences is None else [RegionDifference(**one) for one in differences]
        return cls(**{**transfer_info, "differences": found})

    @property
    def num_bytes(self) -> int:
        return self._ends()[-1]

    @property
    def transfer_info(self) -> dict[str, Any]:
        """Return this description of a bucket as a dict of JSON values. `BucketForm.of` is the inverse function."""
        return asdict(self)

    def _ends(self) -> list[int]:
        """Return the byte offset of each tensor in the bucket. The last entry is the size of the bucket in bytes."""
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
    """Join a process group that is independent of torch.distributed's default process group, and return it.

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
    """Return this machine's address on the network interface through which it reaches `host`."""
    family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)  # a datagram socket sends nothing here
        return str(probe.getsockname()[0])


class Receiver:
    """Receives buckets (weight tensors that are sent together) in a worker of a server.

    `device`: the device of the worker.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._group: Any = None
        self._buffer_device = device  # the device of buffers for broadcast buckets
        self._kept: dict[str, Tensor] = {}  # in host memory: the tensors of the last weight sync, by name

    def join(self, transfer_info: Mapping[str, Any], rank: int) -> None:
        """Connect to the trainer, which has rank 0. `rank`: the rank of this worker, from 1 on.

        `transfer_info`: the dict that the trainer has sent: the transport, "group" or "files", and for "group" the
        backend, the rendezvous address and the number of processes.
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
        self._kept = {}

    def tensors(self, form: BucketForm) -> Iterator[tuple[str, Tensor]]:
        """Receive a bucket. Yield the name of each tensor and the tensor, which stays valid after the next bucket.

        If the bucket holds differences, they are applied to the tensors of the last weight sync, and the resulting
        whole tensors are yielded.
        """
        arrived = self._arrived(form)
        if form.differences is not None:
            yield from self.changed(form.differences, dict(arrived))
            return
        for name, tensor in arrived:
            if form.keep:
                self.keep(name, tensor)
            else:
                self._kept.pop(name, None)
            yield name, tensor

    def keep(self, name: str, tensor: Tensor) -> None:
        """Keep a copy of a whole tensor, to which later differences are applied."""
        self._kept[name] = host_copy(tensor)

    def changed(
        self, differences: Sequence[RegionDifference], arrived: Mapping[str, Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """Apply differences to the tensors that `keep` has stored. Yield the name of each tensor and the whole tensor.

        `arrived`: for each difference, in order, the encoded positions and the new values. Raise an error if a checksum
        differs from the trainer's.
        """
        encoded = iter(arrived.values())
        for name, regions in groupby(differences, key=lambda difference: difference.name):
            if name not in self._kept:
                raise RuntimeError(
                    f"padfree: received only the changes of {name}, but this server has no copy of the old tensor"
                )
            kept = self._kept[name]
            whole = kept.to(self.device)  # the same tensor on the CPU
            for difference in regions:
                region = whole[difference.region]
                bits = bits_of(region)
                apply(bits, difference.encoding, next(encoded).to(self.device), next(encoded).to(self.device))
                if checksum(bits) != difference.checksum:
                    raise RuntimeError(f"padfree: after the update, the checksum of {name} differs from the trainer's")
                if not region.is_contiguous():  # then `bits` is a copy
                    region.copy_(bits.view(region.dtype).view(region.shape))
            if whole is not kept:
                kept.copy_(whole)
            yield name, whole

    def _arrived(self, form: BucketForm) -> Iterator[tuple[str, Tensor]]:
        """Receive the tensors of a bucket in the form in which the trainer encoded them."""
        if form.file is not None:
            return _read(form, self.device)
        if self._group is None:
            raise RuntimeError("padfree: a bucket is broadcast, but there is no process group; join one first")
        buffer = torch.empty(form.num_bytes, dtype=torch.uint8, device=self._buffer_device)
        broadcast(self._group, buffer)
        return form.parts(buffer)


def host_copy(tensor: Tensor) -> Tensor:
    """Return a copy of the tensor in host memory. The memory is pinned if the tensor is on a GPU."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda").copy_(tensor)


def _read(form: BucketForm, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    with safe_open(form.file, framework="pt", device=str(device)) as file:
        for name, dtype, shape in zip(form.names, form.dtypes, form.shapes, strict=True):
            tensor = file.get_tensor(name)
            if (str(tensor.dtype), list(tensor.shape)) != (f"torch.{dtype}", list(shape)):
                raise RuntimeError(
                    f"padfree: {name} in {form.file} has an unexpected dtype or shape: "
                    f"{tensor.dtype} {list(tensor.shape)}"
                )
            yield name, tensor
