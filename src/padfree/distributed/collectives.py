"""Collectives on the first dimension of tensors, without autograd.

All collectives work with gloo on the CPU and NCCL on CUDA. If another rank is gone or stuck, a collective raises
`PeerLostError` within the timeout of the group. `Ring` transfers tensors during computation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from padfree.distributed.peers import watching

# torch 2.13 renamed these functions.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather_rows(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Concatenate the tensors [n, ...] of all ranks: [world * n, ...]. n must be the same on every rank."""
    gathered = tensor.new_empty(group.size() * tensor.shape[0], *tensor.shape[1:])
    with watching("all_gather_rows", group):
        _all_gather(gathered, tensor.contiguous(), group=group)
    return gathered


def reduce_scatter_rows(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Sum the tensors [world * n, ...] of all ranks, and return this rank's part of the sum: [n, ...].

    The sum has the dtype of the input.
    """
    assert tensor.shape[0] % group.size() == 0
    own = tensor.new_empty(tensor.shape[0] // group.size(), *tensor.shape[1:])
    with watching("reduce_scatter_rows", group):
        _reduce_scatter(own, tensor.contiguous(), group=group)
    return own


def exchange_rows(tensor: Tensor, send: Sequence[int], receive: Sequence[int], group: ProcessGroup) -> Tensor:
    """Send the first `send[0]` elements of the tensor to rank 0, the next `send[1]` to rank 1, and so on.

    Return the elements from all ranks, `receive[r]` of them from rank r.
    """
    assert tensor.shape[0] == sum(send), (tuple(tensor.shape), send)
    received = tensor.new_empty(sum(receive), *tensor.shape[1:])
    with watching("exchange_rows", group):
        dist.all_to_all_single(received, tensor.contiguous(), list(receive), list(send), group=group)
    return received


def gather_objects(own: Any, group: ProcessGroup, what: str) -> list[Any]:
    """Return the Python objects of all ranks, in rank order. `what` names the collective in error messages."""
    everybody: list[Any] = [None] * group.size()
    with watching(what, group):
        dist.all_gather_object(everybody, own, group=group)
    return everybody


class Ring:
    """Sends tensors to the next rank of a group and receives tensors from the previous rank.

        ring.post(*tensors)         # start both transfers
        ...                         # compute with `tensors`, without changing them
        tensors = ring.collect()    # what the previous rank posted

    Two rings can transfer at once if their tags differ and all ranks post in the same order.
    """

    def __init__(self, group: ProcessGroup, tag: int = 0) -> None:
        self.group, self.tag = group, tag
        self.next = (group.rank() + 1) % group.size()
        self.previous = (group.rank() - 1) % group.size()
        self._arriving: tuple[Tensor, ...] = ()
        self._works: list[Any] = []
        self._leaving: tuple[Tensor, ...] = ()

    def post(self, *tensors: Tensor) -> None:
        assert not self._works, "call collect before the next post"
        self._leaving = tuple(tensor.contiguous() for tensor in tensors)
        self._arriving = tuple(torch.empty_like(tensor) for tensor in self._leaving)
        transfers = [
            dist.P2POp(operation, tensor, group=self.group, tag=self.tag, group_peer=peer)
            for operation, side, peer in (
                (dist.isend, self._leaving, self.next),
                (dist.irecv, self._arriving, self.previous),
            )
            for tensor in side
        ]
        with watching("Ring.post", self.group):
            self._works = dist.batch_isend_irecv(transfers)

    def collect(self) -> tuple[Tensor, ...]:
        with watching("Ring.collect", self.group):
            for work in self._works:
                work.wait()
        arrived, self._works, self._leaving, self._arriving = self._arriving, [], (), ()
        return arrived
