"""Let `checkpoint.asynchronous=auto` choose on this machine as for a model on a GPU and checkpoints of any size."""

from __future__ import annotations

from typing import Any

import pytest

from padfree.checkpoint import background, checkpointer
from padfree.checkpoint.background import RankCopy


def as_on_a_gpu(patch: pytest.MonkeyPatch, *, free: float, host: str = "a") -> None:
    """`free`: the free bytes of this host."""

    def on_a_gpu(**values: Any) -> RankCopy:
        return RankCopy(**{**values, "on_cpu": False, "host": host})

    patch.setattr(checkpointer, "RankCopy", on_a_gpu)
    patch.setattr(checkpointer, "free_host_memory", lambda: free)
    patch.setattr(background, "LEAST_BYTES", 0)
