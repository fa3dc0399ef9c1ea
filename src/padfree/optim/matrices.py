"""Apply a function that needs whole matrices to matrices that are sharded over ranks.

An all-to-all gathers each matrix on one rank, and a second one returns the shards of the result. For example, 5
matrices of 4 rows on 2 ranks:

    rank 0   rows 0, 1 of matrices 0 to 4   ->   whole matrices 0, 2, 4
    rank 1   rows 2, 3 of matrices 0 to 4   ->   whole matrices 1, 3

Nothing is sent if each rank holds whole matrices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from padfree.distributed.collectives import exchange_rows
from padfree.model.named_tensors import region_of


class MatrixSplit(NamedTuple):
    """How matrices are sharded over the ranks of a group: along `dim`, -2 for matrix rows and -1 for columns."""

    group: ProcessGroup
    dim: int
    sizes: tuple[int, ...]  # size of each rank's shard along `dim`


def matrix_split_of(parameter: Tensor) -> MatrixSplit | None:
    """Return how the matrices [..., A, B] of a parameter are sharded, or None if every rank holds whole matrices."""
    if not isinstance(parameter, DTensor):
        return None
    mesh, placements, found = parameter.device_mesh, parameter.placements, None
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "this rank is not in the device mesh of its own parameter"
    for mesh_dim, placement in enumerate(placements):
        dim = getattr(placement, "dim", 0) - parameter.ndim
        if not placement.is_shard() or dim < -2 or mesh.size(mesh_dim) == 1:
            continue
        assert found is None, f"{placements}: matrices must be sharded along at most one mesh dimension"
        sizes = []
        for rank in range(mesh.size(mesh_dim)):
            there = [rank if each == mesh_dim else index for each, index in enumerate(coordinate)]
            part = region_of(parameter.shape, placements, mesh.shape, there)[dim]
            sizes.append(part.stop - part.start)
        found = MatrixSplit(mesh.get_group(mesh_dim), dim, tuple(sizes))
    return found


def on_whole_matrices(
    function: Callable[[Tensor], Tensor], parts: Tensor, split: MatrixSplit | None, first: int = 0
) -> Tensor:
    """Apply `function` to n matrices [A, B] that are sharded over ranks. Collective.

    `function` maps [m, A, B] to the same shape. `parts` and the result [n, a, b] are this rank's shards. Matrix i is
    computed by rank (first + i) % group size.
    """
    if split is None:
        return function(parts)
    group, dim, sizes = split
    ranks, own = range(group.size()), group.rank()
    mine = [slice((rank - first) % group.size(), None, group.size()) for rank in ranks]  # the matrices of each rank
    counts = [len(range(len(parts))[each]) for each in mine]
    shapes = [[counts[own], *parts.shape[1:]] for _ in ranks]
    for shape, size in zip(shapes, sizes, strict=True):
        shape[dim] = size
    send = [parts[each].numel() for each in mine]
    receive = [torch.Size(shape).numel() for shape in shapes]
    arrived = exchange_rows(torch.cat([parts[each].reshape(-1) for each in mine]), send, receive, group)
    pieces = [piece.view(shape) for piece, shape in zip(torch.split(arrived, receive), shapes, strict=True)]
    whole = torch.cat(pieces, dim)
    if counts[own]:
        whole = function(whole)
    leaving = torch.cat([piece.reshape(-1) for piece in torch.split(whole, list(sizes), dim)])
    returned = torch.split(exchange_rows(leaving, receive, send, group), send)
    results = torch.empty_like(parts)
    for each, piece in zip(mine, returned, strict=True):
        results[each] = piece.view(results[each].shape)
    return results
