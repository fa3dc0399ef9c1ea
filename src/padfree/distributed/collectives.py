"""Moving rows of tensors between the processes of a group, without autograd and without knowing what they mean.

    all_gather_rows      [n, ...]  -> [world * n, ...]   everybody's rows, in the order of the ranks
    reduce_scatter_rows  [world * n, ...]  -> [n, ...]   the sum over ranks of the n rows that belong to this one
    exchange_rows        [sum(send), ...]  -> [sum(receive), ...]   send[r] rows to rank r, receive[r] rows from it
    gather_objects       what every rank says, on every rank: for small things
    Ring                 tensors -> tensors of the same shapes from the previous rank, while one computes

All of them work with gloo on the CPU and with NCCL on CUDA. A peer that is gone or stuck ends them with one line, a
`PeerLostError`, within the timeout of the group (see `padfree.distributed.peers`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from padfree.distributed.peers import watching

# The names before and since torch 2.13, of the same functions.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather_rows(rows: Tensor, group: ProcessGroup) -> Tensor:
    """[n, ...] -> [world * n, ...]. Every rank gives as many rows."""
    gathered = rows.new_empty(group.size() * rows.shape[0], *rows.shape[1:])
    with watching("all_gather_rows", group):
        _all_gather(gathered, rows.contiguous(), group=group)
    return gathered


def reduce_scatter_rows(rows: Tensor, group: ProcessGroup) -> Tensor:
    """[world * n, ...] -> [n, ...], summed over ranks in the dtype that is given."""
    assert rows.shape[0] % group.size() == 0
    own = rows.new_empty(rows.shape[0] // group.size(), *rows.shape[1:])
    with watching("reduce_scatter_rows", group):
        _reduce_scatter(own, rows.contiguous(), group=group)
    return own


def exchange_rows(rows: Tensor, send: Sequence[int], receive: Sequence[int], group: ProcessGroup) -> Tensor:
    """[sum(send), ...] -> [sum(receive), ...]: rows for rank 0 first, rows from rank 0 first."""
    assert rows.shape[0] == sum(send), (tuple(rows.shape), send)
    received = rows.new_empty(sum(receive), *rows.shape[1:])
    with watching("exchange_rows", group):
        dist.all_to_all_single(received, rows.contiguous(), list(receive), list(send), group=group)
    return received


def gather_objects(own: Any, group: ProcessGroup, what: str) -> list[Any]:
    """What every rank says, in the order of the ranks; `what` names the exchange in messages."""
    everybody: list[Any] = [None] * group.size()
    with watching(what, group):
        dist.all_gather_object(everybody, own, group=group)
    return everybody


class Ring:
    """Passes tensors to the next rank while those of the previous one arrive.

        ring.post(block)          # starts both transfers and returns
        ...                       # compute with `block`, which must not change meanwhile
        block = ring.collect()    # what the previous rank had posted

    Two rings of one group may be under way at once if they have different tags, and if every rank posts in the same
    order.
    """

    def __init__(self, group: ProcessGroup, tag: int = 0) -> None:
        self.group, self.tag = group, tag
        self.next = (group.rank() + 1) % group.size()
        self.previous = (group.rank() - 1) % group.size()
        self._arriving: tuple[Tensor, ...] = ()
        self._works: list[Any] = []
        self._leaving: tuple[Tensor, ...] = ()

    def post(self, *tensors: Tensor) -> None:
        assert not self._works, "collect what was posted before"
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
