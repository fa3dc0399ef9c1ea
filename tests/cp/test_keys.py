"""The keys that are sent: only keys that a piece of another rank reads, and both sides agree on them."""

from __future__ import annotations

import torch

from padfree.cp.keys import key_traffic, prepare_keys
from tests.cp.cases import ROWS, context_of, packed


def test_a_window_moves_only_the_keys_in_it() -> None:
    batch = packed([64], 4)
    pieces = context_of(batch, 4, 0, kind="contiguous").plan.pieces
    assert key_traffic(pieces).tolist() == [[0, 0, 0, 0], [16, 0, 0, 0], [16, 16, 0, 0], [16, 16, 16, 0]]
    assert key_traffic(pieces, window=5).tolist() == [[0, 0, 0, 0], [4, 0, 0, 0], [0, 4, 0, 0], [0, 0, 4, 0]]
    assert key_traffic(pieces, window=1).sum() == 0


def test_whole_documents_move_and_copy_nothing() -> None:
    batch = packed([16, 16, 16, 16], 4)
    for rank in range(4):
        keys = prepare_keys(context_of(batch, 4, rank, kind="balanced").plan)
        assert keys.quiet
        assert keys.selection.is_everything
        assert keys.receive == (0, 0, 0, 0)


def test_what_one_rank_sends_the_other_expects() -> None:
    batch = packed(ROWS["over three ranks"], 4)
    plans = [context_of(batch, 4, rank, kind="balanced").plan for rank in range(4)]
    keys = [prepare_keys(plan) for plan in plans]
    assert sum(sum(plan.receive) for plan in keys) > 0
    for reader in range(4):
        arrived = [
            torch.cat(
                [plans[owner].own[:0], *(plans[owner].own.narrow(0, *run) for run in keys[owner].leaving[reader])]
            )
            for owner in range(4)
        ]
        assert tuple(len(tokens) for tokens in arrived) == keys[reader].receive
        assert torch.equal(torch.cat([plans[reader].own, *arrived]), keys[reader].pool_tokens)
        for owner in range(4):
            back = keys[owner].read_elsewhere[keys[owner].returning[reader]]
            assert torch.equal(plans[owner].own[back], arrived[owner])
