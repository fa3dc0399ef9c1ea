"""Attention of nodes to their paths on a GPU: every backend there against the reference in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from padfree.attention.prefix_attention import prefix_attention, prepare_prefix_keys
from padfree.attention.selection import choose_backend
from padfree.batch import PrefixKeys
from padfree.segments import Segments

LENGTHS = [300, 130, 64, 257, 1, 190]
PARENTS = np.array([-1, 0, 1, 1, 0, -1])


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["torch", "fa4"])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("long_prefixes", [(), (0, 1)])
def test_against_the_reference(backend: str, window: int | None, long_prefixes: tuple[int, ...]) -> None:
    need(backend)
    segments = Segments.from_lengths(LENGTHS, parents=PARENTS, device="cuda")
    keys = prepare_prefix_keys(segments, np.array(long_prefixes, dtype=np.int64), paged=bool(long_prefixes))
    assert keys is not None
    compare(segments, keys, backend, 128, window=window)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("lengths", [LENGTHS, [2000, 1500, 700, 1025, 1, 1800]], ids=["short", "long"])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_pages_against_the_reference(head_dim: int, lengths: list[int], softcap: float | None) -> None:
    """Query heads of long segments are not packed; head size 256 is not read in pages."""
    need("fa4", head_dim)
    segments = Segments.from_lengths(lengths, parents=PARENTS, device="cuda")
    keys = prepare_prefix_keys(segments, paged=True)
    assert keys is not None
    compare(segments, keys, "fa4", head_dim, softcap=softcap)


@pytest.mark.gpu
def test_a_leaf_changes_no_other_bitwise_even_if_it_is_infinite() -> None:
    need("fa4")
    segments = Segments.from_lengths(LENGTHS, parents=PARENTS, device="cuda")
    keys = prepare_prefix_keys(segments, paged=True)
    assert keys is not None
    q, k, v = (torch.randn(sum(LENGTHS), heads, 128, device="cuda").bfloat16() for heads in (8, 2, 2))
    before = prefix_attention(q, k, v, segments, keys, backend="fa4")
    changed = slice(*segments.offsets[3:5].tolist())
    for tensor in (q, k, v):
        tensor[changed] = torch.inf
    after = prefix_attention(q, k, v, segments, keys, backend="fa4")
    others = torch.ones(len(q), dtype=torch.bool, device="cuda")
    others[changed] = False
    assert torch.equal(before[others], after[others])


def need(backend: str, head_dim: int = 128) -> None:
    try:
        choose_backend("cuda", torch.bfloat16, head_dim, requested=backend)
    except ValueError as error:
        pytest.skip(str(error))


def compare(segments: Segments, keys: PrefixKeys, backend: str, head_dim: int, **options: Any) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, dout = (
        torch.randn(int(segments.offsets[-1]), heads, head_dim, device="cuda", generator=generator).bfloat16()
        for heads in (8, 2, 2, 8)
    )
    found, right = [], []
    for results, dtype, chosen in ((found, torch.bfloat16, backend), (right, torch.float64, "reference")):
        leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in (q, k, v)]
        out = prefix_attention(*leaves, segments, keys, backend=chosen, **options)
        results += [out.detach(), *torch.autograd.grad(out, leaves, dout.to(dtype))]
    for one, other in zip(found, right, strict=True):
        assert float((one.double() - other).abs().max()) < 0.02 * float(other.abs().max())
