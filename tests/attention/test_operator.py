"""Attention as an operator: the same numbers as `varlen_attention`, and what the compiler requires of an operator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from padfree.attention import varlen_attention
from padfree.attention.operator import self_attention
from padfree.segments import Segments

SEGMENTS = Segments.from_lengths([5, 1, 9, 3], pad_length=2)
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaled": {"scale": 0.3},
    "window": {"window": 4},
    "a window longer than any sample": {"window": 40},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "reference": {"backend": "reference", "sinks": True, "window": 3},
}


def inputs(sinks: bool) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(20, 4, 16), (20, 2, 16), (20, 2, 16), *([(4,)] if sinks else [])]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_varlen_attention(name: str) -> None:
    options = {"scale": None, "window": None, "softcap": None, "backend": "auto", **CASES[name]}
    with_sinks = options.pop("sinks", False)
    results = []
    for call in (
        lambda q, k, v, sinks: self_attention(q, k, v, SEGMENTS, sinks=sinks, **options),
        lambda q, k, v, sinks: varlen_attention(q, k, v, SEGMENTS, SEGMENTS, sinks=sinks, **options),
    ):
        leaves = inputs(with_sinks)
        out = call(*leaves[:3], leaves[3] if with_sinks else None)
        (out * torch.arange(out.numel()).view_as(out).cos()).sum().backward()
        results.append([out, *(leaf.grad for leaf in leaves)])
    for mine, expected in zip(*results, strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("with_sinks", [False, True])
def test_the_compiler_may_rely_on_shapes_strides_and_gradients(with_sinks: bool) -> None:
    leaves = inputs(with_sinks)
    arguments = (
        *leaves[:3], leaves[3] if with_sinks else None, SEGMENTS.cu_seqlens, SEGMENTS.longest, 0.25, None, None,
        "auto",
    )  # fmt: skip
    torch.library.opcheck(torch.ops.padfree.self_attention.default, arguments)
