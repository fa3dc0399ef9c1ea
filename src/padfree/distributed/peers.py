"""What the processes of a run do when one of them fails, ends or falls silent.

    watching             one collective: what the backend says when it gives up becomes one line, a `PeerLostError`
    raise_together       an error that one rank has found before it goes on
    failing_together     a block in which an error of one rank becomes everybody's, within seconds

    rank 1   error -> its line into the store of the group -> waits LINGER -> leaves, its connections close
    rank 0   a thread looks into the store every POLL; the collective that it is in fails -> PeerLostError with the line
             (or does not fail, NCCL waits for its timeout: PATIENCE after the line came, the process ends with it)

A process that is killed, stopped, or whose host is cut off can tell nothing. So every process counts in the store, and
who has lost a peer looks whose count stands still:

    rank 3   killed with its host: its count stays 41
    rank 0   its collective fails -> reads all counts, waits SILENCE, reads again -> "rank 3 on b is gone, stuck ..."
             no answer from the store -> names the host that holds it
"""

from __future__ import annotations

import itertools
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _get_default_store

from padfree.errors import UserError

POLL, LINGER, PATIENCE, SILENCE = 0.5, 1.5, 10.0, 3.0
"""Seconds. A process counts every POLL, or less often among very many: see `_Listener`."""
_BLOCKS = itertools.count()  # the store outlives a block, and the next one must not find what ended it
_LEFT = "left"  # in the place of the count of a rank that has ended by itself

_SIGNS_OF_LOSS = ("by peer", "timed out", "timeout", "broken pipe", "connection refused", "remote process", "aborted")


class PeerLostError(RuntimeError):
    """Another process of the group ended, or did not answer within the timeout of the group."""

    searched = False
    """Whether it is already known who is lost, as far as it can be."""


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

    Every rank must enter the block equally often. A rank that is killed can tell nothing; the others then name whoever
    has fallen silent.
    """
    if dist.get_world_size() == 1:
        yield
        return
    rank = dist.get_rank()
    listener = _Listener(_get_default_store(), f"padfree/block/{next(_BLOCKS)}")
    hosts: list[Any] = [None] * dist.get_world_size()
    everybody = dist.group.WORLD
    assert everybody is not None
    with watching("the start", everybody):
        dist.all_gather_object(hosts, socket.gethostname())
    listener.start()
    try:
        yield
    except BaseException as error:  # sys.exit of a user's function and a signal, too: the others must not wait
        listener.left.set()
        if isinstance(error, PeerLostError) and error.searched:
            raise  # of a block inside
        line = " ".join(str(error).split())
        with sigterm_ignored():
            if not _is_loss(error):
                name = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
                listener.tell(f"stopped, because {_named([rank], hosts)} failed: {name}{line}")
                time.sleep(LINGER)  # the store may be this process's; the others must hear of it before it is gone
                raise
            listener.heard.wait(LINGER)
            lost = None if listener.cause else _lost(listener.silent_ranks(), hosts)
        found = PeerLostError(listener.cause or f"{_named([rank], hosts)}: {lost} ({line[:200]})")
        found.searched = True
        raise found from None
    finally:
        listener.leave()


def _lost(silent: Sequence[int] | None, hosts: Sequence[str]) -> str:
    """What is known of the loss: the ranks that are silent, or None if the store is."""
    if silent is None:
        theirs = [rank for rank, host in enumerate(hosts) if host == hosts[0]]
        return f"{_named(theirs, hosts)}, where the store of the run is, cannot be reached; look at what they logged"
    if not silent:
        return "a peer is gone or stuck; look at what the other ranks logged"
    are = "is" if len(silent) == 1 else "are"
    return f"{_named(silent, hosts)} {are} gone, stuck or cut off; look at what was logged there"


def _named(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """`ranks 0 and 1 on a, rank 2 on b`; without hosts if there is one only."""
    several = len(set(hosts)) > 1
    parts = []
    for host in dict.fromkeys(hosts[rank] for rank in ranks):
        theirs = [str(rank) for rank in ranks if hosts[rank] == host]
        numbers = theirs[0] if len(theirs) == 1 else f"{', '.join(theirs[:-1])} and {theirs[-1]}"
        parts.append(f"rank{'s' if len(theirs) > 1 else ''} {numbers}" + (f" on {host}" if several else ""))
    return ", ".join(parts)


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
    """Counts in the store and looks there for the line of a rank that failed.

    Ends the process if the block has not been left PATIENCE after that line.
    """

    def __init__(self, store: Any, key: str) -> None:
        super().__init__(name="first cause", daemon=True)
        self.cause: str | None = None
        self.heard, self.left, self.closed = threading.Event(), threading.Event(), threading.Event()
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._key, self._count = key, 0
        self._main = store
        self._store = store.clone()  # a connection of its own: that of the main thread may be waiting for an answer
        self._polls_per_count = 1 + self._world // 512  # so that a store of very many ranks has time for other things
        self._say(0)

    def _say(self, count: int | str) -> None:
        self._store.set(f"{self._key}/count/{self._rank}", str(count))

    def tell(self, line: str) -> None:
        """The line that ends everybody, unless there is one."""
        with suppress(RuntimeError):  # no store, nobody to tell
            self._main.compare_set(f"{self._key}/cause", "", line)

    def leave(self) -> None:
        self.left.set()
        self.closed.set()
        self.join(LINGER)  # a store that cannot be reached answers late, or never

    def run(self) -> None:
        try:
            for poll in itertools.count(1):
                if self.closed.wait(POLL):
                    self._say(_LEFT)
                    return
                if poll % self._polls_per_count == 0:
                    self._count += 1
                    self._say(self._count)
                if self._store.check([f"{self._key}/cause"]):
                    break
            self.cause = self._store.get(f"{self._key}/cause").decode()
        except RuntimeError:
            return  # whoever held the store is gone
        self.heard.set()
        if not self.left.wait(PATIENCE):
            print(self.cause, file=sys.stderr, flush=True)  # noqa: T201  nobody else is left to say it
            os._exit(1)

    def silent_ranks(self) -> list[int] | None:
        """Ranks whose count stands still; None if the store does not answer."""
        found: list[list[int]] = []
        asking = threading.Thread(target=self._ask, args=(found,), name="who is silent", daemon=True)
        asking.start()
        asking.join(2 * self._silence() + PATIENCE)
        return found[0] if found else None

    def _silence(self) -> float:
        return max(SILENCE, 4 * POLL * self._polls_per_count)

    def _ask(self, found: list[list[int]]) -> None:
        try:
            store = self._main.clone()
            before = self._counts(store)
            time.sleep(self._silence())
            after = self._counts(store)
        except RuntimeError:
            return
        same = [rank for rank in range(self._world) if before[rank] == after[rank] != _LEFT]
        found.append([rank for rank in same if rank != self._rank])

    def _counts(self, store: Any) -> list[str]:
        return [store.get(f"{self._key}/count/{rank}").decode() for rank in range(self._world)]


def raise_together(error: UserError | str | None, group: ProcessGroup | None = None) -> None:
    """Raise a `UserError` on every rank if any rank has one, or its line: no rank must wait for one that has ended."""
    errors: list[UserError | str | None] = [error]
    if dist.is_initialized():
        errors = [None] * dist.get_world_size(group)
        dist.all_gather_object(errors, error, group=group)
    for found in errors:
        if found is not None:
            raise found if isinstance(found, UserError) else UserError.of(found)
