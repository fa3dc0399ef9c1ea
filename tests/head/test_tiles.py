"""The helpers of the loops over tiles."""

from __future__ import annotations

import pytest
import torch

from padfree.head.tiles import matmul, parts_of, rounded_matmul


def test_parts() -> None:
    assert list(parts_of(10, 4)) == [(0, 4), (4, 8), (8, 10)]
    assert list(parts_of(10, 4, 3)) == [(3, 7), (7, 10)]
    assert list(parts_of(0, 4)) == []


def test_products() -> None:
    left, right = torch.randn(3, 5), torch.randn(5, 4)
    memory = torch.full((3, 8), 7.0)
    out = memory[:, :4]  # a part of something wider, as a tile is
    matmul(left, right, out)
    torch.testing.assert_close(out, left @ right)
    matmul(left, right, out, accumulate=True)
    torch.testing.assert_close(out, 2 * left @ right)
    assert (memory[:, 4:] == 7).all()
    rounded = torch.empty(3, 4, dtype=torch.bfloat16)
    rounded_matmul(left, right, rounded)
    assert torch.equal(rounded, (left @ right).bfloat16())


@pytest.mark.gpu
def test_cuda_multiplies_bfloat16_into_float32() -> None:
    left = torch.randn(130, 4096, device="cuda").bfloat16()
    right = torch.randn(4096, 65, device="cuda").bfloat16()
    exact = left.double() @ right.double()
    memory = torch.full((130, 128), 7.0, device="cuda")
    out = memory[:, :65]
    matmul(left, right, out)
    assert (out - exact).norm() < 1e-5 * exact.norm()
    matmul(left, right, out, accumulate=True)
    assert (out - 2 * exact).norm() < 1e-5 * exact.norm()
    assert (memory[:, 65:] == 7).all()
