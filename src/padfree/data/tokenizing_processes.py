"""Tokenise chunks of rows in several processes, and return the results in order.

    chunk 1, chunk 2, ... -> process i tokenises chunks i, i + k, i + 2k, ... -> results in the order of the chunks

Each of the k processes works on one chunk of rows at a time. A process gets its next chunk after the main process has
received the result of the previous one.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Generator, Iterator
from multiprocessing.connection import Connection
from typing import Any

from padfree.data.fields import Fields
from padfree.data.record_source import Chunk
from padfree.data.tokenize import RowTokenizer, TokenizedChunk
from padfree.errors import UserError

BYTES_PER_PROCESS = 16 << 20
"""The minimum number of bytes of text per tokenising process. A process takes seconds to start, so it is not worth
starting one for less text.
"""
BYTES_WITH_IMAGES = 64 << 10
"""The minimum number of bytes of data files per tokenising process, if rows may have images. It is low, because reading
images takes long."""


def worker_count(asked: int | None, size: int, *, images: bool = False) -> int:
    """Return the number of processes that tokenise data of `size` bytes. 0 means: tokenise in this process.

    `asked`: the number that the caller gave, or None for an automatic choice. `images`: whether rows may have images,
    which take more time.
    """
    if asked is not None:
        return asked
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count = min(cores, 8, size // (BYTES_WITH_IMAGES if images else BYTES_PER_PROCESS))
    return count if count > 1 else 0


_Task = tuple[int, Chunk, Fields | None]


def in_order(
    tasks: Iterator[_Task], tokenize: RowTokenizer, num_workers: int
) -> Generator[tuple[int, Chunk, TokenizedChunk], None, None]:
    """Tokenise chunks of rows in `num_workers` processes. Yield the results in the order of the chunks.

    A result is (index of the source, chunk of rows, tokens of the chunk).
    """
    if num_workers == 0:
        for number, chunk, fields in tasks:
            yield number, chunk, tokenize(chunk, fields)
        return
    # Use spawn, because a process that is forked while another thread holds a lock can deadlock.
    context = multiprocessing.get_context("spawn")
    with contextlib.ExitStack() as stack:
        connections: list[Connection[Any, Any]] = []
        for _ in range(num_workers):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, tokenize), daemon=True)
            process.start()
            theirs.close()
            stack.callback(process.join)
            # Callbacks run in reverse order. The connections are closed first, because a process ends when its
            # connection closes. Then the processes are joined.
            stack.callback(ours.close)
            connections.append(ours)
        waiting: list[_Task | None] = [None] * num_workers
        turn = 0
        for task in tasks:
            yield from _taken(connections[turn], waiting[turn])
            _send(connections[turn], task)
            waiting[turn] = task
            turn = (turn + 1) % num_workers
        for _ in range(num_workers):
            yield from _taken(connections[turn], waiting[turn])
            waiting[turn] = None
            turn = (turn + 1) % num_workers


def _taken(connection: Connection[Any, Any], task: _Task | None) -> Iterator[tuple[int, Chunk, TokenizedChunk]]:
    if task is not None:
        try:
            result: TokenizedChunk = connection.recv()
        except (EOFError, OSError):
            raise _died() from None
        yield task[0], task[1], result


def _send(connection: Connection[Any, Any], task: _Task) -> None:
    try:
        connection.send(task[1:])
    except OSError:
        raise _died() from None


def _died() -> UserError:
    return UserError(
        "num_workers",
        "a tokenising process died",
        "read its error output, and if memory ran out, use fewer processes or num_workers=0",
    )


def _serve(connection: Connection[Any, Any], tokenize: RowTokenizer) -> None:
    """Run the main loop of a worker process: receive chunks of rows, tokenise each chunk and send back the result.

    The loop ends when the connection closes.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the worker processes already use all cores
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            chunk, fields = connection.recv()
            connection.send(tokenize(chunk, fields))
