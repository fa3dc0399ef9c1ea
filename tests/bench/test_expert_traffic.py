"""`bench/expert_traffic.py`: what the kernel counts on the connections of the ranks is what a dry run predicts."""

from __future__ import annotations

import importlib
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks

FOLDER = Path(__file__).parents[2] / "bench"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("expert_traffic")


def test_the_kernel_counts_each_byte_once(bench: Any) -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        with socket.create_connection(listening.getsockname()) as one, listening.accept()[0] as other:
            before = bench.bytes_sent()
            one.sendall(b"x" * 12_345)
            other.sendall(b"y" * 55)
            arrived = [receiver.recv(size, socket.MSG_WAITALL) for receiver, size in ((other, 12_345), (one, 55))]
            assert [len(each) for each in arrived] == [12_345, 55]
            assert bench.bytes_sent() - before == 12_400


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)])
def test_ranks_send_what_a_dry_run_predicts(bench: Any, world: int) -> None:
    """With even routes, gloo's headers are the only difference. Other routes differ from the assumption a little."""
    rows, *others = run_ranks(world, bench.measure, 2, 512)
    assert all(each == rows for each in others)
    layouts = {(row.expert, row.checkpointing, row.routes): row for row in rows}
    experts = [size for size in (1, 2, 4, 8) if size <= world]
    assert len(layouts) == len(rows) == 4 * len(experts)
    for (expert, _, routes), row in layouts.items():
        assert (row.tokens > 0) == (expert > 1)
        assert 1.0 < row.ratio < 1.01 or (routes == "own" and expert > 1 and row.ratio == pytest.approx(1, abs=0.1)), (
            row
        )
    for checkpointing in ("none", "full"):
        weights = [layouts[expert, checkpointing, "even"].weights for expert in experts]
        tokens = [layouts[expert, checkpointing, "even"].tokens for expert in experts]
        assert weights == sorted(weights, reverse=True)
        assert tokens == sorted(tokens)
