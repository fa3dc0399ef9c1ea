"""The launcher of the tests itself: a rank that fails or hangs makes a test fail, and says where."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks


def summed(rank: int, world: int, factor: float) -> float:
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    return factor * total.item()


def failing(rank: int, world: int) -> None:
    if rank == 1:
        raise KeyError("what went wrong")
    dist.barrier()


def hanging(rank: int, world: int) -> None:
    if rank == 1:
        time.sleep(60)


def dying(rank: int, world: int) -> int:
    if rank == 1:
        os._exit(3)
    return 5


def test_results_come_back_in_order() -> None:
    assert run_ranks(3, summed, 2.0) == [6.0, 6.0, 6.0]


def test_a_failure_has_its_traceback() -> None:
    with pytest.raises(AssertionError, match=r"rank 1 of 2:(.|\n)*in failing(.|\n)*what went wrong"):
        run_ranks(2, failing)


def test_a_hang_shows_its_place() -> None:
    run_ranks(1, summed, 1.0)  # the server is up
    with pytest.raises(AssertionError, match=r"ranks \[0, 1\] of 2 did not end(.|\n)*in hanging"):
        run_ranks(2, hanging, timeout=5.0)


def test_a_death_is_a_failure_unless_it_is_expected() -> None:
    assert run_ranks(2, dying, dying=[1]) == [5, None]
    with pytest.raises(AssertionError):
        run_ranks(2, dying, group_timeout=3.0)
