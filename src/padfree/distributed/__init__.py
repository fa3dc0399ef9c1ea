"""Processes, their groups, and moving rows between them."""

from padfree.distributed.collectives import (
    PeerLostError,
    Ring,
    all_gather_rows,
    exchange_rows,
    failing_together,
    raise_together,
    reduce_scatter_rows,
    watching,
)
from padfree.distributed.mesh import Axis, Mesh, distributed, init_distributed, make_mesh

__all__ = [
    "Axis",
    "Mesh",
    "PeerLostError",
    "Ring",
    "all_gather_rows",
    "distributed",
    "exchange_rows",
    "failing_together",
    "init_distributed",
    "make_mesh",
    "raise_together",
    "reduce_scatter_rows",
    "watching",
]
