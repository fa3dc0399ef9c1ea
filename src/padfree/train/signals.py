"""Agreement between ranks to stop, because signals do not reach all ranks at the same time.

One rank that has received a signal (`padfree.stop_signals`) is enough: all ranks stop after their current step.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from padfree.distributed import Mesh


def any_rank_wants(wanted: bool, mesh: Mesh) -> bool:
    """Whether `wanted` is true on any rank. Collective."""
    flag = torch.tensor(int(wanted), device=mesh.device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=mesh.loss.group)
    return bool(flag.item())
