"""Process groups, collectives on tensors, and the handling of lost peers."""

from padfree.distributed.collectives import Ring, all_gather_rows, exchange_rows, gather_objects, reduce_scatter_rows
from padfree.distributed.mesh import Axis, Mesh, distributed, init_distributed, make_mesh
from padfree.distributed.peers import PeerLostError, failing_together, raise_together, watching

__all__ = [
    "Axis",
    "Mesh",
    "PeerLostError",
    "Ring",
    "all_gather_rows",
    "distributed",
    "exchange_rows",
    "failing_together",
    "gather_objects",
    "init_distributed",
    "make_mesh",
    "raise_together",
    "reduce_scatter_rows",
    "watching",
]
