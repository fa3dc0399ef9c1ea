"""Collectives, a ring that overlaps with computation, and peers that die or hang."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from padfree.distributed import PeerLostError, Ring, all_gather_rows, exchange_rows, reduce_scatter_rows, watching
from tests.ranks import run_ranks


def moved(rank: int, world: int) -> dict[str, Any]:
    # Rank order within a group is the group's, not the world's.
    group = dist.new_group(list(range(world))[::-1])
    place = dist.get_rank(group)
    tensor = 10.0 * place + torch.arange(6).reshape(2, 3)
    results: dict[str, Any] = {"place": place}
    results["gathered"] = all_gather_rows(tensor.T.contiguous().T, group).tolist()
    results["reduced"] = reduce_scatter_rows(torch.full((world * 2, 3), float(place)).cumsum(0), group).tolist()
    # rank r sends r + s elements to rank s, all of value r
    send = [place + s for s in range(world)]
    given = torch.full((sum(send), 2), float(place), dtype=torch.bfloat16)
    results["exchanged"] = exchange_rows(given, send, send, group)[:, 0].float().tolist()
    nothing = [0] * world
    results["nothing"] = tuple(exchange_rows(torch.zeros(0, 2), nothing, nothing, group).shape)

    keys, gradients = Ring(group), Ring(group, tag=1)
    block, total, seen = torch.tensor([float(place)]), torch.zeros(1), []
    for step in range(world):
        if step + 1 < world:
            keys.post(block)
        seen.append(int(block.item()))
        if step:
            (total,) = gradients.collect()
        total += 1 + place
        gradients.post(total)
        if step + 1 < world:
            (block,) = keys.collect()
    results["seen"], results["home"] = seen, gradients.collect()[0].item()
    return results


@pytest.mark.parametrize("world", [2, 3])
def test_elements_arrive_in_the_order_of_the_group(world: int) -> None:
    for result in run_ranks(world, moved):
        place = result["place"]
        assert result["gathered"] == [[10.0 * r + 3 * i + j for j in range(3)] for r in range(world) for i in range(2)]
        total = sum(range(world))
        assert result["reduced"] == [[total * (2 * place + i + 1.0)] * 3 for i in range(2)]
        assert result["exchanged"] == [float(r) for r in range(world) for _ in range(r + place)]
        assert result["nothing"] == (0, 2)
        assert result["seen"] == [(place - step) % world for step in range(world)]
        assert result["home"] == sum(range(1, world + 1))


def operations(group: Any) -> dict[str, Any]:
    tensor = torch.ones(2, 3)

    def around() -> None:
        ring = Ring(group)
        ring.post(tensor)
        ring.collect()

    return {
        "all_gather_rows": lambda: all_gather_rows(tensor, group),
        "reduce_scatter_rows": lambda: reduce_scatter_rows(tensor, group),
        "exchange_rows": lambda: exchange_rows(tensor, [1, 1], [1, 1], group),
        "Ring": around,
    }


def outlived(rank: int, world: int, manner: str) -> dict[str, tuple[str, float]]:
    group = dist.group.WORLD
    dist.barrier()
    if rank == 1:
        if manner == "hangs":
            time.sleep(6)
        os._exit(3)
    found = {}
    for name, operation in operations(group).items():
        begin = time.monotonic()
        with pytest.raises(PeerLostError) as caught:
            operation()
        found[name] = str(caught.value), time.monotonic() - begin
    return found


@pytest.mark.parametrize("manner", ["dies", "hangs"])
def test_a_lost_peer_is_reported_in_one_line_within_the_timeout(manner: str) -> None:
    found = run_ranks(2, outlived, manner, group_timeout=2.0, dying=[1])[0]
    assert set(found) == set(operations(None))
    for name, (message, seconds) in found.items():
        assert seconds < 5.0
        assert "\n" not in message
        assert message.startswith(f"rank 0: {name}")
        assert "in the group of ranks [0, 1] failed after" in message
        assert "read the logs of ranks [1]" in message


def test_other_errors_stay_what_they_are() -> None:
    class Group:
        pass

    with pytest.raises(RuntimeError, match=r"^shapes differ$") as caught, watching("anything", Group()):  # type: ignore[arg-type]
        raise RuntimeError("shapes differ")
    assert not isinstance(caught.value, PeerLostError)
