"""A signal asks a run to end; a second one ends it at once.

    with StopSignals() as signals:
        ...                          # SIGTERM or SIGINT: signals.received is True from then on
        if agreed(signals.received, mesh): save and leave

Ranks do not get a signal at the same moment, so they agree: one that has it is enough for all to stop after the step
they are in.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

from padfree.dist import Mesh

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """Notes a first signal for the length of a block. The next one does what it did before the block."""

    def __init__(self) -> None:
        self.received = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python has no say in signals
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = True
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()


def agreed(wanted: bool, mesh: Mesh) -> bool:
    """Whether any rank wants it."""
    flag = torch.tensor(int(wanted), device=mesh.device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=mesh.loss.group)
    return bool(flag.item())
