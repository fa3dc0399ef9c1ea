"""The ranks of a run agree to stop: they do not get a signal at the same moment.

One rank that has a signal (`padfree.stop_signals`) is enough: all stop after the step that they are in.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from padfree.distributed import Mesh


def any_rank_agrees(wanted: bool, mesh: Mesh) -> bool:
    """Whether any rank wants it."""
    flag = torch.tensor(int(wanted), device=mesh.device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=mesh.loss.group)
    return bool(flag.item())
