"""The tokens of each rank, with their labels, weights and other values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from padfree.batch import PackedBatch, Rollout, SampleInfo
from padfree.choices import LayoutKind
from padfree.cp import attend, gather_tokens, shard
from padfree.segments import Segments
from tests.cp.cases import KINDS, ROWS, context_of, inputs_for, one_process, packed
from tests.refused import refused


def test_the_worked_example() -> None:
    """13 tokens of 5, 3 and 5 on 4 ranks: 3 pad tokens at the end and nowhere else."""
    tokens = [1, 2, 3, 4, 5, 10, 11, 12, 20, 21, 22, 23, 24]
    batch = PackedBatch(
        input_ids=torch.tensor(tokens),
        position_ids=torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3, 4]),
        labels=torch.full((13,), -100),
        weights=torch.zeros(13),
        sample_index=torch.tensor([0] * 5 + [1] * 3 + [2] * 5, dtype=torch.int32),
        segments=Segments.from_lengths([5, 3, 5]),
        samples=tuple(SampleInfo(index=i, length=n) for i, n in enumerate((5, 3, 5))),
    ).padded_to_multiple(4)
    ranks = [shard(batch, world=4, rank=rank, kind="contiguous") for rank in range(4)]
    assert [r.input_ids.tolist() for r in ranks] == [[1, 2, 3, 4], [5, 10, 11, 12], [20, 21, 22, 23], [24, 0, 0, 0]]
    assert [r.position_ids.tolist() for r in ranks] == [[0, 1, 2, 3], [4, 0, 1, 2], [0, 1, 2, 3], [4, 0, 1, 2]]
    assert [r.num_samples for r in ranks] == [3] * 4
    with pytest.raises(ValueError, match=r"padded_to_multiple\(4\)"):
        shard(batch.without_pad(), world=4, rank=0)


@given(lengths=st.lists(st.integers(0, 40), max_size=12), world=st.integers(1, 6), kind=st.sampled_from(KINDS))
def test_the_shards_of_all_ranks_are_the_pack(lengths: list[int], world: int, kind: LayoutKind) -> None:
    batch = packed(lengths, world)
    rollout = Rollout(advantages=torch.rand(batch.num_tokens))
    batch = PackedBatch(
        **{field: getattr(batch, field) for field in PackedBatch.TOKEN_FIELDS},
        segments=batch.segments,
        samples=batch.samples,
        rollout=rollout,
    )
    ranks = [shard(batch, world=world, rank=rank, kind=kind) for rank in range(world)]
    order = torch.cat([torch.arange(batch.num_tokens) if r.context.plan is None else r.context.plan.own for r in ranks])
    assert torch.equal(order.sort().values, torch.arange(batch.num_tokens))
    for field in PackedBatch.TOKEN_FIELDS:
        assert torch.equal(torch.cat([getattr(r, field) for r in ranks]), getattr(batch, field)[order])
    parts = [r.rollout.advantages for r in ranks if r.rollout is not None]
    assert torch.equal(torch.cat(parts), rollout.advantages[order])
    if world > 1:
        plan = ranks[0].context.plan
        assert torch.equal(plan.to_pack_order(order), torch.arange(batch.num_tokens))
        assert torch.equal(plan.to_rank_order(torch.arange(batch.num_tokens)), order)
        for local in ranks:
            plan = local.context.plan
            assert plan.queries.lengths.sum() == local.num_tokens == batch.num_tokens // world
            # a query segment is consecutive tokens of one sample
            for queries in local.position_ids.split(plan.queries.lengths.tolist()):
                assert torch.equal(queries, torch.arange(len(queries)) + queries[0])


def test_one_rank_keeps_the_whole_pack() -> None:
    batch = packed(ROWS["short documents"], 4)
    local = shard(batch)
    assert local.context.layout is None
    assert local.input_ids is batch.input_ids
    inputs = inputs_for(batch.num_tokens, sinks=True, window=5)
    out = attend(inputs.q, inputs.k, inputs.v, local.context, sinks=inputs.sinks, window=5)
    torch.testing.assert_close(out, one_process(inputs, batch.segments)[0])
    assert gather_tokens(out, local.context) is out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "star"}, "method: 'star' is unknown; choose one of allgather, ring, ulysses"),
        ({"world": 2, "rank": 2}, "rank: 2 is out of range for 2 context ranks; give a rank from 0 to 1"),
        ({"world": 2, "kind": "striped"}, "kind: 'striped' is unknown; choose one of"),
    ],
)
def test_settings_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shard(packed([4, 4]), **options)


def test_gathering_is_checked() -> None:
    context = context_of(packed([4, 4]), 2, 0)
    with refused("group"):
        gather_tokens(torch.zeros(4), context)
    with refused("values"):
        gather_tokens(torch.zeros(8), context)
    with refused("loss"):
        gather_tokens(torch.zeros(4), context, loss="summed")  # type: ignore[arg-type]
