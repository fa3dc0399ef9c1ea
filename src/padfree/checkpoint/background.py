"""Whether a checkpoint is written in the background: the choice of `checkpoint.asynchronous=auto`.

    rank   host   size      free        on host a: a copy of 3 GiB, 20 GiB are free    at most half: in the background
    0      a      1.5 GiB   20 GiB      on host b: a copy of 3 GiB,  4 GiB are free    more than half: not
    1      a      1.5 GiB   20 GiB
    2      b      1.5 GiB    4 GiB      -> no rank writes in the background
    3      b      1.5 GiB    4 GiB

Before a checkpoint is written in the background, its tensors are copied to host memory, and all ranks of a host hold
their copies at the same time. A copy may take at most half of the free memory. The other half is left for the page
cache of the written files, and for memory that training, servers and reward functions allocate meanwhile.

A small checkpoint is written in less than a second, so a background write saves almost nothing. A model on the CPU, or
offloaded to it, already takes host memory, and the writing thread would take processor time from its training.
docs/experiments/background-checkpoints.md has the measurements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

USABLE_FRACTION = 0.5
"""The largest fraction of the free host memory that the copies of a checkpoint may take."""

LEAST_BYTES = 1 << 28
"""If no rank writes this many bytes, the checkpoint is not written in the background."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankCopy:
    """The copy of a checkpoint's tensors that one rank would make in host memory before a background write."""

    host: str
    size: int  # bytes of the tensors that the rank would copy
    free: float  # free bytes of the host's memory
    on_cpu: bool  # whether the rank's model is in host memory


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteChoice:
    """Whether a checkpoint is written in the background, and the reason."""

    background: bool
    reason: str


def choose_write(copies: Sequence[RankCopy]) -> WriteChoice:
    """Choose whether all ranks of a run write a checkpoint in the background. `copies` has one item per rank."""
    if any(copy.on_cpu for copy in copies):
        return WriteChoice(
            background=False, reason="the model is in host memory, where a background write slows training"
        )
    largest = max(copy.size for copy in copies)
    if largest < LEAST_BYTES:
        return WriteChoice(
            background=False, reason=f"a rank writes at most {shown_size(largest)}, which takes less than a second"
        )
    needed: dict[str, int] = {}
    free: dict[str, float] = {}
    for copy in copies:
        needed[copy.host] = needed.get(copy.host, 0) + copy.size
        free[copy.host] = min(copy.free, free.get(copy.host, copy.free))
    host = max(needed, key=lambda name: needed[name] / max(1.0, free[name]))
    fits = needed[host] <= USABLE_FRACTION * free[host]
    sizes = f"{shown_size(needed[host])} of {shown_size(free[host])} of free memory on host {host}"
    more = "" if fits else ", which is more than half"
    return WriteChoice(background=fits, reason=f"the copy of a checkpoint needs {sizes}{more}")


def shown_size(size: float) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 1 << 28 else f"{size / 2**20:.2f} MiB"
