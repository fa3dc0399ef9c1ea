"""Exchange rows of a tensor between context ranks, with gradients.

The rows of all ranks are numbered globally. A rank may need any rows, in any order and repeatedly, and receives each
row once. For example, a rank that needs the rows 4, 0, 4 receives the rows 0, 4. It then repeats and reorders them.

In the backward pass, the gradients of received rows return to the owners of the rows, which sum them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from padfree.attention.copies import copies_of, take_copies
from padfree.batch import Copies, RowExchange
from padfree.distributed import exchange_rows
from padfree.errors import UserError

Indices = NDArray[np.int64]


def plan_rows(
    owner: Indices, row: Indices, wanted: Sequence[Indices], rank: int, group: Any, device: torch.device
) -> tuple[RowExchange, Copies]:
    """Return the rows that rank `rank` sends and receives, and the order in which it uses the received rows.

    Global row i is row `row[i]` of the tensor on rank `owner[i]`. `wanted[r]` are the global rows that rank r needs.
    """
    world = len(wanted)
    order = np.lexsort((row, owner))
    position = np.empty_like(order)
    position[order] = np.arange(len(order))
    needed = [order[np.unique(position[rows])] for rows in wanted]  # each row once, ordered by owner
    mine = [rows[owner[rows] == rank] for rows in needed]
    own = needed[rank]
    counts = np.bincount(owner[own], minlength=world)
    place = np.zeros(len(owner), dtype=np.int64)
    place[own] = np.arange(len(own))
    exchange = RowExchange(
        leaving=copies_of(row[np.concatenate(mine)], int((owner == rank).sum()), device),
        send=tuple(map(len, mine)),
        receive=tuple(counts.tolist()),
        group=group,
    )
    return exchange, copies_of(place[wanted[rank]], len(own), device)


def receive_rows(tensor: Tensor, exchange: RowExchange) -> Tensor:
    """Return the rows [received, ...] that this rank needs. `tensor` [n, ...] holds the rows that this rank owns.

    Collective: all ranks of the group must call it.
    """
    if exchange.group is None:
        raise UserError(
            "group",
            f"is not set for {len(exchange.send)} context ranks",
            "pass the process group of the context ranks to shard()",
        )
    leaving = take_copies(tensor, exchange.leaving)
    received: Tensor = _ExchangeRows.apply(leaving, exchange)  # type: ignore[no-untyped-call]
    return received


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaving: Tensor, exchange: RowExchange) -> Tensor:
        ctx.exchange = exchange
        return exchange_rows(leaving, exchange.send, exchange.receive, exchange.group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        exchange: RowExchange = ctx.exchange
        return exchange_rows(gradient, exchange.receive, exchange.send, exchange.group), None
