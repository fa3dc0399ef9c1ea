"""Run the CUDA code path of the head on the CPU, and compare results.

CUDA has bfloat16 matmuls with float32 results, which the CPU lacks; these functions emulate them.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from padfree.head import chunks, tiles


def cuda_matmul(left: Tensor, right: Tensor, out: Tensor, *, accumulate: bool = False) -> None:
    assert left.dtype == right.dtype
    assert out.dtype in (left.dtype, torch.float32)
    result = left.float() @ right.float()
    out.copy_(result + out if accumulate else result)


def cuda_rounded_matmul(left: Tensor, right: Tensor, out: Tensor) -> None:
    assert left.dtype == right.dtype == out.dtype
    out.copy_(left.float() @ right.float())


def imitate_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the CPU take the CUDA code path."""
    monkeypatch.setattr(tiles.ScoringTask, "operand_dtype", property(lambda task: task.hidden.dtype))
    for module in (tiles, chunks):
        monkeypatch.setattr(module, "matmul", cuda_matmul)
        monkeypatch.setattr(module, "rounded_matmul", cuda_rounded_matmul)


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor], atol: float, rtol: float) -> None:
    """`atol` is relative to the largest number of each tensor, or to 1."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        scale = max(1.0, float(tensor.abs().max())) if tensor.numel() else 1.0
        torch.testing.assert_close(
            actual[name], tensor, atol=atol * scale, rtol=rtol, msg=lambda text, name=name: f"{name}: {text}"
        )
