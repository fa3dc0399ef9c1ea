"""End all processes of a run, with a clear message, if one of them fails, exits or stops responding.

A rank that fails inside `failing_together` writes its error message to the key-value store that all ranks share. The
other ranks read the message. When their collective fails, they raise a `PeerLostError` with this message.

A killed process writes no message. So every rank also increments a heartbeat counter in the store. Without a message,
the error names the ranks whose counters stand still, and their hosts.
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
"""Times in seconds.

- POLL: the interval between reads of the shared key-value store.
- LINGER: how long a failed rank waits before it exits.
- PATIENCE: how long another rank may continue after it has read the error message.
- SILENCE: how long a heartbeat must stand still before the rank counts as lost.
"""
_BLOCKS = itertools.count()  # numbers the blocks; the number is part of store keys, because the store outlives a block
_LEFT = "left"  # the value that replaces the counter of a rank that has left the block normally

_SIGNS_OF_LOSS = ("by peer", "timed out", "timeout", "broken pipe", "connection refused", "remote process", "aborted")


class PeerLostError(RuntimeError):
    """Raised if another process of the group has exited, or does not respond within the timeout."""

    searched = False
    """True if the lost ranks have already been searched for, so that an enclosing block does not search again."""


@contextmanager
def watching(what: str, group: ProcessGroup) -> Iterator[None]:
    """Context manager around one collective. It raises a `PeerLostError` if the backend gives up waiting for another
    rank.

    `what`: the name of the collective, for the error message. The message also contains the ranks of `group`.
    """
    begin = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        if isinstance(error, PeerLostError) or not is_loss(error):
            raise
        ranks, rank = dist.get_process_group_ranks(group), dist.get_rank()
        raise PeerLostError(
            f"rank {rank}: {what} in the group of ranks {ranks} failed after {time.monotonic() - begin:.1f} s, "
            f"a peer is gone or stuck; read the logs of ranks {[r for r in ranks if r != rank]} ({reason[:200]})"
        ) from None


def is_loss(error: BaseException) -> bool:
    """Return whether an error of gloo or NCCL means that another process is gone."""
    known = isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in _SIGNS_OF_LOSS)
    return isinstance(error, PeerLostError) or known


@contextmanager
def failing_together() -> Iterator[None]:
    """Context manager: an error on one rank inside its block ends all ranks with the same message.

    Every rank must enter such blocks the same number of times. If a rank was killed, the other ranks raise an error
    that names the killed rank.
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
    # BaseException includes sys.exit in user code and signals: the other ranks must not wait for this one
    except BaseException as error:
        listener.left.set()
        if isinstance(error, PeerLostError) and error.searched:
            raise  # a nested block has already searched for the lost ranks
        line = " ".join(str(error).split())
        with sigterm_ignored():
            if not is_loss(error):
                name = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
                listener.publish_cause(f"stopped, because {_rank_names([rank], hosts)} failed: {name}{line}")
                # other ranks must read the message before this process exits, because it may host the store
                time.sleep(LINGER)
                raise
            listener.cause_seen.wait(LINGER)
            lost = None if listener.cause else _describe_loss(listener.silent_ranks(), hosts)
        found = PeerLostError(listener.cause or f"{_rank_names([rank], hosts)}: {lost} ({line[:200]})")
        found.searched = True
        raise found from None
    finally:
        listener.leave()


def _describe_loss(silent: Sequence[int] | None, hosts: Sequence[str]) -> str:
    """Return a text that says which processes are gone.

    `silent`: the ranks whose heartbeat stands still, or None if the rendezvous store does not answer. `hosts`: the host
    name of each rank.
    """
    if silent is None:
        theirs = [rank for rank, host in enumerate(hosts) if host == hosts[0]]
        return f"{_rank_names(theirs, hosts)}, where the rendezvous store is, cannot be reached; read the logs there"
    if not silent:
        return "a peer is gone or stuck; read the logs of the other ranks"
    are = "is" if len(silent) == 1 else "are"
    return f"{_rank_names(silent, hosts)} {are} gone, stuck or cut off; read the logs there"


