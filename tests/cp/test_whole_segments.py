"""Whole samples on one rank each, and back: nothing is lost, and the bytes match the formula."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from padfree.choices import LayoutKind
from padfree.cp import from_whole_segments, make_layout, mixer_bytes, shard, to_whole_segments, whole_segments
from padfree.cp.whole_segments import assign_segments, plan_moves
from padfree.segments import Segments
from padfree.testing.models import row
from tests.ranks import run_ranks
from tests.refused import refused

LENGTHS = [9, 3, 1, 12, 7, 10]
KINDS: tuple[LayoutKind, ...] = ("contiguous", "headtail", "balanced")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [2, 4])
def test_every_sample_is_on_one_rank_and_ranks_are_balanced(kind: LayoutKind, world: int) -> None:
    segments = Segments.from_lengths(LENGTHS, pad_length=6)
    layout = make_layout(segments, world, kind)
    ranks = assign_segments(layout, segments)
    loads = np.bincount(ranks, weights=LENGTHS, minlength=world)
    assert loads.max() <= sum(LENGTHS) / world + max(LENGTHS) / 2
    moves = [plan_moves(layout, segments, rank) for rank in range(world)]
    for rank, each in enumerate(moves):
        assert each.lengths == tuple(np.array(LENGTHS)[ranks == rank])
        assert sorted(each.arriving) == list(range(sum(each.lengths)))
        assert [other.receive[rank] for other in moves] == list(each.send)
    assert sum(sum(each.send) for each in moves) == sum(LENGTHS), "every real token is sent once, and no pad"


def test_a_sample_longer_than_a_share_is_refused_with_a_fix() -> None:
    segments = Segments.from_lengths([30, 2])
    with refused("parallel.context"):
        assign_segments(make_layout(segments, 2, "balanced"), segments)


def there_and_back(rank: int, world: int, lengths: Sequence[int], total: int) -> dict[str, Any]:
    batch = row(lengths).padded_to(total)
    width = 3
    found: dict[str, Any] = {"bytes": {}, "formula": {}}
    for kind in KINDS:
        sent = 0
        exchange = whole_segments.exchange_rows

        def counting(
            tensor: torch.Tensor, send: Any, receive: Any, group: Any, exchange: Any = exchange
        ) -> torch.Tensor:
            nonlocal sent
            sent += (sum(send) - send[rank]) * tensor[:1].numel() * tensor.element_size()
            return exchange(tensor, send, receive, group)

        local = shard(batch, world=world, rank=rank, group=dist.group.WORLD, kind=kind)
        context = local.context
        values = torch.randn(local.num_tokens, width, dtype=torch.float64, requires_grad=True)
        ids, _ = to_whole_segments(local.input_ids, context)
        own = assign_segments(context.layout, batch.segments) == rank  # type: ignore[arg-type]
        expected = [ids for ids, mine in zip(batch.unpack(batch.input_ids), own, strict=True) if mine]
        assert torch.equal(ids, torch.cat([*expected, ids[:0]]))
        whole_segments.exchange_rows = counting
        moved, _ = to_whole_segments(values, context)
        back = from_whole_segments(moved * 2, context)
        forward = sent
        real = (local.sample_index < len(lengths))[:, None]
        assert torch.equal(back, values * 2 * real)
        weights = torch.randn_like(back)
        (back * weights).sum().backward()
        whole_segments.exchange_rows = exchange
        assert torch.equal(values.grad, weights * 2 * real)  # type: ignore[arg-type]
        assert sent == 2 * forward
        formula = mixer_bytes(context.layout, batch.segments, width=width, element_size=8)  # type: ignore[arg-type]
        found["bytes"][kind], found["formula"][kind] = forward, int(formula[rank])
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_tokens_go_there_and_back_with_their_gradients_and_the_bytes_of_the_formula(world: int) -> None:
    for found in run_ranks(world, there_and_back, LENGTHS, 48):
        assert found["bytes"] == found["formula"]
