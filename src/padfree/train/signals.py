"""A signal asks a run to end; a second one ends it at once.

    with StopSignals() as signals:
        ...                          # SIGTERM or SIGINT: signals.received is True from then on
        if agreed(signals.received, mesh): save and leave

Ranks do not get a signal at the same moment, so they agree: one that has it is enough for all to stop after the step
they are in.

Python runs signal handlers between two of its own instructions. While a step waits for a GPU or for other ranks there
are none, and two signals can look like one. So a thread reads them from a pipe as they come. A launcher may pass on a
signal that the process has been sent already: within `SAME_REQUEST_SECONDS` of the first it is the same request.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from padfree.distributed import Mesh

SIGNALS = (signal.SIGTERM, signal.SIGINT)
SAME_REQUEST_SECONDS = 1.0


class StopSignals:
    """Notes a first signal for the length of a block. The next one ends the process, with 128 + its number."""

    def __init__(self) -> None:
        self.received = False
        self._before: dict[signal.Signals, Any] = {}
        self._pipe: tuple[int, int] | None = None
        self._wakeup_before = -1
        self._thread: threading.Thread | None = None

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python has no say in signals
            self._pipe = os.pipe()
            os.set_blocking(self._pipe[1], False)
            self._wakeup_before = signal.set_wakeup_fd(self._pipe[1])
            self._thread = threading.Thread(target=self._listen, args=(self._pipe[0],), name="signals", daemon=True)
            self._thread.start()
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def _note(self, *_: Any) -> None:
        self.received = True

    def _listen(self, pipe: int) -> None:
        first: float | None = None
        while number := os.read(pipe, 1)[0]:
            if number not in SIGNALS:
                continue
            now = time.monotonic()
            if first is None:
                first, self.received = now, True
            elif now - first > SAME_REQUEST_SECONDS:
                os._exit(128 + number)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pipe is None or self._thread is None:
            return
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        read, write = self._pipe
        os.write(write, bytes(1))
        self._thread.join()
        os.close(write)
        os.close(read)


def agreed(wanted: bool, mesh: Mesh) -> bool:
    """Whether any rank wants it."""
    flag = torch.tensor(int(wanted), device=mesh.device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=mesh.loss.group)
    return bool(flag.item())