def _rank_names(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Format ranks with their hosts, as in `ranks 0 and 1 on a, rank 2 on b`."""
    several = len(set(hosts)) > 1
    parts = []
    for host in dict.fromkeys(hosts[rank] for rank in ranks):
        theirs = [str(rank) for rank in ranks if hosts[rank] == host]
        numbers = theirs[0] if len(theirs) == 1 else f"{', '.join(theirs[:-1])} and {theirs[-1]}"
        parts.append(f"rank{'s' if len(theirs) > 1 else ''} {numbers}" + (f" on {host}" if several else ""))
    return ", ".join(parts)


@contextmanager
def sigterm_ignored() -> Iterator[None]:
    """Context manager that ignores SIGTERM from the launcher, so that this rank can report its own error."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Listener(threading.Thread):
    """A thread that increments this rank's heartbeat counter and waits for the error message of a failed rank.

    After such a message, the main thread has PATIENCE seconds to leave the `failing_together` block. Then this thread
    ends the process.
    """

    def __init__(self, store: Any, key: str) -> None:
        super().__init__(name="padfree peers", daemon=True)
        self.cause: str | None = None
        self.cause_seen, self.left, self.closed = threading.Event(), threading.Event(), threading.Event()
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._key, self._count = key, 0
        self._main = store
        self._store = store.clone()  # a separate connection, because that of the main thread may be blocked
        # with very many ranks, count less often, to limit the load on the store
        self._polls_per_count = 1 + self._world // 512
        self._publish_count(0)

    def _publish_count(self, count: int | str) -> None:
        self._store.set(f"{self._key}/count/{self._rank}", str(count))

    def publish_cause(self, line: str) -> None:
        """Write the error message `line` to the store that all ranks share, unless another rank was first."""
        with suppress(RuntimeError):  # the store is gone
            self._main.compare_set(f"{self._key}/cause", "", line)

    def leave(self) -> None:
        self.left.set()
        self.closed.set()
        self.join(LINGER)  # do not wait longer, because a store that cannot be reached never answers

    def run(self) -> None:
        try:
            for poll in itertools.count(1):
                if self.closed.wait(POLL):
                    self._publish_count(_LEFT)
                    return
                if poll % self._polls_per_count == 0:
                    self._count += 1
                    self._publish_count(self._count)
                if self._store.check([f"{self._key}/cause"]):
                    break
            self.cause = self._store.get(f"{self._key}/cause").decode()
        except RuntimeError:
            return  # the process that hosts the store is gone
        self.cause_seen.set()
        if not self.left.wait(PATIENCE):  # with NCCL, a collective may hang until its timeout
            print(self.cause, file=sys.stderr, flush=True)  # noqa: T201  no other thread can report it
            os._exit(1)

    def silent_ranks(self) -> list[int] | None:
        """Return the ranks whose heartbeat counter no longer changes, or None if the store does not answer."""
        found: list[list[int]] = []
        asking = threading.Thread(target=self._find_silent, args=(found,), name="padfree silent ranks", daemon=True)
        asking.start()
        asking.join(2 * self._silence() + PATIENCE)
        return found[0] if found else None

    def _silence(self) -> float:
        return max(SILENCE, 4 * POLL * self._polls_per_count)

    def _find_silent(self, found: list[list[int]]) -> None:
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
    """Raise a `UserError` on every rank of `group` (by default all ranks) if any of them has an error.

    Every rank of the group must call this. `error` is this rank's `UserError` or its message, or None.
    """
    errors: list[UserError | str | None] = [error]
    if dist.is_initialized():
        errors = [None] * dist.get_world_size(group)
        dist.all_gather_object(errors, error, group=group)
    for found in errors:
        if found is not None:
            raise found if isinstance(found, UserError) else UserError.of(found)
