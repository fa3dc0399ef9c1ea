"""Ranks agree to stop."""

from __future__ import annotations

from padfree.distributed import distributed, make_mesh
from padfree.train.signals import any_rank_wants
from tests.ranks import run_ranks


def one_of_two(rank: int, world: int) -> list[bool]:
    mesh = make_mesh("cpu")
    return [any_rank_wants(rank == 1, mesh), any_rank_wants(False, mesh)]


def test_one_rank_is_enough() -> None:
    assert run_ranks(2, one_of_two) == [[True, False], [True, False]]
    with distributed(device="cpu") as device:
        mesh = make_mesh(device)
        assert any_rank_wants(True, mesh)
        assert not any_rank_wants(False, mesh)
