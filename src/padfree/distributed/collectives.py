"""Moving rows of tensors between the processes of a group, without autograd and without knowing what they mean.

    all_gather_rows      [n, ...]  -> [world * n, ...]   everybody's rows, in the order of the ranks
    reduce_scatter_rows  [world * n, ...]  -> [n, ...]   the sum over ranks of the n rows that belong to this one
    exchange_rows        [sum(send), ...]  -> [sum(receive), ...]   send[r] rows to rank r, receive[r] rows from it
    Ring                 tensors -> tensors of the same shapes from the previous rank, while one computes

All of them work with gloo on the CPU and with NCCL on CUDA. A peer that is gone or stuck ends them with one line, a
`PeerLostError`, within the timeout of the group (see `padfree.distributed.mesh`).

    failing_together     a block in which an error of one rank becomes everybody's, within seconds

    rank 1   error -> its line into the store of the group -> waits LINGER -> leaves, its connections close
    rank 0   a thread looks into the store every POLL; the collective that it is in fails -> PeerLostError with the line
             (or does not fail, NCCL waits for its timeout: PATIENCE after the line came, the process ends with it)
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _get_default_store

# The names before and since torch 2.13, of the same functions.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

POLL, LINGER, PATIENCE = 0.5, 1.5, 10.0
"""Seconds."""
_BLOCKS = itertools.count()  # the store outlives a block, and the next one must not find what ended it

_SIGNS_OF_LOSS = ("by peer", "timed out", "timeout", "broken pipe", "connection refused", "remote process", "aborted")


class PeerLostError(RuntimeError):
    """Another process of the group ended, or did not answer within the timeout of the group."""


@contextmanager
def watching(what: str, group: ProcessGroup) -> Iterator[None]:
    """When the backend gives up waiting, say in one line which collective failed in which group."""
    begin = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        if isinstance(error, PeerLostError) or not _is_loss(error):
            raise
        ranks, rank = dist.get_process_group_ranks(group), dist.get_rank()
        raise PeerLostError(
            f"rank {rank}: {what} in the group of ranks {ranks} failed after {time.monotonic() - begin:.1f} s, "
            f"a peer is gone or stuck; look at what ranks {[r for r in ranks if r != rank]} logged ({reason[:200]})"
        ) from None


def _is_loss(error: BaseException) -> bool:
    """Whether a backend says by it that somebody else is gone."""
    known = isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in _SIGNS_OF_LOSS)
    return isinstance(error, PeerLostError) or known


@contextmanager
def failing_together() -> Iterator[None]:
    """An error that ends the block on one rank ends it on all; the others raise the line of that error.

    Every rank must enter the block equally often. A rank that is killed can tell nothing; the others then say how they
    noticed.
    """
    if dist.get_world_size() == 1:
        yield
        return
    store, rank, key = _get_default_store(), dist.get_rank(), f"padfree/cause/{next(_BLOCKS)}"
    listener = _Listener(store, key)
    listener.start()
    try:
        yield
    except Exception as error:
        listener.left.set()
        line = " ".join(str(error).split())
        with sigterm_ignored():
            if not _is_loss(error):
                name = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
                with suppress(RuntimeError):  # no store, nobody to tell
                    store.compare_set(key, "", f"stopped, because rank {rank} failed: {name}{line}")
                time.sleep(LINGER)  # the store may be this process's; the others must hear of it before it is gone
                raise
            listener.heard.wait(LINGER)
        if listener.cause is not None:
            raise PeerLostError(listener.cause) from None
        if isinstance(error, PeerLostError):
            raise
        raise PeerLostError(
            f"rank {rank}: a peer is gone or stuck; look at what the other ranks logged ({line[:200]})"
        ) from None
    finally:
        listener.left.set()
        listener.closed.set()
        listener.join()


@contextmanager
def sigterm_ignored() -> Iterator[None]:
    """A launcher sends SIGTERM when another rank has ended; the reason must be told before this process ends, too."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Listener(threading.Thread):
    """Looks for the line of a rank that failed. Ends the process if the block has not been left PATIENCE after it."""

    def __init__(self, store: Any, key: str) -> None:
        super().__init__(name="first cause", daemon=True)
        self.cause: str | None = None
        self.heard, self.left, self.closed = threading.Event(), threading.Event(), threading.Event()
        self._key = key
        self._store = store.clone()  # a connection of its own: that of the main thread may be waiting for an answer

    def run(self) -> None:
        while not self.closed.wait(POLL):
            try:
                if not self._store.check([self._key]):
                    continue
                self.cause = self._store.get(self._key).decode()
            except RuntimeError:
                return  # whoever held the store is gone
            self.heard.set()
            if not self.left.wait(PATIENCE):
                print(self.cause, file=sys.stderr, flush=True)  # noqa: T201  nobody else is left to say it
                os._exit(1)
            return


def raise_together(error: str | None, group: ProcessGroup | None = None) -> None:
    """`ValueError` on every rank if any has an error, so that nobody goes on and waits for a rank that ended."""
    errors: list[str | None] = [error]
    if dist.is_initialized():
        errors = [None] * dist.get_world_size(group)
        dist.all_gather_object(errors, error, group=group)
    for message in errors:
        if message is not None:
            raise ValueError(message)


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
