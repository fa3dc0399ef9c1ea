"""The choice of `checkpoint.asynchronous=auto`: whether to write a checkpoint in the background.

Before a background write, each rank copies its tensors to host memory. The copies of all ranks on a host may take at
most half of the free memory. For example, two ranks that copy 1.5 GiB each need 6 GiB of free memory on their host.

Small checkpoints, and models in host memory, are written synchronously. docs/experiments/background-checkpoints.md
gives the reasons.
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
    """What a background write needs on one rank: a copy of the checkpoint's tensors in host memory."""

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
    """Choose for all ranks whether to write a checkpoint in the background. `copies`: the copy of each rank."""
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
