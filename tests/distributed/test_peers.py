"""How messages name lost ranks."""

from __future__ import annotations

import pytest

from padfree.distributed.peers import _describe_loss

HOSTS = ["a", "a", "b", "b", "c"]


@pytest.mark.parametrize(
    ("silent", "hosts", "line"),
    [
        ([2, 3], HOSTS, "ranks 2 and 3 on b are gone, stuck or cut off; read the logs there"),
        ([1, 2, 3, 4], HOSTS, "rank 1 on a, ranks 2 and 3 on b, rank 4 on c are gone, stuck or cut off; read the"),
        ([1], ["a", "a"], "rank 1 is gone, stuck or cut off; read the logs there"),
        ([0, 1, 2], ["a"] * 4, "ranks 0, 1 and 2 are gone, stuck or cut off"),
        ([], HOSTS, "a peer is gone or stuck; read the logs of the other ranks"),
        (None, HOSTS, "ranks 0 and 1 on a, where the rendezvous store is, cannot be reached; read the logs there"),
    ],
)
def test_a_line_names_ranks_and_hosts(silent: list[int] | None, hosts: list[str], line: str) -> None:
    assert _describe_loss(silent, hosts).startswith(line)
