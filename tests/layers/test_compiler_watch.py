"""The compiler watch: number of compilations, and the callback when one begins."""

from __future__ import annotations

import torch
from torch import Tensor

from padfree.layers.compiler_watch import CompilerWatch


def test_compilations_are_counted_and_announced() -> None:
    torch._dynamo.reset()
    begun: list[int] = []

    @torch.compile(backend="eager", dynamic=False)
    def doubled(x: Tensor) -> Tensor:
        return x * 2

    with CompilerWatch(lambda: begun.append(1)) as watch:
        doubled(torch.ones(3))
        doubled(torch.ones(3))
        assert watch.count == len(begun) == 1
        assert watch.take()["graphs"] == 1
        doubled(torch.ones(4))
        found = watch.take()
        assert found["graphs"] == 1
        assert found["seconds"] >= 0
    doubled(torch.ones(5))
    assert watch.count == 0
    assert len(begun) == 2


def test_it_may_be_forgotten_meanwhile() -> None:
    with CompilerWatch():
        torch._dynamo.reset()
